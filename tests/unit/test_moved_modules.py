"""Functions that a run captured before modules moved still load."""

import ast
import tomllib
from importlib import import_module
from importlib.resources import files

from rlbench.knobs import Captured, load_function, parse_captured, save_function

MOVED = tomllib.loads((files("rlbench.data") / "moved_modules.toml").read_text(encoding="utf-8"))


def test_every_new_place_is_there():
    "The table of moves leads to modules that exist, and to names that they have."
    for new in MOVED["modules"].values():
        if not new.endswith("trl_arm"):  # a script with libraries of its own
            import_module(new)
    for old, new in MOVED["names"].items():
        assert hasattr(import_module(new), MOVED["renamed"].get(old, old.rpartition(".")[2])), old
    for old, new in MOVED["renamed"].items():
        home = MOVED["names"].get(old, old.rpartition(".")[0])
        assert hasattr(import_module(home), new), old


def test_a_function_captured_before_the_move_runs(tmp_path):
    """Its imports by the old names lead to the new places:
    of modules, of names that left their module, and of a module under another name."""
    source = (
        "from rlbench.reward import process_worth as process_worth\nfrom rlbench.steps import steps_of as steps_of\n"
        "import rlbench.capacity as capacity\nfrom rlbench.records import Rollout as Rollout\n\n"
        "def mine(r, weight=0.5):\n"
        "    from rlbench.compare import compare\n"
        "    return weight * len(steps_of('7+5=2c1;1+2=4c0:42', '17+25=')) * callable(compare) * "
        "callable(process_worth) * callable(capacity.cpu_flags)\n"
    )
    name = save_function(Captured("mine", source), tmp_path)
    assert load_function(tmp_path / name)(None) == 1.0


def test_a_function_captured_before_a_name_changed_runs(tmp_path):
    "It goes on calling the name it knows; names that moved and were renamed, too."
    source = (
        "from rlbench.records import staleness as staleness\nfrom rlbench.staleness import fresh as is_young\n"
        "from rlbench.environments.environment import within as within\n\n"
        "def mine(r):\n    return within(1.0, is_young, 3, 4, 2) * callable(staleness)\n"
    )
    name = save_function(Captured("mine", source), tmp_path)
    assert load_function(tmp_path / name)(None) == 1


def test_names_of_one_import_may_have_several_homes():
    "A function's own line may name two that once stood together."
    source = "def mine(r):\n    from rlbench.environments.environment import Done, within\n    return Done, within\n"
    lines = ast.unparse(parse_captured(source)).splitlines()[1:3]
    assert [line.strip() for line in lines] == [
        "from rlbench.environments.episode import Done",
        "from rlbench.base.safe_call import call_within as within",
    ]


def test_what_did_not_move_stays():
    "Other imports, and those by today's names, are left as they are."
    source = "import json\nfrom rlbench.knobs import Knob\nfrom rlbench.loop.config import RunConfig\n"
    assert ast.unparse(parse_captured(source)) == source.strip()
