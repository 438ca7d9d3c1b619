"""Runs done again from their journals: equal digests; and what cannot be promised is refused."""

import json
import subprocess
import sys
import time

import polars as pl
import pytest
from command_line import run_verb
from patience import until
from scripted import WITHOUT_MODEL

import rlbench as rl

SMALL = dict(
    steps=12,
    batch=16,
    group=4,
    preflight=4,
    preflight_k=2,
    staleness=0,
    concurrency=16,
    max_tokens=32,
    eval=[{"name": "held_out", "count": 8, "every": 5}],
)
VIRTUAL = dict(
    clock="virtual",
    generator="scripted",
    steps=12,
    group=4,
    batch=16,
    concurrency=16,
    preflight=4,
    preflight_k=2,
    eval=[{"count": 8, "every": 5}],
)


def at(run: rl.Run, version: int) -> None:
    "Wait until a run has a version."
    limit = time.monotonic() + 400
    while not (run.status and run.status.version >= version):
        assert time.monotonic() < limit and run.state not in ("failed", "dead"), (run.folder / "run.log").read_text()[
            -2000:
        ]
        time.sleep(0.02)


def applied(run: rl.Run) -> list[tuple]:
    "What took effect, and where."
    return (
        run.commands.filter(pl.col("status") == "applied", pl.col("knob") != "alert")
        .select("knob", "value", "author", "version", "dispatched")
        .rows()
    )


def brief(r: rl.Rollout, weight: rl.Knob(0, 1) = 0.1):
    return r.correct - weight * r.length / 64


def longer(split, seed, count=60):
    from rlbench.records import Task

    return [Task(f"longer/{i}", f"{i}+{i}=", str(2 * i)) for i in range(10, 10 + count)]


def steer(run: rl.Run) -> None:
    "Knobs, functions, tasks and the whole objective changed; a pause, a step, an evaluation asked for."
    at(run, 1)
    run.set(temperature=0.8, author="ana")
    run.set(learning_rate=3e-4, over=4)
    run.set({"loss.high": 0.3})
    at(run, 3)
    run.set(group=8)
    run.pause()
    run.set(top_p=0.95)
    time.sleep(0.5)
    run.step()
    at(run, run.status.version + 1)
    run.reward(brief)
    run.eval()
    run.go()
    at(run, 7)
    run.pause()
    run.set({"reward.weight": 0.2})
    run.set(batch=32)
    run.set(loss="gspo", advantage="rloo", correction="icepop", aggregation="sequence_mean")
    run.set(filter="none")
    run.tasks(longer)
    run.set(band=(0.1, 0.9))
    run.set(placement="colocated" if run.config.placement == "split" else "split")
    run.go()


def test_a_synchronous_run_repeats(tmp_path):
    """In real time, in processes: more than ten knobs turned, functions and tasks given, a change of placement,
    a guard on measured time (its command is said again, it does not fire again).
    So does a fork of it, steered and stopped."""
    run = rl.run(
        "tiny",
        runs=tmp_path,
        placement="split",
        checkpoint_every=5,
        checkpoints_kept=9,
        guards=[{"when": "seconds > 0", "do": "max_grad_norm = 0.5"}],
        **{**SMALL, "steps": 18},
    )
    steer(run)
    assert run.wait(400) == "finished", run.status
    assert len(applied(run)) >= 18 and {"placement", "loss", "advantage", "correction", "aggregation"} <= {
        row[0] for row in applied(run)
    }, run.commands
    child = run.fork(at=5, name="child", loss="reinforce", steps=1000)
    at(child, 6)
    child.set(temperature=0.6)
    until(lambda: ("temperature", "0.6") in {row[:2] for row in applied(child)})
    at(child, child.status.version + 1)
    child.stop(author="ana")
    again = run.replay()
    assert again.equal is None or again.equal
    assert child.wait(400) == "stopped" and child.steps["version"].min() == 6
    twin = child.replay("again")  # while the other one goes on
    verdict = again.wait(400)
    assert verdict.equal and verdict.digest == run.status.digest and applied(again.run) == applied(run)
    assert str(again.run.family) == f"replay of {run.name}" and again.run.name == f"{run.name}-replay-1"
    assert twin.wait(400).equal and rl.attach("again", runs=tmp_path).status.reason == "stopped by ana"
    drop = ["seq", "at", "seconds", "score_seconds"]
    assert (
        again.run.rollouts.filter(pl.col("fate") == "trained")
        .drop(drop)
        .sort("rollout")
        .equals(run.rollouts.filter(pl.col("fate") == "trained").drop(drop).sort("rollout"))
    )


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_on_the_virtual_clock_repeats(tmp_path, staleness):
    "Commands come from the folder, at whatever event they are seen; a guard fires again by itself."
    run = rl.run(
        "tiny",
        runs=tmp_path,
        correction="none",
        placement="split",
        staleness=staleness,
        checkpoint_every=5,
        guards=[{"when": "live_groups >= 0 for 3", "do": "top_p = 0.9"}],
        **{**VIRTUAL, "steps": 100_000},
    )
    for change in (
        dict(temperature=0.5),
        dict(group=8),
        dict(concurrency=8),
        dict(oversample=0.5),
        dict(band=(0.1, 0.9)),
    ):
        at(run, (run.status.version if run.status else 0) + 3)
        run.set(change, over=10 if "temperature" in change else 0)
    run.pause()
    at(run, run.status.version)
    run.go()
    run.set(tasks={"name": "arithmetic", "high_digits": 3})
    at(run, run.status.version + 3)
    run.set(placement="colocated")
    at(run, run.status.version + 4)
    with pytest.raises(ValueError, match="wait until it has ended"):
        run.replay()
    run.stop()
    assert run.wait(400) == "stopped"
    again, child = run.replay(), run.fork(at=run.versions[1], staleness=1, steps=run.versions[1] + 8)
    assert child.wait(400) == "finished"
    twin, verdict = child.replay(), again.wait(400)
    assert (
        verdict.equal and applied(rl.attach(verdict.replay, runs=tmp_path)) == applied(run) and len(applied(run)) >= 10
    )
    assert twin.wait(400).equal and child.status.digest != run.status.digest


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory) -> rl.Run:
    """An ended run, asynchronous in real time, that was given a reward and a temperature while it lived. It is long
    and slow enough for them to come before its end, also on a machine at full load."""
    slow = {**SMALL, **WITHOUT_MODEL, "steps": 40, "staleness": 1, "eval": [], "virtual": {"scripted_pace": 0.5}}
    run = rl.run("tiny", runs=tmp_path_factory.mktemp("runs"), **slow)
    at(run, 1)
    run.reward(brief)
    run.set(temperature=0.7, author="ana")
    assert run.wait(400) == "finished", run.status
    return run


