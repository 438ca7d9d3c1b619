"""The rules of the house: notebooks and package say the same, stay small, stay in their layer, and run."""
import ast
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notebooks import NOTEBOOKS, ROOT, cells, execute, is_exported
from readme import readme

MODULES = sorted(path for path in ROOT.glob("rlbench/**/*.py") if path.name not in ("__init__.py", "_modidx.py"))
HEAVY = {"torch", "transformers", "polars", "plotly", "vllm", "ray"}
RUN_PROCESS = ("records", "knobs", "clock", "ledger", "tasks", "reward", "curriculum", "staleness", "queue", "config", "episode", "state", "loop", "placement", "sinks")
FACADE = 85  # `import rlbench` reaches up to run and ablation (80, 81): only what comes later may use it

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def offenders(paths: list[Path], faults: Callable[[Path], Iterator[str]]) -> list[str]:
    "Everything that breaks a rule, file by file: the rules below yield a line for each fault, and a test shows all of them at once."
    return [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults(path)]


def exported(path: Path) -> list[dict]:
    "The cells that go into the package."
    return [cell for cell in cells(path, "code") if is_exported(cell)]


def numbers() -> dict[str, int]:
    "Module (dotted, below rlbench) to the number of its notebook."
    found = {}
    for path in NOTEBOOKS:
        if match := re.match(r"(\d+)_", path.name):
            names = re.findall(r"^#\|\s*default_exp\s+(\S+)", "\n".join(cell["source"] for cell in cells(path, "code")), re.M)
            found |= {name: int(match[1]) for name in names}
    return found


def test_package_is_what_the_notebooks_export(tmp_path):
    "Exporting into an empty package gives byte for byte the package that is here: no edits by hand, no module without a notebook."
    for name in ("nbs", "settings.ini", "setup.py", "README.md"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "rlbench").mkdir()
    shutil.copy(ROOT / "rlbench/__init__.py", tmp_path / "rlbench")
    subprocess.run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"],
                   cwd=tmp_path, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    there = {path.relative_to(tmp_path / "rlbench") for path in tmp_path.glob("rlbench/**/*.py")}
    here = {path.relative_to(ROOT / "rlbench") for path in ROOT.glob("rlbench/**/*.py")}
    assert here - there == set(), "modules without a notebook"
    assert there - here == set(), "notebooks that were not exported"
    differ = [str(name) for name in here if not filecmp.cmp(ROOT / "rlbench" / name, tmp_path / "rlbench" / name, shallow=False)]
    assert not differ, f"not what the notebooks export: {differ}; run nbdev_export"


def faults_of_stored_cell(cell: dict) -> Iterator[str]:
    "What of a cell should not be stored: an id nobody can read, metadata, traces of one execution."
    name, outputs = cell["id"], cell.get("outputs", ())
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_.][A-Za-z0-9]+)+", name):
        yield f"{name}: not a readable id"
    if cell["metadata"]:
        yield f"{name}: metadata"
    if cell.get("execution_count") is not None or any(output.get("execution_count") is not None for output in outputs):
        yield f"{name}: an execution count"
    for output in outputs:
        if output["output_type"] == "error":
            yield f"{name}: an error is stored"
        if any("widget" in kind for kind in output.get("data", ())):
            yield f"{name}: a widget is stored"
        if len(json.dumps(output)) > 30_000:
            yield f"{name}: output over 30 kB"
        if re.search(r"/tmp/|0x[0-9a-f]{9,}", json.dumps(output)):
            yield f"{name}: a path or an address in an output"


def faults_of_stored_notebook(path: Path) -> Iterator[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        yield "not of format 4.5"
    if not set(notebook["metadata"]) <= {"kernelspec"}:
        yield "metadata beside the kernel"
    ids = [cell["id"] for cell in notebook["cells"]]
    if len(set(ids)) < len(ids):
        yield "two cells of one id"
    for cell in notebook["cells"]:
        yield from faults_of_stored_cell(cell)
    most = 60_000 if path.stem == "index" else 150_000
    if path.stat().st_size > most:
        yield f"{path.stat().st_size} bytes, {most} at most"


def test_notebooks_are_clean():
    "Readable cell ids, no traces of one execution, no widget state, nothing heavy."
    assert offenders(NOTEBOOKS, faults_of_stored_notebook) == []


def faults_of_directives(cell: dict) -> Iterator[str]:
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


def faults_of_exported_cell(cell: dict) -> Iterator[str]:
    body = ast.parse(cell["source"]).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) or isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    if len(imports) not in (0, len(body)):
        yield f"{cell['id']}: imports and code in one cell"
    length = sum(1 for line in cell["source"].splitlines()[1:] if line.strip())
    most = 150 if len(body) == 1 and isinstance(body[0], ast.ClassDef) else 50  # a class is not cut
    if length > most:
        yield f"{cell['id']}: {length} lines, {most} at most"
    if "@patch" in cell["source"]:
        yield f"{cell['id']}: @patch"


def faults_of_code(path: Path) -> Iterator[str]:
    for cell in cells(path, "code"):
        yield from faults_of_directives(cell)
    for cell in exported(path):
        yield from faults_of_exported_cell(cell)


def test_code_cells_keep_the_rules():
    "One idea per exported cell, imports in cells of their own, no star, only three directives."
    assert offenders(NOTEBOOKS, faults_of_code) == []


