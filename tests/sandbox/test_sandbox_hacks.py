"""Programs that solve nothing: none is paid, none holds up the grader, none runs anything on its side.

In the pool's sandboxes, and in processes without a jail, where all that protects the reward is the protocol."""

import json
import os
import time

import pytest
from local_runner import LocalRunner

from rlbench.sandbox.grade import grade
from rlbench.sandbox.grading_task import read_code_task
from rlbench.sandbox.hacks import HACKS, hacked_task
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.types import SandboxLimits

LIMITS = SandboxLimits(cpu_s=1, wall_s=2, memory_mb=512)
ASSERTS = read_code_task(
    json.dumps(
        {
            "kind": "asserts",
            "function": "solve",
            "tests": [f"assert solve({n}) == {n * n + 7}" for n in (2, 3, 5, 12, 100)]
            + ["assert [solve(n) for n in range(3)] == [7, 8, 11]"],
        }
    )
)
FRESH = {"function": False, "function, fresh": True, "asserts": False}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    "The sandboxes of this machine."
    folder = tmp_path_factory.mktemp("hacks") / "pool"
    with PoolClient.connect(folder) as found:
        yield found
    stop_pool(folder)


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_no_hack_is_paid_in_a_sandbox(hack, kind, pool):
    "The same in the jail, and the program after it finds everything as it should be."
    verdict = grade(
        pool, ASSERTS if kind == "asserts" else hacked_task(), hack.code, LIMITS, rule="rate", fresh=FRESH[kind]
    )
    assert verdict.score == 0 and verdict.passed is False, verdict
    assert grade(pool, hacked_task(), hacked_task().reference, LIMITS).score == 1


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_no_hack_is_paid(hack, kind, tmp_path, monkeypatch):
    """A score of 0 under the kindest rule of all: nothing that the program did counts as a passed test,
    save by computing it."""
    monkeypatch.setenv("OWNED", str(tmp_path / "owned"))  # a command that is run on this side leaves its mark there
    began = time.monotonic()
    verdict = grade(
        LocalRunner(),
        ASSERTS if kind == "asserts" else hacked_task(),
        hack.code,
        LIMITS,
        rule="rate",
        fresh=FRESH[kind],
    )
    assert verdict.score == 0 and verdict.passed is False and verdict.integrity == "data", verdict
    assert time.monotonic() - began < (40 if FRESH[kind] else 15)
    assert not (tmp_path / "owned").exists() and not os.path.exists("owned")


def test_known_solutions_are_told_apart():
    "The suite would prove nothing if nobody were paid."
    for task in (hacked_task(), ASSERTS):
        assert grade(LocalRunner(), task, hacked_task().reference, LIMITS).score == 1
        assert grade(LocalRunner(), task, hacked_task().bad, LIMITS, rule="rate").score == 0


def test_tripwires_name_what_was_tried():
    "Signals beside the score: of the hacks most leave a sign, of the solution there is none."
    signs = {hack.name: grade(LocalRunner(), hacked_task(), hack.code, LIMITS).tripwires for hack in HACKS}
    assert grade(LocalRunner(), hacked_task(), hacked_task().reference, LIMITS).tripwires == ()
    assert (
        "bait" in signs["the test file"]
        and "exit" in signs["os._exit at import"]
        and "frames" in signs["answers from the callers' frames"]
        and "descriptor" in signs["binary garbage"]
        and "patches" in signs["equal to everything"]
    )
    assert sum(map(bool, signs.values())) >= 22, {name for name, found in signs.items() if not found}


def test_what_weak_means():
    "Beside the policy's code tests can be fooled, and the verdict says that it proves little."
    weak = read_code_task(
        json.dumps({"kind": "asserts", "function": "solve", "weak": True, "tests": ["assert solve(2) == 11"]})
    )
    fooled = grade(LocalRunner(), weak, next(hack.code for hack in HACKS if hack.name == "equal to everything"), LIMITS)
    assert (fooled.passed, fooled.integrity) == (True, "weak")
