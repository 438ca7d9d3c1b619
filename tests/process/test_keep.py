"""Which checkpoints are made and which stay: the first, the best, those before a change, a thinning series;
and what is said of a policy that is not the best."""

import json
import os
import signal
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline import inline_run
from patience import until
from resumed_runs import SYNC
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.ledger_reading import read_resumes, read_table
from rlbench.base.status import read_status
from rlbench.cli.main import app
from rlbench.loop.checkpoints import EARLY_PAUSE, SAVE_PAUSE, checkpoint_reason
from rlbench.loop.config import make_config
from rlbench.loop.events import Commanded, Started
from rlbench.loop.losses import on_started
from rlbench.loop.state import CheckpointsState, start_state
from rlbench.runtime.checkpoint import (
    POLICY_NOTE,
    TRAINER,
    SavedCheckpoint,
    best_saved,
    checkpoint_folders,
    choose_checkpoints,
    count_bytes,
    find_best,
    read_manifest,
    saved_checkpoints,
)
from rlbench.workbench.fork import describe_versions, prepare_fork
from rlbench.workbench.starting import start_process
from rlbench.workbench.supervisor import END_FILE

GIGABYTE = 10**9


@st.composite
def records(draw) -> list[SavedCheckpoint]:
    "Checkpoints of a run, oldest first; some share a file with the one before."
    versions, found = sorted(draw(st.lists(st.integers(0, 300), min_size=1, max_size=30))), []
    for number, version in enumerate(versions):
        files = {2 * number: draw(st.integers(1, 5)), 2 * number + 1: draw(st.integers(1, 5))}
        if found and draw(st.booleans()):
            shared = next(iter(found[-1].files))
            files = {shared: found[-1].files[shared], 2 * number + 1: files[2 * number + 1]}
        rate = draw(st.none() | st.integers(0, 20))
        found.append(
            SavedCheckpoint(
                f"v{version:06d}-{number}",
                version,
                files,
                draw(st.booleans()),
                None if rate is None else (rate / 20, 0.1),
            )
        )
    return found


@settings(max_examples=300, deadline=None)
@given(records(), st.integers(1, 4), st.integers(0, 60), st.data())
def test_what_a_run_lives_on_is_never_removed_and_the_budget_holds(saved, newest, budget, data):
    "The newest, the first, the best and needed ones stay; the others fit into what the budget leaves."
    needed = data.draw(st.sets(st.sampled_from([each.name for each in saved]), max_size=2))
    kept = choose_checkpoints(saved, newest, budget, needed)
    rated = [each for each in saved if each.held_out]
    highest = max((each.held_out[0] for each in rated), default=None)
    must = {saved[0].name, *(each.name for each in saved[-newest:]), *needed}
    assert must <= kept <= {each.name for each in saved}
    assert highest is None or any(each.name in kept and each.held_out[0] == highest for each in rated)
    must |= {best.name} if (best := best_saved(saved)) else set()
    left = [each for each in saved if each.name in kept]
    assert count_bytes(left) <= max(budget, count_bytes(each for each in saved if each.name in must))
    again = choose_checkpoints(left, newest, budget, needed)
    assert must <= again, "what was tidied once keeps the same on the next look"


@pytest.mark.parametrize("every", [1, 5])
def test_old_checkpoints_thin_out_and_leave_no_wide_gap(every):
    "After each of 400 saves there is one for every age, at most six times as old, and only a few in all."
    saved = []
    for version in range(0, 400 * every, every):
        saved.append(SavedCheckpoint(f"v{version:06d}", version, {version: 1}))
        kept = choose_checkpoints(saved, 2, GIGABYTE)
        saved = [each for each in saved if each.name in kept]
        ages = [version - each.version for each in saved]
        assert len(ages) <= 4 + version.bit_length()
        assert all(any(age <= old <= 6 * age for old in ages) for age in range(every, version + 1, every))


def test_a_marked_checkpoint_stays_before_the_series():
    """With room for one more, it is the one before a change;
    with none, no other than the newest, the first and the best."""
    saved = [
        SavedCheckpoint(f"v{v:06d}", v, {v: 1}, marked=v == 30, held_out=(0.5, 0.1) if v == 10 else None)
        for v in range(0, 60, 5)
    ]
    assert choose_checkpoints(saved, 1, 4) == {"v000000", "v000010", "v000030", "v000055"}
    assert choose_checkpoints(saved, 1, 0) == {"v000000", "v000010", "v000055"}


