"""Grading through a pool whose workers fail in every way there is: a verdict is about the program, or there is none."""

import json

import pytest

from rlbench.sandbox.grade import grade
from rlbench.sandbox.grading_task import read_code_task
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.pool_rules import PoolRules, PoolSpec
from rlbench.sandbox.types import End, SandboxLimits

MACHINE = [str(end) for end in End if not end.of_model]
TASK = read_code_task(json.dumps({"kind": "function", "function": "solve", "tests": [{"args": [2], "expected": 4}]}))
QUICK = {
    "retry_s": 0.001,
    "quota_s": 0.001,
    "start_s": 2.0,
    "wait_s": 4.0,
    "grace_s": 2.0,
    "alone_s": 0.1,
    "idle_s": 5.0,
}
LIMITS = SandboxLimits(cpu_s=0.5, wall_s=0.5)


@pytest.fixture
def pool(tmp_path, request):
    "A pool of fake workers with these faults."
    with PoolClient.connect(
        tmp_path / "pool", PoolSpec(tier="fake", workers=2, faults=request.param, policy=PoolRules(**QUICK))
    ) as found:
        yield found
    stop_pool(tmp_path / "pool")


@pytest.mark.parametrize(
    "pool",
    [{"ends": {end: 1.0}} for end in MACHINE if end != "wall_timeout"] + [{"lost": 1.0}, {"dead": 1.0}],
    indirect=True,
    ids=lambda faults: json.dumps(faults),
)
def test_a_failing_pool_gives_no_verdict(pool):
    "Tried again, and then no score at all; the ends say whose failure it was."
    verdict = grade(pool, TASK, "def solve(n): return n * n", LIMITS)
    assert (verdict.score, verdict.passed) == (None, None) and not End(verdict.ends[-1]).of_model and verdict.message, (
        verdict
    )


@pytest.mark.parametrize(
    "pool",
    [{"ends": {end: 0.4}} for end in MACHINE] + [{"lost": 0.4}],
    indirect=True,
    ids=lambda faults: json.dumps(faults),
)
def test_a_pool_that_fails_now_and_then_gives_verdicts_of_programs_alone(pool):
    """A played program answers with what it was asked, which is wrong:
    0 where it ran, None where it did not, and nothing in between."""
    verdicts = [grade(pool, TASK, f"def solve(n): return {i}", LIMITS) for i in range(12)]
    assert {v.score for v in verdicts} <= {0.0, None} and 0.0 in {v.score for v in verdicts}
    for v in verdicts:
        assert (v.score is None) == (not End(v.ends[-1]).of_model) and (v.score is None or v.checks)


@pytest.mark.parametrize("pool", [{"ends": {"wall_timeout": 1.0}}], indirect=True, ids=["late"])
def test_a_program_is_late_by_itself_only_when_it_was_alone(pool):
    "Late once may be the machine; late again with the machine to itself is the program, and judged."
    verdict = grade(pool, TASK, "def solve(n): return n * n", LIMITS)
    assert (verdict.score, verdict.ends[-1], verdict.tries) == (0.0, "wall_limit", 2) and pool.status().alone == 1


@pytest.mark.parametrize("pool", [{}], indirect=True, ids=["none"])
def test_limits_are_the_models(pool):
    "A program that runs into its limits is judged."
    for asked, end in (
        ("cpu=9", "cpu_limit"),
        ("memory=9999", "memory_limit"),
        ("end=crashed", "crashed"),
        ("end=output_limit", "output_limit"),
        ("end=forbidden", "forbidden"),
    ):
        verdict = grade(pool, TASK, f"def solve(n): return n * n  # fake: {asked}", LIMITS)
        assert (verdict.score, verdict.ends[-1]) == (0.0, end)
