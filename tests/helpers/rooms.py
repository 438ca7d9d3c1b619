"""The rooms of the package in their order, what imports what, and the page that lists all notebooks."""

import ast
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlbench"
ROOMS = {  # floor by floor: a room imports from the rooms above it in this list only
    "": "the nouns, and the five modules that are meant to be changed",
    "base": "clock, run folder, charts, HTTP: what everything stands on",
    "models": "the policy, its heads and adapters, and what the hardware can hold",
    "engines": "generators in practice",
    "sandbox": "programs that a policy wrote, run without harm",
    "environments": "tasks, episodes, and the verifiers that need them",
    "objective": "shaping, loss, correction, KL",
    "training": "batches, the trainer, and new weights on their way to the generators",
    "loop": "configuration, queue, guards, and the run as a deterministic reducer",
    "foreign": "runs that other systems have made, opened read-only",
    "runtime": "actors, the driver, checkpoints, and what reads a run folder",
    "planning": "what a run will do, and what it will cost",
    "views": "what a person sees",
    "workbench": "handles on runs, the supervisor, forks, replays, ablations",
    "service": "a training service for other people's loops, in Tinker's protocol",
    "bench": "performance as ratios, by commands anyone can run",
    "studies": "pages that run a claim of the field, and what they share",
    "cli": "the verbs of the command line",
}
TOP = ("bench", "studies", "cli")  # nothing below imports them
PAGES = ("one_page", "index", "glossary", "workbench", "which_mode", "papers")  # the first is read first
GUIDE = (  # pages of nbs/guide in the order of the site
    "run_and_steer",
    "your_own",
    "one_gpu",
    "asynchrony",
    "objectives",
    "code_and_environments",
    "planning",
    "foreign_runs",
    "tinker",
    "recovery",
    "many_hosts",
    "gpu_options",
    "security",
    "agents",
    "how_it_is_built",
)
PAGE_MODULES = {"training.one_page": "one_page.ipynb"}  # modules that a page exports, the last of their room


def module_path(module: str) -> Path:
    "The file of a module named from below rlbench: `loop.config`."
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def modules() -> list[str]:
    "All modules, named from below rlbench."
    files = (
        path
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "_modidx.py") and "data" not in path.parts
    )
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files)


def room_of(module: str) -> str:
    "The room of a module; the root has the name ''."
    return module.rpartition(".")[0]


def notebooks_of_modules() -> dict[str, Path]:
    "Module to its notebook."
    found = {}
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                if match := re.match(r"#\|\s*default_exp\s+(\S+)", "".join(cell["source"])):
                    found[match[1]] = path
    return found


def imported_modules(module: str) -> frozenset[str]:
    "Names below rlbench that a module imports, inside functions too: modules, and names in them. '' is rlbench itself."
    path = module_path(module)
    return imports_in(path, path.relative_to(ROOT).with_suffix("").parts[:-1])


@cache
def imports_in(path: Path, package: tuple[str, ...]) -> frozenset[str]:
    "The same of a file that stands in `package`."
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            found |= {f"{source}.{name.name}" for name in node.names} | {source}
        elif (
            isinstance(node, ast.Call)
            and called_name(node) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    ours = (name for name in found if name.split(".")[0] == "rlbench")
    return frozenset(name.removeprefix("rlbench").removeprefix(".") for name in ours)


def called_name(call: ast.Call) -> str:
    "The last part of the name of what is called; empty if it has none."
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def import_graph() -> dict[str, list[str]]:
    "Module to the modules that it imports."
    known = set(modules())
    return {module: sorted(imported_modules(module) & known - {module}) for module in known}


def room_graph() -> dict[str, list[str]]:
    "Room to the other rooms that it imports from."
    graph = {room: set() for room in ROOMS}
    for module, found in import_graph().items():
        graph[room_of(module)] |= {room_of(name) for name in found} - {room_of(module)}
    return {room: sorted(found, key=list(ROOMS).index) for room, found in graph.items()}


def floors_of(graph: dict[str, list[str]]) -> int:
    "How many floors the rooms need: the longest chain of rooms that import from each other."
    height: dict[str, int] = {}
    for room in ROOMS:
        height[room] = 1 + max((height[name] for name in graph[room]), default=0)
    return max(height.values())


def purpose_of(notebook: Path) -> str:
    "The line under the title of a notebook."
    first = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    return re.search(r"^> (.+)$", first, re.M)[1]


def map_table(notebooks: list[Path]) -> str:
    "A table with a row for each notebook: its link and its purpose."
    rows = (
        f"| [{path.stem}]({path.relative_to(ROOT / 'nbs').as_posix()}) | {purpose_of(path)} |" for path in notebooks
    )
    return "\n".join(["| | |", "|---|---|", *rows])


def map_sections() -> dict[str, str]:
    "The text of map.ipynb by cell id: each notebook once, by room."
    nbs = ROOT / "nbs"
    sections = {
        "map-title": "# All notebooks\n\n> Every notebook of rlbench, by room, with a sentence on what it holds.",
        "map-rule": "`nbs/ROOM/NN_name.ipynb` exports `rlbench/ROOM/name.py`. "
        "A module imports from lower numbers of its own room and from the rooms above it on this page: "
        "whatever you read rests only on what stands before it. "
        "[Your own tasks, models and rewards](guide/your_own.ipynb) names the five that are meant to be changed.",
        "map-pages": "## Pages\n\n"
        + map_table([nbs / f"{name}.ipynb" for name in PAGES] + [nbs / f"guide/{name}.ipynb" for name in GUIDE]),
    }
    for room, purpose in ROOMS.items():
        folder = nbs / room
        title = f"## {room or 'rlbench'}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n"
        listed = [
            path for path in sorted(folder.glob("*.ipynb")) if room or (path.stem not in PAGES and path.stem != "map")
        ]
        sections[f"map-{room or 'root'}"] = title + map_table(listed)
    return sections