def made(folder: Path) -> dict[int, str]:
    "Why each version was saved, also those that are removed again."
    rows = read_table(folder, "events").filter(pl.col("kind") == "Snapshot")["fields"]
    return {told["version"]: told["reason"] for told in map(json.loads, rows)}


WIDE = SYNC | {"staleness": 2, "steps": 14, "eval": [{"count": 10, "every": 7}], "checkpoint_every": 100}


def test_a_run_is_saved_at_its_start_early_where_it_is_evaluated_and_before_its_end(tmp_path):
    "On the virtual clock a save takes no time, so nothing is thinned."
    folder = inline_run(tmp_path, "run", WIDE).folder
    reasons = made(folder)
    assert [reasons[version] for version in (0, 1, 2, 4, 7, 8, 14)] == [
        "at its start",
        *["an early version"] * 3,
        "an evaluated version",
        "an early version",
        "before its end",
    ]
    assert not {3, 5, 6, 10, 12, 13} & set(reasons)
    quiet = inline_run(tmp_path, "quiet", WIDE | {"checkpoint_every": 0}).folder
    assert not made(quiet) and not checkpoint_folders(quiet), "a run that is not to be saved is not"


@pytest.mark.parametrize("staleness", [0, 2])
def test_one_checkpoint_before_a_burst_of_changes_and_one_before_a_ramp(tmp_path, staleness):
    "Each holds what was in force before. A knob that does not change how the trainer trains needs none."
    burst = [(event, "max_grad_norm", 0.1 + event / 1000, 0) for event in range(340, 350)]
    told = [*burst, (620, "learning_rate", 1e-4, 10), (720, "temperature", 0.7, 0)]
    driver = inline_run(tmp_path, "run", WIDE | {"staleness": staleness, "eval": [], "steps": 20}, told)
    journal = read_table(driver.folder, "commands").filter(pl.col("status") == "applied")
    before = {
        version: reason for version, reason in made(driver.folder).items() if reason.startswith("before a change")
    }
    touched = journal.filter(pl.col("apply") == "version")
    changed = {v for v in touched["version"] if made(driver.folder)[v]}
    assert changed == set(touched["version"]) and set(before) <= changed, "each change has a checkpoint of its version"
    assert sorted(reason.rpartition(" ")[2] for reason in before.values()) in (
        ["learning_rate", "max_grad_norm"],
        ["learning_rate", *["max_grad_norm"] * 2],
    )
    kept = {each.version: each for each in saved_checkpoints(driver.folder, "")}
    assert all(kept[version].marked for version in changed)


def a_state(version: int, took: float, since: float):
    "A state that may be saved: its last save began `since` seconds ago and took so long."
    state = start_state(
        make_config(
            {
                "clock": "virtual",
                "generator": "scripted",
                "preflight": 0,
                "eval": [{"every": 5}],
                "checkpoint_every": 20,
            }
        ),
        [1],
        {"held_out": 10},
    )
    on_started(state, Started("trainer", "trainer"), [])
    state.version, state.at, state.evaluation.last["held_out"] = version, 100.0, 0
    state.checkpoints = CheckpointsState(version=0, at=100.0 - since, took_s=took)
    return state


def test_slow_saves_thin_the_extra_checkpoints_and_no_others():
    "An early and an evaluated version wait for their pause; a scheduled one and one before a change do not."
    assert (
        checkpoint_reason(a_state(4, 1.0, EARLY_PAUSE)) == "an early version"
        and checkpoint_reason(a_state(4, 1.0, EARLY_PAUSE - 0.1)) == ""
    )
    assert (
        checkpoint_reason(a_state(5, 1.0, SAVE_PAUSE)) == "an evaluated version"
        and checkpoint_reason(a_state(5, 1.0, SAVE_PAUSE - 0.1)) == ""
    )
    assert checkpoint_reason(a_state(3, 1.0, 1000.0)) == ""
    assert checkpoint_reason(a_state(20, 10.0, 1.0)) == "every 20 versions"
    state = a_state(3, 10.0, 1.0)
    state.commands.waiting = [Commanded("a", "test", "learning_rate", 1e-5, 0)]
    assert checkpoint_reason(state) == "before a change of learning_rate"
    state.commands.waiting = [
        Commanded("a", "test", "learning_rate", state.config.learning_rate, 0),
        Commanded("b", "test", "learning_rate", -1.0, 0),
        Commanded("c", "test", "temperature", 0.5, 0),
    ]
    assert checkpoint_reason(state) == "", "the same value, a refused one, and one the trainer does not read"


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    "A real model at a learning rate that destroys it, with every file that it leaves."
    table = SYNC | {
        "generator": "torch",
        "model": "tiny",
        "max_tokens": 24,
        "steps": 2,
        "batch": 8,
        "filter": "none",
        "learning_rate": 0.3,
        "checkpoint_every": 100,
        "preflight": 0,
        "eval": [{"count": 48, "every": 2}],
    }
    return inline_run(tmp_path_factory.mktemp("runs"), "collapsed", table).folder


