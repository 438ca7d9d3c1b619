"""Several environments in processes of their own: the work is shared, and one that is killed costs only what it had."""

import json
import os
import signal

import polars as pl
import pytest
from patience import until
from real_runs import assert_books, ended, worker_of

import rlbench as rl
from rlbench.base.ledger_reading import read_table

EPISODES = {
    "generator": "scripted",
    "environment": {"name": "scripted", "low": 2, "high": 3},
    "max_turns": 3,
    "tasks": "addition",
    "environments": 2,
    "steps": 100_000,
    "group": 4,
    "batch": 32,
    "concurrency": 64,
    "staleness": 2,
    "max_tokens": 64,
    "preflight": 0,
    "eval": [],
    "filter": "none",
    "checkpoint_every": 0,
    "virtual": {"scripted_pace": 0.2, "scripted_length": 8.0},
}


def noted(r: rl.Rollout) -> float:
    "Writes down which process computes it, and waits a little."
    import os
    import time

    time.sleep(0.01)
    with open(os.environ["NOTED_LOG"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return float(r.correct or False)


@pytest.fixture
def judges(tmp_path, monkeypatch):
    "The processes that have computed a reward so far."
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("NOTED_LOG", str(log))
    return lambda: set(map(int, log.read_text().split()))


def events_of(run: rl.Run, kind: str) -> list[dict]:
    "The fields of the events of a kind, in order."
    rows = read_table(run.folder, "events", ["kind", "fields"])
    return [json.loads(fields) for fields in rows.filter(pl.col("kind") == kind)["fields"]]


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_one_of_two_environments_is_killed_and_the_run_goes_on(tmp_path, judges, placement):
    """Episodes of several turns: the other one takes over what it had, a new process takes its name,
    and the books close."""
    run = rl.run("tiny", runs=tmp_path, name="pair", reward=noted, placement=placement, **EPISODES)
    until(lambda: len(judges()) == 2 or run.state == "failed")
    before = dict(run.status.workers)
    workers = {"worker"} if placement == "colocated" else {"trainer", "generator"}
    assert set(before) == workers | {"environment-1", "environment-2"}
    os.kill(before["environment-2"], signal.SIGKILL)
    until(
        lambda: run.status.workers.get("environment-2") not in (None, before["environment-2"]) or run.state == "failed"
    )
    version = run.status.version
    until(lambda: run.status.version >= version + 4 or run.state == "failed")
    after = dict(run.status.workers)
    assert {name for name in before if before[name] != after[name]} == {"environment-2"}
    run.stop()
    ended(run, "stopped")
    assert_books(run)
    (lost,) = events_of(run, "Lost")
    assert lost["actor"] == "environment-2" and "SIGKILL" in lost["cause"] and len(lost["at_work"]) <= 1
    assert [each["actor"] for each in events_of(run, "Start")] == ["environment-2"]
    assert run.rollouts.filter(pl.col("fate") == "lost_environment").is_empty(), "one loss is within score_retries"
    assert judges() == {before["environment-1"], before["environment-2"], after["environment-2"]}
    trained = run.rollouts.filter(pl.col("fate") == "trained")
    assert (trained["turns"] > 1).any() and trained["reward"].null_count() == 0


def test_a_run_goes_on_with_the_environment_that_is_left(tmp_path, judges):
    "One that dies whenever it is started, and no batch in between, is given up; the other one does all the work."
    run = rl.run("tiny", runs=tmp_path, name="left", reward=noted, **EPISODES)
    until(lambda: len(judges()) == 2 or run.state == "failed")
    run.pause()
    until(lambda: run.state in ("paused", "failed"))
    killed = set()

    def is_given_up() -> bool:
        pid = run.status.workers["environment-2"]
        if pid not in killed:
            killed.add(pid)
            worker_of(run, "environment-2").kill()
        return len(events_of(run, "Lost")) > len(events_of(run, "Start")) >= 3 or run.state == "failed"

    until(is_given_up)
    run.go()
    version = run.status.version
    until(lambda: run.status.version >= version + 2 or run.state == "failed")
    assert run.state == "running", (run.folder / "run.log").read_text()[-2000:]
    run.stop()
    ended(run, "stopped")
    assert_books(run)
