"The benches of the chain on a toy size: every piece is made, told, drawn and kept."

import json
from dataclasses import replace

import pytest

from rlbench.bench.chain import RunLength, bench_chain, bench_distill, bench_process, over_arms

TOY = RunLength(versions=2, every=1, batch=16, group=4, exam=8)


@pytest.mark.slow
def test_the_chain_runs_from_end_to_end_and_goes_on_from_what_is_there(tmp_path):
    said = []
    done = bench_chain(tmp_path, 20, 40, length=TOY, weights=(0.0,), say=said.append)
    assert [c.arm for c in done.courses] == ["proxy alone", "verifier"] and len(said) == 3
    for c in done.courses:
        assert (
            c.versions == (0, 1, 2)
            and all(0 <= rate <= 1 for rate in c.true)
            and None not in c.proxy
            and c.tokens[0] == 0 < c.tokens[1] < c.tokens[2]
        )
    alone, verifier = done.courses
    assert alone.true[0] == verifier.true[0] and alone.proxy[0] == verifier.proxy[0]  # one policy, one reward model
    assert alone.proxy[2] != verifier.proxy[2] and alone.distance[2] > 0
    arms = over_arms(tmp_path)
    assert {arm: (knobs.get("kl"), knobs.get("kl_weight")) for arm, knobs in arms.items()} == {
        "proxy alone": (None, None),
        "proxy, KL 0.1": ("k2", 0.1),
        "proxy, KL 0.4": ("k2", 0.4),
        "proxy, k3 0.4": ("k3", 0.4),
        "verifier": (None, None),
    }
    page = (tmp_path / "over_optimisation.html").read_text()
    assert page.count("<svg") == 3 and "proxy alone" in page and done.figure in str(done)
    pieces = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    runs = sorted((tmp_path / "runs").iterdir())
    assert bench_chain(tmp_path, 20, 40, length=TOY, weights=(0.0,)).courses == done.courses
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == pieces and sorted(
        (tmp_path / "runs").iterdir()
    ) == runs


@pytest.mark.slow
def test_a_teacher_is_imitated(tmp_path):
    done = bench_distill(tmp_path, length=TOY, teaching=1, rounds=1)
    student, *_, tuned, rounded, rl = done.courses
    assert student.versions == (0, 1, 2) and rl.versions == (0, 1) and done.teacher == {"0": rl.true[-1]}
    assert (
        len(tuned.true) == 3
        and len(rounded.true) == 2
        and tuned.tokens[-1] <= student.tokens[-1] <= rounded.tokens[-1] + 16 * 4 * 64
    )
    assert bench_distill(tmp_path, length=TOY, teaching=1, rounds=1).courses == done.courses


@pytest.mark.slow
def test_weights_of_a_reward_change_in_the_running_run(tmp_path):
    length = replace(TOY, versions=6, every=3)  # long enough for a command at version 3 to take effect
    done = bench_process(tmp_path, length=length, arms=["steps, wrong ones priced", "process, then outcome"])
    assert [c.arm for c in done.courses][-1] == "process, then outcome" and len(done.courses) == 2
    assert {(knob, json.loads(value)) for _, _, knob, value in done.journal} == {
        ("reward.outcome", 1.0),
        ("reward.process", 0.0),
    }