def test_the_policy_of_a_collapsed_run_says_that_it_is_not_the_best(collapsed):
    "In the status and beside the weights; the best is the checkpoint of the start."
    told, status = json.loads((collapsed / "policy" / POLICY_NOTE).read_text()), read_status(collapsed)
    assert (
        told["version"] == told["rated"] == 2
        and told["best"]["version"] == 0
        and told["best"]["held_out"] > told["held_out"] + 0.1
    )
    assert (
        status.state == "finished"
        and status.reason.endswith(told["warning"])
        and "version 2) is not the best" in status.reason
    )
    assert find_best(collapsed).version == 0


def test_export_and_fork_of_the_best(collapsed, tmp_path):
    """`export --best` writes the policy of the best checkpoint, `export` that of the end with a warning;
    `fork` begins at the best, linked, with the parent's rate."""
    from rlbench.models.model import load_policy
    from rlbench.training.weight_transport import hash_weights, moving_weights

    runs, call = str(collapsed.parent), CliRunner().invoke
    for flags, version in (([], 2), (["--best"], 0)):
        done = call(app, ["export", "collapsed", str(tmp_path / f"v{version}"), "--runs", runs, "--json", *flags])
        assert done.exit_code == 0 and json.loads(done.output)["version"] == version, done.output
        assert bool(json.loads(done.output)["warning"]) == (version == 2)
    first = hash_weights(moving_weights(load_policy(str(tmp_path / "v0")).model))
    assert (
        first
        == read_manifest(checkpoint_folders(collapsed)[0]).weights
        != hash_weights(moving_weights(load_policy(str(tmp_path / "v2")).model))
    )
    shown = call(app, ["show", "collapsed", "--runs", runs]).output
    assert "best by held-out" in shown and "rlbench fork collapsed --at best" in shown and "is not the best" in shown
    child = prepare_fork(collapsed, "child", "best", {"learning_rate": 1e-4})
    (begun,) = checkpoint_folders(child)
    mine, parents = (folder / TRAINER / "weights.safetensors" for folder in (begun, checkpoint_folders(collapsed)[0]))
    assert mine.stat().st_ino == parents.stat().st_ino, (
        "the fork's first checkpoint takes no room for what its parent has"
    )
    assert find_best(child).version == 0 and find_best(child).held_out == find_best(collapsed).held_out
    for wrong in (3, "newest"):
        with pytest.raises(ValueError, match=r"forked at 0, 1, 2; the best by held-out is 0 \("):
            prepare_fork(collapsed, "never", wrong)
    assert call(app, ["fork", "collapsed", "--at", "newst", "--runs", runs]).exit_code == 2


def test_unchanged_weights_are_linked(tmp_path):
    "At a learning rate of 0 all checkpoints share one file of weights; their other files are their own."
    table = SYNC | {
        "generator": "torch",
        "model": "tiny",
        "max_tokens": 8,
        "steps": 2,
        "filter": "none",
        "learning_rate": 0.0,
        "eval": [],
        "preflight": 0,
        "checkpoint_every": 1,
    }
    folders = checkpoint_folders(inline_run(tmp_path, "run", table).folder)
    assert (
        len(folders) == 3 and len({(folder / TRAINER / "weights.safetensors").stat().st_ino for folder in folders}) == 1
    )
    assert len({(folder / TRAINER / "optimizer.safetensors").stat().st_ino for folder in folders}) == 3
    assert all(read_manifest(folder).version == version for version, folder in enumerate(folders)), "each is whole"


