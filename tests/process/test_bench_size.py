"""The bench at a size, without TRL: what it refuses, how it goes on, and that an arm of rlbench writes and trains whole
responses."""

import json
from dataclasses import replace

import pytest
from command_line import run_verb

from rlbench.bench import trl as bench
from rlbench.bench import trl_sides
from rlbench.bench.trl_sides import TrlArm

VERSIONS = {"trl": "1.0", "transformers": "5.0", "torch": "2.13.0", "accelerate": "1.0"}


def arm(side: str, pair: int, step: float, steps: int, tokens: int = 16 * 8) -> TrlArm:
    "Steps of so many seconds."
    return TrlArm(
        side, pair, 1.0, tuple(step * (i + 1) for i in range(steps)), (16,) * steps, (0,) * steps, (tokens,) * steps
    )


def test_what_is_refused(tmp_path):
    for wrong, says in (
        ({"size": "60"}, "size: unknown name '60'"),
        ({"pairs": 0}, "pairs: 0"),
        ({"tokens": 0}, "tokens: 0"),
        ({"timed": 0}, "timed: 0"),
        ({"placement": "everywhere"}, "placement"),
    ):
        with pytest.raises(ValueError) as told:
            bench.bench_size(tmp_path / "new", **wrong)
        assert says in str(told.value)
    assert not (tmp_path / "new").exists()  # before any work
    done = run_verb(tmp_path, "bench", "trl", "--size", "2m", code=2)
    assert "size: unknown name '2m'" in done.stderr and not list(tmp_path.iterdir())


def test_an_interrupted_bench_goes_on(tmp_path, monkeypatch):
    "TRL's best setting is taken; the second call runs what the first one did not finish."
    ran: list[str] = []

    def side(name: str, pair: int, step: float, steps: int) -> TrlArm:
        ran.append(f"{name}-{pair}-{steps}")
        if len(ran) == 5:
            raise KeyboardInterrupt
        return arm(name, pair, step, steps)

    monkeypatch.setattr(trl_sides, "await_quiet", lambda: None)
    monkeypatch.setattr(trl_sides, "watched", lambda make: make())
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(bench, "make_environment", lambda folder, say: VERSIONS)
    monkeypatch.setattr(
        trl_sides,
        "run_trl",
        lambda folder, job, name, limit: side("trl", job.seed, 4.0 / job.setting.processes, job.steps),
    )
    monkeypatch.setattr(
        trl_sides, "run_ours", lambda folder, name, config, run, limit: side(name, config.seed, 0.5, config.steps)
    )
    call = lambda: bench.bench_size(tmp_path / "b", "1m", tokens=8, pairs=2)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        call()
    assert ran == ["trl-0-2"] * 3 + ["trl-0-3", "ours-0-3"]
    result = call()
    assert ran[5:] == ["ours-0-3", "trl-1-3", "ours-1-3"] and call() == result and len(ran) == 8
    assert (
        result.size_ratio == 4.0
        and result.chosen.startswith("2 processes")
        and result.tokens_per_second["ours"] == [256.0, 256.0]
    )
    assert json.loads((tmp_path / "b" / "result-1m-8.json").read_text())["size_ratio"] == 4.0 and "4.00 x TRL's" in str(
        result
    )


def test_unequal_work_is_no_ratio():
    config = bench.size_config(bench.Path("tiny"), "1m", 8, 3, 4, 4)
    arms, setting = [arm("ours", 0, 1.0, 3), replace(arm("trl", 0, 1.0, 3), tokens=(128, 100, 128))], bench.TrlSetting()
    with pytest.raises(ValueError, match="tokens: trl trained"):
        bench.size_result("1m", arms, config, 1, setting, {setting: 1.0}, VERSIONS)


def test_an_arm_of_rlbench_writes_whole_responses(tmp_path):
    "A real run with random weights: every trained response is as long as it may be, and none was right."
    config = bench.size_config(bench.make_policy(tmp_path, "1m", 24), "1m", 24, 3, 2, 4)
    made = trl_sides.run_ours(tmp_path, "ours", config, "x")
    assert (made.error, made.rollouts, made.tokens, made.correct) == ("", (8,) * 3, (8 * 24,) * 3, (0,) * 3)
    assert (
        bench.make_policy(tmp_path, "1m", 24) == tmp_path / "policies" / "1m-24-0"
        and bench.tokens_per_second(made, 1) > 0
    )
