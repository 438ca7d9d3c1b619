"""The rules of the house: notebooks and package say the same, stay small, and are formatted.

Each test names all offenders."""

import ast
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs import PICTURES, site_pages
from notebooks import NOTEBOOKS, ROOT, cells, is_exported
from readme import guide_pages, readme
from rooms import module_path, modules, notebooks_of_modules

HEAVY = {"torch", "transformers", "polars", "plotly", "vllm", "ray"}
RUN_PROCESS = (
    "records",
    "knobs",
    "base.clock",
    "base.ledger",
    "base.ledger_reading",
    "base.commands",
    "environments.tasks",
    "reward",
    "curriculum",
    "staleness",
    "loop.queue",
    "loop.config",
    "loop.config_files",
    "environments.rollout_turns",
    "loop.state",
    "loop.loop",
    "runtime.actors",
    "views.sinks",
)
MOST_LINES = {"functions": 60, "one class or one table": 150}
TEXT = (".py", ".ipynb", ".md", ".toml", ".ini", ".lock", ".json", ".jsonl", "")


def exported(path: Path) -> list[dict]:
    "The cells that go into the package."
    return [cell for cell in cells(path, "code") if is_exported(cell)]


def offenders(check) -> list[str]:
    "What `check` says of each notebook, with the notebook's name before it."
    return [f"{path.relative_to(ROOT / 'nbs')}: {said}" for path in NOTEBOOKS for said in check(path)]


def test_package_is_what_the_notebooks_export(tmp_path):
    """Exporting into an empty package gives byte for byte the package that is here:
    no edits by hand, no module without a notebook."""
    for name in ("nbs", "settings.ini", "setup.py", "README.md"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "rlbench").mkdir()
    shutil.copy(ROOT / "rlbench/__init__.py", tmp_path / "rlbench")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    export = "import gc; gc.disable(); from nbdev.doclinks import nbdev_export; nbdev_export()"
    subprocess.run([sys.executable, "-c", export], cwd=tmp_path, check=True, timeout=400, env=environment)
    there = {path.relative_to(tmp_path / "rlbench") for path in tmp_path.glob("rlbench/**/*.py")}
    here = {
        path.relative_to(ROOT / "rlbench")
        for path in ROOT.glob("rlbench/**/*.py")
        if "data" not in path.relative_to(ROOT / "rlbench").parts
    }
    assert here - there == set(), "modules without a notebook"
    assert there - here == set(), "notebooks that were not exported"
    differ = [
        str(name)
        for name in here
        if not filecmp.cmp(ROOT / "rlbench" / name, tmp_path / "rlbench" / name, shallow=False)
    ]
    assert not differ, f"not what the notebooks export: {differ}; run nbdev_export"


def unclean(path: Path):
    "What a stored notebook should not hold."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        yield "not in format 4.5"
    if not set(notebook["metadata"]) <= {"kernelspec"}:
        yield f"metadata {set(notebook['metadata'])}"
    ids = [cell["id"] for cell in notebook["cells"]]
    if len(set(ids)) != len(ids):
        yield "a cell id twice"
    for cell in notebook["cells"]:
        if not re.fullmatch(r"[a-z][a-z0-9]*([-_.][A-Za-z0-9]+)+", cell["id"]):
            yield f"{cell['id']}: not a readable id; name the cell in the file, like its neighbours: {ids[0]}"
        if cell["metadata"]:
            yield f"{cell['id']}: metadata"
        if list(cell) != sorted(cell):
            yield f"{cell['id']}: keys in another order than nbdev_clean writes; run it on this notebook"
        if cell.get("execution_count") is not None or any(
            output.get("execution_count") is not None for output in cell.get("outputs", ())
        ):
            yield f"{cell['id']}: an execution count"
        for output in cell.get("outputs", ()):
            text = json.dumps(output)
            if output["output_type"] == "error":
                yield f"{cell['id']}: an error is stored"
            if any("widget" in kind for kind in output.get("data", ())):
                yield f"{cell['id']}: a widget is stored"
            if len(text) > 30_000:
                yield f"{cell['id']}: output over 30 kB"
            if re.search(r"/tmp/|0x[0-9a-f]{9,}", text):
                yield f"{cell['id']}: a path or an address in an output"
    if path.stat().st_size > (65_000 if path.stem == "index" else 170_000):
        yield f"{path.stat().st_size} bytes"