def test_without_an_evaluation_there_is_no_best(tmp_path):
    "The error names the versions that there are; a budget of nothing keeps the newest and the first."
    table = SYNC | {"eval": [], "checkpoint_every": 1, "checkpoints_kept": 1, "checkpoint_gb": 0.0}
    folder = inline_run(tmp_path, "run", table).folder
    assert [read_manifest(each).version for each in checkpoint_folders(folder)] == [0, 8] and describe_versions(
        folder
    ) == "0, 8"
    with pytest.raises(ValueError, match=r"no checkpoint of 'run' was evaluated \(checkpoints: 0, 8\)"):
        prepare_fork(folder, "child", "best")


def write_sums(folder: Path) -> Path:
    "A file of sixty tasks."
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(60)))
    return path


def test_a_resume_that_is_refused_changes_nothing(tmp_path):
    "Neither where the handle refuses it nor where the run process does, which finds the tasks spoilt."
    tasks = write_sums(tmp_path)
    table = {
        "clock": "virtual",
        "generator": "scripted",
        "steps": 3,
        "batch": 8,
        "group": 4,
        "filter": "none",
        "preflight": 0,
        "eval": [],
        "tasks": {"name": "file", "path": str(tasks)},
    }
    run = rl.run(table, runs=tmp_path / "runs", name="ended")
    assert run.wait(400) == "finished", run.status.reason
    ended = run.status
    with pytest.raises(ValueError, match="spent its budget"):
        run.resume()
    assert run.status == ended
    tasks.write_text("this is no JSON\n")
    start_process(run.folder, 1)
    until(lambda: run.status == ended and not (run.folder / END_FILE).exists(), 60)
    assert run.state == "finished" and "not resumed: " in (run.folder / "run.log").read_text()


def test_a_failed_run_without_a_model_has_no_policy_to_save(tmp_path):
    "Its checkpoints hold no weights, and its end does not speak of them."
    table = {
        "clock": "virtual",
        "generator": "scripted",
        "steps": 9,
        "batch": 8,
        "group": 4,
        "preflight": 0,
        "eval": [],
        "tasks": {"name": "file", "path": str(write_sums(tmp_path))},
    }  # tasks without a level are always solved
    run = rl.run(table, runs=tmp_path, name="learned")
    assert run.wait(400) == "failed" and run.checkpoints
    assert "could not be saved" not in run.status.reason, run.status.reason


LASTING = {
    "clock": "virtual",
    "generator": "scripted",
    "steps": 1_000_000,
    "batch": 8,
    "group": 4,
    "filter": "none",
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 20,
    "tasks": {"name": "arithmetic"},
}


def kill_run_process(run) -> None:
    "As the kernel does when memory is short; the supervisor lives on."
    os.kill(run.status.pid, signal.SIGKILL)


def test_a_run_with_restarts_goes_on_by_itself_so_often_and_no_more(tmp_path):
    run = rl.run(LASTING, runs=tmp_path, name="lasting", restarts=1)
    until(lambda: run.checkpoints and run.status.version > 25, 60)
    kill_run_process(run)
    until(lambda: run.status.attempt == 1 and run.state == "running", 60)
    assert "restart 1" in (run.folder / "run.log").read_text() and len(read_resumes(run.folder)) == 1
    version = run.status.version
    until(lambda: run.status.version > version + 5, 60)
    kill_run_process(run)
    until(lambda: run.state == "failed", 60)
    assert run.status.books_closed and "run process lost" in run.status.reason


def test_all_lost_runs_with_restarts_left_are_resumed_at_once(tmp_path):
    "As after a restart of the machine; what is left alone is named with its reason."
    made = {
        name: rl.run(LASTING, runs=tmp_path, name=name, restarts=restarts)
        for name, restarts in (("first", 2), ("second", 0))
    }
    for run in made.values():
        until(lambda: run.checkpoints and run.status.version > 25, 60)
        os.kill(run.status.supervisor, signal.SIGKILL)
        kill_run_process(run)
        until(lambda: run.state == "dead", 60)
    done = CliRunner().invoke(app, ["resume", "--all", "--runs", str(tmp_path)])
    assert "first: resumed from version" in done.output and "second: left alone: it has no restarts left" in done.output
    until(lambda: made["first"].state == "running" and made["first"].status.attempt == 1, 60)
    assert made["second"].state == "dead"
    for run in made.values():
        run.stop()
    until(lambda: {run.state for run in made.values()} <= {"stopped", "failed"}, 60)
    assert CliRunner().invoke(app, ["resume", "--runs", str(tmp_path)]).exit_code == 2