def faults_of_story(path: Path, modules: dict[str, int]) -> Iterator[str]:
    if not exported(path):
        return
    all_cells = cells(path)
    last = [cell["id"] for cell in all_cells].index(exported(path)[-1]["id"])
    if not re.match(r"# \S+\n\n> \S.*", all_cells[0]["source"]):
        yield "no title and purpose"
    if not any(cell["source"].startswith("## Limits") for cell in all_cells[last:]):
        yield "the code is not followed by ## Limits"
    if re.match(r"\d\d_(\w[\w.]*)$", path.stem)[1] not in modules:
        yield "the module is not named like its notebook"


def test_notebooks_tell_what_they_are():
    "Exporting notebooks have a title, one line of purpose, the name of their module, and limits at the end."
    modules = numbers()
    assert offenders(NOTEBOOKS, lambda path: faults_of_story(path, modules)) == []


def imported(path: Path) -> set[str]:
    "Modules of rlbench that a module imports, inside functions too; '' is rlbench itself."
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {f"{module}.{name.name}" for name in node.names} | {module}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")) and node.args:
            found |= {str(ast.literal_eval(node.args[0]))} if isinstance(node.args[0], ast.Constant) else set()
    return {name.removeprefix("rlbench").removeprefix(".") for name in found if name.split(".")[0] == "rlbench"}


def faults_of_imports(path: Path, order: dict[str, int]) -> Iterator[str]:
    own = order[".".join(path.relative_to(ROOT / "rlbench").with_suffix("").parts)]
    names = imported(path)
    for name in sorted(names & set(order)):
        if order[name] >= own:
            yield f"imports {name} ({order[name]}), itself {own}"
    if "" in names and not any(name in order or name.split(".")[0] == "data" for name in names - {""}) and own <= FACADE:
        yield "imports rlbench itself"


def test_modules_import_only_lower_numbers():
    "The numbers of the notebooks are the layers of the package."
    order = numbers()
    assert offenders(MODULES, lambda path: faults_of_imports(path, order)) == []


def faults_of_public_name(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
        return
    if not ast.get_docstring(node):
        yield f"{node.name}: no docstring"
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and not part.name.startswith("_") and not part.decorator_list:
            if not ast.get_docstring(part) and len(part.body) > 1:
                yield f"{node.name}.{part.name}: no docstring"


def faults_of_module(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield "no docstring"
    for node in tree.body:
        yield from faults_of_public_name(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            if ast.unparse(node.value) in ("[]", "{}", "list()", "dict()", "set()"):
                yield f"module-level state: {ast.unparse(node)}"
    if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        yield "global"
    if re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text):
        yield "unfinished"


def test_modules_keep_the_rules():
    "Public things say what they are; nothing unfinished; no state in the module."
    assert offenders(MODULES, faults_of_module) == []


def loaded(statement: str) -> set[str]:
    "Top-level modules in a fresh process after a statement."
    found = subprocess.run([sys.executable, "-c", f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"],
                           capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
    return set(found.stdout.split())


def test_import_is_light():
    "`import rlbench` brings in none of the heavy packages."
    assert loaded("import rlbench") & HEAVY == set()


def test_run_process_needs_no_torch():
    "The process that owns a run always answers, so it never imports what can take it down: of its modules, one after the other, none brings that in."
    heavy = {"torch", "transformers", "plotly", "vllm", "ray"}
    asked = f"import sys\nfor name in {RUN_PROCESS}:\n    __import__('rlbench.' + name)\n    print(name, *{heavy} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT).stdout.splitlines()
    assert told == list(RUN_PROCESS)


PUBLIC = ("ConfigError", "Fate", "Knob", "Outcome", "Rollout", "Run", "RunConfig", "Task", "ablate", "attach", "compare", "load_config", "run", "runs")


def test_public_names():
    "What `rlbench` offers is decided here, not by accident."
    import rlbench

    assert sorted(rlbench.__all__) == sorted(PUBLIC) and len(PUBLIC) <= 14
    assert all(getattr(rlbench, name) is not None for name in rlbench.__all__)
    assert [name for name in dir(rlbench) if not name.startswith("_")] == sorted(PUBLIC) and callable(rlbench.runs)


def test_readme_is_the_index():
    "README.md is made from nbs/index.ipynb: make readme."
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme(ROOT / "nbs/index.ipynb"), "run: make readme"


def test_links_of_the_readme_lead_somewhere():
    "Links to files of the project exist."
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_nothing_of_one_machine_is_written_down():
    "No paths of somebody's home and no host of a package registry in any file that is kept."
    kept = [path for folder in ("rlbench", "nbs", "tests", "data", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # in a worktree of git it is a file
    machine = re.compile(r"(?<![\w.$}])/(home|root|Users|work)/" + "|py" + r"pi\.org|python" + r"hosted\.|index-" + "url|find-" + "links")
    for path in kept:
        if path.suffix in (".py", ".ipynb", ".md", ".toml", ".ini", ".lock", ".json", ".jsonl", "") and path != Path(__file__):
            found = machine.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_tests_are_whole():
    "No test is skipped, expected to fail, or made of stand-ins; but what needs AVX-512 is, where the CPU lacks it."
    for path in (ROOT / "tests").glob("*.py"):
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            text = text.replace("pytest.skip(AVX512F)", "", 1) if path.name == "conftest.py" else text
            assert not re.search(r"pytest\.skip|mark\.skip|mark\.xfail|importorskip|unittest\.mock|MagicMock", text), path.name


VLLM = ("13_generator_vllm",)  # they start an engine of vLLM


@every_notebook
def test_notebook_runs(path, request, tmp_path):
    "Every notebook runs."
    if path.stem in VLLM:
        request.getfixturevalue("avx512f")
    done = execute(path, tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