def test_notebooks_are_clean():
    "Readable cell ids, no traces of one execution, no widget state, nothing heavy."
    assert "\n".join(offenders(unclean)) == ""


def is_import(node: ast.stmt) -> bool:
    "An import, or the imports that only type checkers read."
    return (
        isinstance(node, (ast.Import, ast.ImportFrom))
        or isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
    )


def broken_cells(path: Path):
    "Rules of code cells that a notebook breaks."
    for cell in cells(path, "code"):
        lines = cell["source"].splitlines()
        directives = [line for line in lines if re.match(r"\s*#\s*\|", line)]
        for line in directives:
            if not re.fullmatch(r"#\| (export|hide|default_exp \S+)", line):
                yield f"{cell['id']}: {line}"
        if directives and lines[0] != directives[0]:
            yield f"{cell['id']}: the directive is not the first line"
        if len(lines) > 1 and "default_exp" in lines[0]:
            yield f"{cell['id']}: default_exp has a cell of its own"
        if re.search(r"^\s*from\s+\S+\s+import\s+\*", cell["source"], re.M):
            yield f"{cell['id']}: star import"
    for cell in exported(path):
        body = ast.parse(cell["source"]).body
        imports = [node for node in body if is_import(node)]
        if len(imports) not in (0, len(body)):
            yield f"{cell['id']}: imports and code in one cell"
        whole = len(body) == 1 and isinstance(
            body[0], (ast.ClassDef, ast.Assign, ast.AnnAssign)
        )  # a class or a table is not cut
        most = MOST_LINES["one class or one table" if whole else "functions"]
        length = sum(1 for line in cell["source"].splitlines()[1:] if line.strip())
        if length > most and not imports:
            yield (
                f"{cell['id']}: {length} lines that are not blank, {most} at most; move a part into a cell of "
                f"its own before it"
            )
        if "@patch" in cell["source"]:
            yield f"{cell['id']}: @patch"


def test_code_cells_keep_the_rules():
    "One idea per exported cell, imports in cells of their own, no star, only three directives."
    assert "\n".join(offenders(broken_cells)) == ""


def untold(path: Path):
    "What an exporting notebook should say and does not."
    if not exported(path):
        return
    all_cells = cells(path)
    last = [cell["id"] for cell in all_cells].index(exported(path)[-1]["id"])
    if not re.match(r"# \S.*\n\n> \S.*", all_cells[0]["source"]):
        yield "no title and purpose"
    if not any(cell["source"].startswith("## Limits") for cell in all_cells[last:]):
        yield "the code is not followed by ## Limits"


def test_notebooks_tell_what_they_are():
    "Exporting notebooks have a title, one line of purpose, and limits at the end."
    assert offenders(untold) == []


def careless(module: str):
    "Rules of modules that a module breaks."
    text = module_path(module).read_text(encoding="utf-8")
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield "no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{node.name}: no docstring"
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if (
                    isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
                    and not part.name.startswith("_")
                    and not part.decorator_list
                    and not ast.get_docstring(part)
                    and len(part.body) > 1
                ):
                    yield f"{node.name}.{part.name}: no docstring"
        if (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and node.value is not None
            and ast.unparse(node.value) in ("[]", "{}", "list()", "dict()", "set()")
        ):
            yield f"module-level state: {ast.unparse(node)}"
    if re.search(r"^\s*global\s", text, re.M):
        yield "global"
    if re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text):
        yield "unfinished"


def test_modules_keep_the_rules():
    "Public things say what they are; nothing unfinished; no state in the module."
    assert [f"{module}: {said}" for module in modules() for said in careless(module)] == []


def test_formatter_and_linter_have_nothing_to_say():
    "`ruff format` and `ruff check` over notebooks, package and tests, by ruff.toml."
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize(
    "wrong", ["import os\n", "x  = 1\n", "f = lambda: 1\n"], ids=["unused", "unformatted", "lambda"]
)
def test_formatter_and_linter_look(tmp_path, wrong):
    "With the project's settings they find what they are there for."
    (tmp_path / "wrong.py").write_text(f'"""A module."""\n\n{wrong}')
    found = [
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", ROOT / "ruff.toml", tmp_path / "wrong.py"],
            capture_output=True,
        ).returncode
        for command in (["format", "--check"], ["check"])
    ]
    assert any(found)