def test_what_cannot_be_promised_is_refused(asynchronous):
    run, runs = asynchronous, asynchronous.folder.parent
    with pytest.raises(ValueError, match=r"asynchronous in real time.*anyway=True"):
        run.replay()
    told = run_verb(runs, "replay", run.name, "--runs", runs, "--json", code=2)
    assert "--anyway" in told.stderr and not (runs / f"{run.name}-replay-1").exists()
    told = run_verb(runs, "replay", run.name, "--anyway", "--runs", runs, "--json", code=None)
    verdict = json.loads(told.stdout.splitlines()[-1])
    assert verdict["version"] == 40 and told.exit_code == int(not verdict["equal"])


def test_the_exported_script_runs(asynchronous, tmp_path):
    "It starts a run like this one, gives its commands and its function."
    path = asynchronous.export_script(tmp_path / "steering.py")
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (made,) = rl.runs(tmp_path / "runs")
    given, again = (
        sorted(row[:3] for row in applied(run)) for run in (asynchronous, made)
    )  # a reward waits for a version, a temperature does not: either may be first
    assert made.state == "finished" and len(given) == 2 and again == given


def test_forks_of_a_family(tmp_path, monkeypatch):
    """From checkpoints of an ended run: the twin ends as its parent, the other one elsewhere;
    the twin's replay begins at its checkpoint."""
    run = rl.run(
        "tiny",
        runs=tmp_path,
        correction="none",
        staleness=0,
        **{**VIRTUAL, "steps": 6, "checkpoint_every": 2, "checkpoints_kept": 9},
    )
    run.wait(400)
    assert run.versions == [0, 1, 2, 4, 5, 6], run.versions
    with pytest.raises(
        ValueError, match=r"no checkpoint of version 3; it can be forked at 0, 1, 2, 4, 5, 6; the best by held-out is "
    ):
        run.fork(at=3)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        run.fork(at=2, temperatur=1.0)
    twin, other = run.fork(at=2, name="twin"), run.fork(at=4, name="other", reward=brief, steps=7, temperature=0.8)
    assert other.wait(400) == "finished" and twin.wait(400) == "finished"
    assert twin.status.digest == run.status.digest and twin.steps["version"].to_list() == [3, 4, 5, 6]
    assert (
        other.status.version == 7
        and other.rollouts["temperature"].max() == 1.0
        and other.rollouts["temperature"].min() == 0.8
    )
    assert (
        str(other.family).startswith("fork of tiny-1 at version 4, reward = brief, ")
        and str(twin.family) == "fork of tiny-1 at version 2"
    )
    verdict = twin.replay().wait(400)
    assert verdict.equal and rl.attach(verdict.replay, runs=tmp_path).steps["version"].to_list() == [3, 4, 5, 6]
    monkeypatch.setenv("COLUMNS", "200")
    listed = run_verb(tmp_path, "ls", "--runs", tmp_path).stdout
    names = [line.strip().split("  ")[0] for line in listed.splitlines()[1:]]
    of_twin = ["└ twin", "└ twin-replay-1"]
    assert names in (["tiny-1", *of_twin, "└ other"], ["tiny-1", "└ other", *of_twin]), listed  # by their starts
    assert len(rl.compare(run, other).charts[1].marks) == 1
