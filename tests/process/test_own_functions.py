"""Functions of a cell: what travels with them, what is refused before a run has a folder,
and what is not on their deadline."""

import asyncio
import sys

import numpy as np
import pytest
from inline import inline_run

import rlbench as rl
from rlbench.base.safe_call import call_within
from rlbench.knobs import FileFunction, capture_function
from rlbench.loop.config_files import load_config
from rlbench.runtime.environment_worker import import_ahead_of_call
from rlbench.views.rescore import rescore
from rlbench.workbench.handle import newest_run
from rlbench.workbench.user_module import keep_function

DELAY = 0.01
SCRIPTED = {"generator": "scripted", "placement": "split", "eval": []}


def shortened(text):
    return text[:10]


async def look_up(question):
    await asyncio.sleep(DELAY)
    return shortened(question)


def search():
    from rlbench.environments.episode import Done, Observation, SingleTurn

    class Search(SingleTurn):
        asked = 0

        async def advance(self, response):
            self.asked += 1
            return Observation(await look_up(response)) if self.asked < 3 else Done(response)

    return Search()


def misspelled(rewards_R, lenghts_R):
    return rewards_R - lenghts_R


def with_values(rewards_R, values_RT):
    return rewards_R


def slow_import(rewards_R):
    import rlbench_test_slow_library

    return rlbench_test_slow_library.centred(rewards_R)


def test_an_async_tool_and_its_helpers_travel_into_a_run(tmp_path):
    captured = capture_function(search)
    scope = {}
    exec(captured.source, scope)  # it stands alone
    assert asyncio.iscoroutinefunction(scope["look_up"]) and scope["shortened"]("x" * 20) == "x" * 10
    told = asyncio.run(scope["search"]().advance("a long question?"))
    assert told.text == "a long que"


def test_an_async_reward_is_refused_with_what_may_be_async():
    with pytest.raises(ValueError, match="look_up: is written with async def.*methods of an episode, may be async"):
        capture_function(look_up)


def test_an_unknown_argument_is_refused_before_a_folder_exists(tmp_path):
    with pytest.raises(
        ValueError, match="advantage.misspelled: asks for 'lenghts_R'.*did you mean 'lengths_R'.*mask_RT"
    ):
        rl.run("tiny", advantage=misspelled, runs=tmp_path / "runs")
    with pytest.raises(
        ValueError, match="advantage.with_values: asks for 'values_RT'.*for the whole batch at once, with mask_RT"
    ):
        rl.run("tiny", advantage=with_values, runs=tmp_path / "runs")
    with pytest.raises(
        ValueError, match="reward.misspelled: asks for 'lenghts_R'.*it is given 1 argument and nothing else"
    ):
        rl.run("tiny", reward=misspelled, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_unknown_argument_of_a_function_in_a_file_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(rewards_R, lenghts_R):\n    return rewards_R\n")
    with pytest.raises(ValueError, match="advantage.mine: asks for 'lenghts_R'"):
        load_config("tiny", {"advantage": {"name": "mine", "source": str(tmp_path / "mine.py")}})


def test_imports_are_not_on_the_deadline(tmp_path, monkeypatch):
    (tmp_path / "rlbench_test_slow_library.py").write_text(
        "import time\ntime.sleep(0.4)\ndef centred(x):\n    return x - x.mean()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = FileFunction(capture_function(slow_import), "slow_import.py")
    import_ahead_of_call(own)
    assert call_within(0.2, own, np.array([1.0, 0.0])).tolist() == [0.5, -0.5]
    del sys.modules["rlbench_test_slow_library"]
    inline_run(tmp_path, "short", {**SCRIPTED, "steps": 2, "deadlines": {"function": 0.2}})
    found = rescore(tmp_path / "short", slow_import, field="advantage")
    assert len(found) and set(found["message"]) == {""}


def shorter(rewards_R, lengths_R, *, price: rl.Knob(0, 1) = 0.1):
    return rewards_R - rewards_R.mean() - price * (lengths_R / lengths_R.mean() - 1)


def test_a_kept_advantage_is_a_module_that_a_run_trains_with(tmp_path):
    keep_function(shorter, "my_advantage", folder=tmp_path / "mine")
    toml = tmp_path / "own.toml"
    toml.write_text('steps = 2\nadvantage = {name = "shorter", source = "mine/my_advantage.py", price = 0.3}\n')
    config = load_config(str(toml), {**SCRIPTED, "clock": "virtual"})
    driver = inline_run(tmp_path, "own", {**config.model_dump(), "advantage": shorter})
    assert config.advantage["price"] == 0.3 and driver.state.version == 2
    newest = newest_run(tmp_path)
    assert newest.name == "own" and newest.config.advantage["name"] == "shorter"


def test_a_function_that_cannot_be_kept_leaves_nothing(tmp_path):
    "Neither a name that hides another module nor a module that somebody wrote by hand costs a notebook."
    mine = tmp_path / "mine"
    with pytest.raises(ValueError, match="'json' would hide"):
        keep_function(shorter, "json", folder=mine)
    assert not mine.exists()
    mine.mkdir()
    (mine / "by_hand.py").write_text("answer = 42")
    with pytest.raises(ValueError, match="was not exported from a notebook"):
        keep_function(shorter, "by_hand", folder=mine)
    assert [path.name for path in mine.iterdir()] == ["by_hand.py"]


def test_without_a_run_of_ones_own_there_is_a_scripted_one(tmp_path):
    assert newest_run(tmp_path / "none").status.version == 8 and not (tmp_path / "none").exists()
