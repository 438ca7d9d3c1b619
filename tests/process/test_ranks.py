"""A trainer of several processes: the update of one, a run of its own, a rank that is killed,
another number of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import until
from real_runs import assert_books, ended, gone, processes_of, worker_of

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.status import is_alive

SETTINGS = dict(
    steps=60,
    batch=16,
    group=4,
    max_tokens=16,
    preflight=0,
    staleness=1,
    eval=[],
    checkpoint_every=1,
    placement="split",
    filter="none",
)


def off(one: dict, other: dict) -> float:
    "The largest relative difference of two sets of weights."
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


def test_two_ranks_train_what_one_trains_and_each_goes_on_from_the_other(tmp_path):
    """Unequal lengths, a batch of one row (the other rank has an empty share), three optimizer steps,
    layers computed again; an aggregation that raises in one rank; checkpoints crossed.
    At the end rank 0 is killed, and the other does not outlive it."""
    path = Path(__file__).parents[1] / "helpers" / "two_ranks.py"
    done = subprocess.run(
        [sys.executable, path, tmp_path],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": f"{path.parent}:{path.parent.parent}"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    told = torch.load(tmp_path / "told.pt")
    until(lambda: not is_alive(told["rank"]), 10)
    assert off(*told["weights"]) < 1e-5 and off(*told["weights after"]) < 1e-5
    assert told["refused"] == ("aggregation: True", True) and told["held"][1] < 0.55 * told["held"][0]
    for a, b in zip((*told["one"], *told["after"][0]), (*told["two"], *told["after"][1]), strict=True):
        assert all(
            a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5)
            for name in a
            if name != "padding" and a[name] is not None
        ), (a, b)
    assert [m["optimizer_steps"] for m in told["two"]] == [3, 1, 3]


def test_a_rank_that_is_killed_is_a_lost_trainer(tmp_path):
    "No hang, closed books, nobody left; and the run goes on with one process instead of two."
    run = rl.run("tiny", runs=tmp_path, trainers=2, **SETTINGS)
    until(lambda: run.checkpoints or run.status and run.status.state == "failed", 120)
    processes = processes_of(run)
    (rank,) = [p for p in worker_of(run, "trainer").children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    rank.send_signal(signal.SIGKILL)
    assert run.wait(400) == "failed" and "trainer" in run.status.reason, run.status
    log = (run.folder / "run.log").read_text()
    assert "rank 1 of 2 has ended with status -9" in log
    assert_books(run)
    until(lambda: gone([*processes, rank]), 10)
    version = run.status.version
    run.resume(steps=version + 1, trainers=1)
    ended(run)
    assert_books(run)
    journal = read_table(run.folder, "commands").select("knob", "value", "status").rows()
    assert ("trainers", "1", "applied") in journal and run.status.version == version + 1
    assert (run.folder / "policy/model.safetensors").is_file() and '"Qwen3ForCausalLM"' in (
        run.folder / "policy/config.json"
    ).read_text()