def loaded(statement: str) -> set[str]:
    "Top-level modules in a fresh process after a statement."
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=400, cwd=ROOT
    )
    return set(found.stdout.split())


def test_import_is_light():
    """`import rlbench` brings in none of the heavy packages, and none of its own modules:
    each comes when its name is used."""
    assert loaded("import rlbench") & (HEAVY | {"numpy", "pydantic"}) == set()
    script = "import sys, rlbench\nprint(*(name for name in sys.modules if name.startswith('rlbench.')))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=400, cwd=ROOT
    )
    assert found.stdout.split() == []


def test_run_process_needs_no_torch():
    """The process that owns a run always answers, so it never imports what can take it down:
    of its modules, one after the other, none brings that in."""
    heavy = {"torch", "transformers", "plotly", "vllm", "ray"}
    script = (
        f"import sys\n"
        f"for name in {RUN_PROCESS}:\n"
        f"    __import__('rlbench.' + name)\n"
        f"    print(name, *{heavy} & set(sys.modules))"
    )
    lines = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=400, cwd=ROOT
    ).stdout.splitlines()
    assert lines == list(RUN_PROCESS)


PUBLIC = (
    "ConfigError",
    "Fate",
    "Knob",
    "Outcome",
    "Rollout",
    "Run",
    "RunConfig",
    "Task",
    "ablate",
    "attach",
    "compare",
    "load_config",
    "run",
    "runs",
)


def test_public_names():
    "What `rlbench` offers is decided here, not by accident; editors and the run time find each name in the same place."
    import rlbench

    assert sorted(rlbench.__all__) == sorted(PUBLIC) and len(PUBLIC) <= 14
    assert all(getattr(rlbench, name) is not None for name in rlbench.__all__)
    # public and not in __all__: `rl.open`, because a star import must not hide Python's own, and `rl.serve_tinker`
    listed = [name for name in dir(rlbench) if not name.startswith("_")]
    assert listed == sorted([*PUBLIC, "open", "serve_tinker"]) and callable(rlbench.runs) and callable(rlbench.open)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlbench.nothing
    typed = {}
    for node in ast.walk(ast.parse((ROOT / "rlbench/__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlbench"):
            for name in node.names:
                typed[name.asname or name.name] = f"{node.module}:{name.name}" if name.asname else node.module
    assert typed == rlbench._HOMES


def test_readme_is_the_index():
    "README.md is made from nbs/index.ipynb: make readme."
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme(ROOT / "nbs/index.ipynb"), "run: make readme"


def test_readme_is_short():
    "The front page is read in a few minutes: 1,500 words, and the three commands stand before the first picture."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1500
    before_the_picture = text.partition("![")[0]
    assert all(command in before_the_picture for command in ("make run", "make test", "make lab"))


def test_guide_of_the_package_is_the_guide():
    "data/guide, which `rlbench guide` prints, is made from nbs/guide: make readme."
    stored = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "data/guide").iterdir()}
    assert stored == guide_pages(), "run: make readme"


LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]*)\)")  # inside the project
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def anchors(text: str) -> set[str]:
    "What a link may name after `#`: JupyterLab keeps capitals, sites of Markdown do not."
    titles = {re.sub(r"[`*]", "", title).replace(" ", "-") for title in HEADING.findall(text)}
    return titles | {re.sub(r"[^\w-]", "", title.lower()) for title in titles}


def text_of(path: Path) -> str:
    "The Markdown of a page: of a notebook, that of its cells."
    if path.suffix == ".ipynb":
        return "\n\n".join(cell["source"] for cell in cells(path, "markdown"))
    return path.read_text(encoding="utf-8")


