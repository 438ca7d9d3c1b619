"""Tasksets of `verifiers` from 0.4 on, played through the adapter against a small package with that version's shapes.

The lock has an older version. `tasksets/compare.py` makes the same comparison with the real package, by hand.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "helpers"


def call(name: str, **arguments) -> str:
    "A call of a tool, as a policy writes it."
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PRICE = call("price", item="apple", count=1)
PLAYED = {  # taskset, task, what the policy writes: its reward and parts
    "right": ("own_sums", 0, [":31"], 1.0, {"right": 1.0, "number": 1.0, "length": 3.0}),
    "a number": ("own_sums", 1, [":0"], 0.5, {"right": 0.0, "number": 1.0, "length": 2.0}),
    "nothing": ("own_sums", 1, [""], 0.0, {"right": 0.0, "number": 0.0, "length": 0.0}),
    "a tool": ("own_shop", 0, [PRICE, "3"], 0.95, {"right": 1.0, "asked": 1.0}),
    "no tool": ("own_shop", 0, ["3"], 1.0, {"right": 1.0, "asked": 0.0}),
    "a tool that raises": ("own_shop", 0, [call("price", item="grape"), "3"], 0.95, {"right": 1.0, "asked": 1.0}),
    "an unknown tool": ("own_shop", 0, [call("steal"), "3"], 0.95, {"right": 1.0, "asked": 1.0}),
    "a rule stops it": ("own_shop", 0, [PRICE] * 4, -0.2, {"right": 0.0, "asked": 4.0}),
    "the run's limit": ("own_shop", 0, [PRICE], -0.05, {"right": 0.0, "asked": 1.0}),
    "a state": ("own_coins", 0, [call("put", coin=2), call("put", coin=1), "done"], 4 / 3, {"paid": 1.0, "few": 1 / 3}),
    "too little": ("own_coins", 0, [call("put", coin=1), "done"], 0.0, {"paid": 0.0, "few": 0.0}),
}


@pytest.fixture(scope="module")
def found() -> dict:
    "What a process with the newer package in front makes of all this."
    broken = ["own_rows:Broken", 0, ["2"]]
    asked = {
        "play": [*([id, place, lines] for id, place, lines, _, _ in PLAYED.values()), broken],
        "refuse": ["own_rows", "own_rows:Endless", "own_rows:Opened"],
        "draw": "own_rows:Repeated",
    }
    front = os.pathsep.join(map(str, (HERE / "verifiers_04", HERE / "tasksets", HERE.parents[1])))
    command = [sys.executable, str(HERE / "tasksets" / "play.py"), json.dumps(asked)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": front}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PLAYED)
def test_rewards_and_parts_are_those_of_the_trace(found, name):
    *_, lines, reward, parts = PLAYED[name]
    came = found["played"][list(PLAYED).index(name)]
    assert came["outcome"] == "ok" and came["reward"] == pytest.approx(reward) and came["parts"] == pytest.approx(parts)
    assert came["text"] == lines[-1]


def test_what_tools_say_is_shown(found):
    shown = {name: came["shown"] for name, came in zip(PLAYED, found["played"])}
    assert shown["a tool"] == [["tool", "3"]] and shown["no tool"] == []
    assert (
        shown["a tool that raises"][0][1].endswith("no grape here'")
        and "there are price" in shown["an unknown tool"][0][1]
    )
    assert shown["a state"] == [["tool", "1 coins"], ["tool", "2 coins"]]


def test_a_reward_that_raises_is_the_function_s_failure(found):
    came = found["played"][-1]
    assert came["outcome"] == "function_error" and came["reward"] is None and "no scale here" in came["message"]


def test_what_cannot_be_run_is_refused_with_a_remedy(found):
    several, endless, opened = found["refused"]
    assert "names 4 tasksets; name one as own_rows:CLASS" in several
    assert "never ends" in endless and "without a prompt" in opened
    assert "verifiers<0.4" in found["export"] and "pip install" in found["export"]


def test_rows_that_repeat_are_joined_and_stay_on_one_side(found):
    train, held_out = (
        {(" ".join(prompt.split()), answer) for prompt, answer in found["drawn"][split]}
        for split in ("train", "held_out")
    )
    assert train and held_out and not {prompt for prompt, _ in train} & {prompt for prompt, _ in held_out}
    drawn = found["drawn"]["train"] + found["drawn"]["held_out"]
    assert len(drawn) == 42 == len(train | held_out) and {("A word?", "sun"), ("A word?", "moon")} <= train | held_out
    assert found["said"] == [
        "tasks.verifiers: 80 of 122 rows repeat the prompt of an earlier row and were joined with it"
    ]
