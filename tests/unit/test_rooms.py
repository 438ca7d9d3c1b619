"""The rooms of the package: who imports whom, and that notebooks, map and README agree with the tree."""

import ast
import inspect
import json
import re

import pytest
import rooms
from readme import map_notebook
from rooms import (
    PAGE_MODULES,
    ROOMS,
    ROOT,
    TOP,
    floors_of,
    import_graph,
    imported_modules,
    map_sections,
    module_path,
    modules,
    notebooks_of_modules,
    room_graph,
    room_of,
)

import rlbench

FLOORS = list(ROOMS)
LAST = 99  # the number of a module that a page exports


def numbers() -> dict[str, int]:
    "Module to the number of its notebook within its room."
    return {
        module: LAST if module in PAGE_MODULES else int(path.name.partition("_")[0])
        for module, path in notebooks_of_modules().items()
    }


def test_no_arrow_leads_upwards(capsys):
    """The graph of rooms, printed with `pytest -s`: a room imports from lower floors only,
    imports inside functions included."""
    graph = room_graph()
    with capsys.disabled():
        print()
        for floor, room in enumerate(FLOORS):
            print(f"{floor:2d} {room or 'rlbench':12s} <- {', '.join(name or 'rlbench' for name in graph[room])}")
    upwards = {
        room: [name for name in found if FLOORS.index(name) > FLOORS.index(room)] for room, found in graph.items()
    }
    assert not any(upwards.values()), upwards
    assert set(graph) == set(ROOMS) and floors_of(graph) <= 16


def test_a_module_imports_lower_numbers_of_its_room():
    "The numbers of a room say its reading order, and are unique."
    number = numbers()
    wrong = [
        f"{module} imports {name}"
        for module, found in import_graph().items()
        for name in found
        if room_of(name) == room_of(module) and number[name] >= number[module]
    ]
    assert not wrong, wrong
    places = [(room_of(module), n) for module, n in number.items()]
    assert sorted(set(places)) == sorted(places)


def test_nothing_imports_what_stands_on_top():
    "Benches, studies and the command line are imported by nothing below them, nor by each other downwards."
    wrong = [
        f"{module} imports {name}"
        for module, found in import_graph().items()
        for name in found
        if room_of(name) in TOP and room_of(module) not in TOP
    ]
    assert not wrong, wrong


def test_the_command_line_imports_a_bench_when_it_is_asked_for():
    "No import of a bench or a study at the top of a module of `cli`."
    for module in modules():
        if room_of(module) == "cli":
            tree = ast.parse(module_path(module).read_text(encoding="utf-8"))
            at_top = [
                ast.unparse(node)
                for node in tree.body
                if isinstance(node, ast.ImportFrom) and re.match(r"(rlbench)?\.?(bench|studies)\b", node.module or "")
            ]
            assert not at_top, (module, at_top)


def test_a_module_may_import_rlbench_itself_only_above_its_names():
    "`import rlbench` reaches up to ablate: only benches, studies and the command line may use it."
    for module in modules():
        names = imported_modules(module)
        if "" in names and not names & {*modules(), "data"} - {""} and room_of(module) not in TOP:
            tree = ast.parse(module_path(module).read_text(encoding="utf-8"))
            assert not any(
                isinstance(node, ast.Import) and any(name.name == "rlbench" for name in node.names)
                for node in ast.walk(tree)
            ), module


def test_a_notebook_stands_where_its_module_does():
    """`nbs/ROOM/NN_name.ipynb` exports `rlbench/ROOM/name.py`, and every module has its notebook;
    a page may export one, too."""
    found = notebooks_of_modules()
    assert sorted(found) == modules()
    assert {module: path.name for module, path in found.items() if module in PAGE_MODULES} == PAGE_MODULES
    for module, path in found.items():
        if module in PAGE_MODULES:
            continue
        room, _, name = module.rpartition(".")
        assert path.parent == (ROOT / "nbs" / room if room else ROOT / "nbs"), module
        assert re.fullmatch(rf"\d\d_{name}\.ipynb", path.name), module


def test_no_module_has_the_name_of_a_public_function():
    "`rlbench.run` is a function, so no module is called run."
    public = {name for name in dir(rlbench) if inspect.isfunction(getattr(rlbench, name))}
    assert public and not public & {module.rpartition(".")[2] for module in modules()}


def test_map_lists_every_notebook_once():
    "nbs/map.ipynb is made from the tree (`make readme`), so each notebook stands there once, with its purpose."
    assert (ROOT / "nbs/map.ipynb").read_text(encoding="utf-8") == map_notebook(), "run: make readme"
    linked = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", "\n".join(map_sections().values()), re.M)
    there = sorted(
        path.relative_to(ROOT / "nbs").as_posix()
        for path in (ROOT / "nbs").rglob("*.ipynb")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    )
    assert sorted(linked) == [path for path in there if path != "map.ipynb"]


def test_the_guide_names_the_rooms():
    "The table of rooms in the guide has every room, in the order of the floors, with the same words."
    page = (ROOT / "nbs/guide/how_it_is_built.ipynb").read_text(encoding="utf-8")
    text = "\n".join("".join(cell["source"]) for cell in json.loads(page)["cells"])
    rows = re.findall(r"^\| `rlbench/(\w*)/?` \| (.+) \|$", text, re.M)
    assert rows == [(room, purpose) for room, purpose in ROOMS.items()]


@pytest.mark.parametrize(
    "source, found",
    [
        ("from rlbench.loop import loop", {"loop", "loop.loop"}),
        ("def f():\n    import rlbench.knobs", {"knobs"}),
        ("from . import state", {"loop", "loop.state"}),
        ("import_module('rlbench.views.why')", {"views.why"}),
    ],
)
def test_every_way_to_import_is_seen(source, found, tmp_path, monkeypatch):
    "Absolute, relative, inside a function, by name."
    (tmp_path / "rlbench/loop").mkdir(parents=True)
    (tmp_path / "rlbench/loop/new.py").write_text(source)
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    monkeypatch.setattr(rooms, "PACKAGE", tmp_path / "rlbench")
    assert imported_modules("loop.new") == found