def test_links_lead_somewhere():
    """Links inside the project, in README, CONTRIBUTING and every notebook:
    the file is there, and the heading, if one is named."""
    broken = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *NOTEBOOKS):
        for link in LINK.findall(text_of(path)):
            name, _, heading = link.partition("#")
            target = path.parent / name if name else path
            if not target.exists() or heading and heading not in anchors(text_of(target)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_contributing_names_what_is_there():
    """Every path, dictionary and class that CONTRIBUTING.md names exists, and so does every test file of its table;
    it stays short."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(
        r"\b((?:nbs|tests|data|rlbench)/[\w./-]*\w/?)", text.replace("nbs/ROOM", "").replace("rlbench/ROOM", "")
    )
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).exists()] == []
    files = [*map(module_path, modules()), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"`([A-Z][A-Z_]+|[A-Z]\w+Config)`", text))
    missing = [name for name in names if not re.search(rf"^(class )?{name}\b", code, re.M)]
    assert len(names) > 8 and missing == [] and len(text.splitlines()) <= 60


def test_site_lists_pages_that_are_there():
    """What `make docs` is built of: the side bar lists each page once, each listed page is there,
    and every link between pages holds."""
    pages = site_pages()
    listed, broken = [], []
    for name, text in pages.items():
        if name.endswith(".ipynb"):
            notebook = json.loads(text)["cells"]
            text = "\n\n".join(cell["source"] for cell in notebook if cell["cell_type"] == "markdown")
        folder = Path(name).parent
        for block in re.findall(r"^```{toctree}\n(.*?)^```", text, re.M | re.S):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed += [(folder / line).as_posix() for line in lines]
        for link in LINK.findall(text):
            target = os.path.normpath(folder / link.partition("#")[0]) if not link.startswith("#") else name
            if target not in {*pages, *PICTURES}:
                broken.append(f"{name}: {link}")
    shown = {name.rpartition(".")[0] for name in pages if name.endswith((".ipynb", ".md"))}
    assert broken == [] and len(set(listed)) == len(listed)
    assert set(listed) == shown - {"index"}


def test_pages_are_named_as_they_are_called():
    "Where prose names a notebook as `room/NN_name`, it is there."
    known = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix() for path in notebooks_of_modules().values()}
    rooms = {path.rpartition("/")[0] for path in known} - {""}
    wrong = []
    for path in NOTEBOOKS:
        for cell in cells(path, "markdown"):
            named = re.findall(rf"`((?:{'|'.join(sorted(rooms))})/\d\d_\w+)`", cell["source"])
            wrong += [f"{path.name} {cell['id']}: {name}" for name in named if name not in known]
    assert wrong == []


def test_rules_of_the_loop_name_the_tests_that_hold_them():
    "The table of rules in `loop/loop` names tests; each of them is there."
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    (table,) = [cell["source"] for cell in cells(notebooks_of_modules()["loop.loop"]) if cell["id"] == "loop-rules-md"]
    named = re.findall(r"`(test_\w+)`", table)
    assert len(named) == 17 and set(named) <= there, set(named) - there


def test_nothing_of_one_machine_is_written_down():
    "No paths of somebody's home and no host of a package registry in any file that is kept."
    kept = [
        path
        for folder in ("rlbench", "nbs", "tests", "data", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    kept += [
        path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"
    ]  # in a worktree of git it is a file
    machine = re.compile(
        r"(?<![\w.$}])/(home|root|Users|work)/" + "|py" + r"pi\.org|python" + r"hosted\.|index-" + "url|find-" + "links"
    )
    for path in kept:
        if path.suffix in TEXT and path != Path(__file__):
            found = machine.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_tests_are_whole():
    """No test is skipped, expected to fail, or made of stand-ins;
    but what starts vLLM is, where no CPU build of it runs."""
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__) and "verifiers_04" not in path.parts:
            text = path.read_text(encoding="utf-8")
            text = text.replace("pytest.skip(NO_VLLM)", "", 1) if path.name == "conftest.py" else text
            assert not re.search(r"pytest\.skip|mark\.skip|mark\.xfail|importorskip|unittest\.mock|MagicMock", text), (
                path.name
            )


def test_no_test_imports_another():
    "What several tests need stands in tests/helpers."
    tests = [*(ROOT / "tests").rglob("test_*.py")]
    names = "|".join(path.stem for path in tests)
    found = [
        f"{path.name}: {match[0].strip()}"
        for path in [*tests, *(ROOT / "tests/helpers").glob("*.py")]
        for match in re.finditer(
            rf"^\s*(?:from|import) (?!{path.stem}\b)(?:{names})\b.*$", path.read_text(encoding="utf-8"), re.M
        )
    ]
    assert found == []
