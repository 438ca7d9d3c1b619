"""Real runs in processes of their own: started, steered, stopped, killed, refused."""

import json
import os
import signal
import subprocess
import sys
import time

import polars as pl
import pytest
from inline import inline_run
from patience import stands, until
from real_runs import SMALL, assert_books, ended, gone, processes_of, run_policy_differs, worker_of
from scripted import SET_WITHOUT_MODEL, WITHOUT_MODEL

import rlbench as rl
from rlbench.base.ledger_reading import read_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> rl.Run:
    "One small real run that several tests look at."
    return ended(rl.run("tiny", runs=tmp_path_factory.mktemp("runs"), **SMALL))


def test_a_run_learns_writes_and_leaves_a_policy(finished):
    steps = finished.steps
    assert steps["version"].to_list() == [1, 2, 3, 4]
    assert steps["lag_max"].max() == 0 and (steps["trained_rollouts"] == 32).all()
    assert finished.evals.filter(pl.col("eval") == "held_out")["version"].to_list() == [0, 2, 4]
    assert finished.evals.filter(pl.col("eval") == "preflight")["zero_advantage"].null_count() == 0
    assert (finished.folder / "report.html").stat().st_size > 10_000
    assert oct(finished.folder.stat().st_mode)[-3:] == "700"
    assert_books(finished)
    tokens = read_table(finished.folder, "tokens")
    trained = finished.rollouts.filter(pl.col("fate") == "trained")
    assert (
        tokens.filter(pl.col("advantage").is_not_null())["rollout"].sort().to_list()
        == trained["rollout"].sort().to_list()
    )


def test_the_policy_loads_elsewhere(finished):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (a.from_pretrained(finished.folder / "policy") for a in (AutoModelForCausalLM, AutoTokenizer))
    tokens = torch.tensor([tokenizer.encode("17+25=")])
    assert model(tokens).logits.shape[:2] == tokens.shape


def test_provenance_and_config_are_on_disk(finished):
    told = json.loads((finished.folder / "provenance.json").read_text())
    assert {"commit", "packages", "cores", "python"} <= set(told) and "torch" in told["packages"]
    assert finished.config.batch == 32 and finished.config.name == "tiny-1"


PLACES = {
    "colocated": {"placement": "colocated", "eval": []},
    "split": {"placement": "split", "eval": []},
    "two generators, every third version": {"placement": "split", "generators": 2, "publish_every": 3},
}
TRAINING = {
    "batch": 64,
    "group": 8,
    "generator": "scripted",
    "virtual": {"decode": 0.002, "train": 0.0003},
}  # a batch takes 0.5 s, and a response 0.05 s


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    "Asynchronous runs by where their actors live, each made when it is first asked for."
    made = {}

    def run_of(place: str) -> rl.Run:
        if place not in made:
            made[place] = rl.run(
                "tiny",
                runs=tmp_path_factory.mktemp("runs"),
                **{**SMALL, **TRAINING, "steps": 12, "staleness": 2, **PLACES[place]},
            )
        return ended(made[place])

    return run_of


@pytest.mark.parametrize("place", PLACES)
def test_an_asynchronous_run_stays_within_its_bound(asynchronous, place):
    run, where = asynchronous(place), PLACES[place]
    steps = run.steps
    assert 0 < steps["lag_max"].max() <= 2
    trained = run.rollouts.filter(pl.col("fate") == "trained")
    assert (trained["trained_at"] - 1 - trained["oldest"]).max() <= 2
    assert ((steps["lag_in_flight"] >= 0) & (steps["lag_in_queue"] >= 0)).all() and steps["lag_in_queue"].max() > 0
    dispatched = {row["oldest"] for row in trained.to_dicts()}
    assert dispatched <= set(range(0, 12, where.get("publish_every", 1)))
    writers = {json.loads(f)["actor"] for f in run.table("events").filter(pl.col("kind") == "Generate")["fields"]}
    assert len(writers) == where.get("generators", 1)
    assert_books(run)
    assert not list(run.folder.glob("weights*"))


def test_generation_never_stops_for_training(asynchronous):
    "While a batch is in training, the generator of a split run has turns; a colocated one has none."
    shares = {}
    for placement in ("split", "colocated"):
        run = asynchronous(placement)
        steps, events = run.steps, run.table("events")
        begun = {
            json.loads(f)["version"]: at
            for f, at in events.filter(pl.col("kind") == "Train").select("fields", "at").iter_rows()
        }
        arrived = events.filter(pl.col("kind") == "Generated")["at"].to_list()
        inside = sum(
            any(begun[v] + 0.02 < t < at for v, at in steps.select("version", "at").iter_rows()) for t in arrived
        )
        shares[placement] = inside / len(arrived)
    assert shares["split"] > 0.4 > shares["colocated"], shares


def test_whoever_starts_or_changes_a_run_in_a_notebook_reads_the_notes(tmp_path, capfd):
    """A line each on stderr: rows that were joined, what the configuration does not do,
    and later only what the change brings."""
    rows = [{"prompt": f"{n}+{n}={end}", "answer": str(2 * n)} for n in range(10, 90) for end in ("", " ")]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = {"name": "file", "path": str(tmp_path / "sums.jsonl")}
    knobs = {
        "steps": 1_000_000,
        "eval": [],
        "preflight": 0,
        "generator": "scripted",
        "clock": "virtual",
        "filter": "none",
        "top_p": 0.8,
    }
    run = rl.run("tiny", runs=tmp_path, tasks=tasks, optimizer_steps=2, **SMALL | knobs)
    told = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line.split(":")[:2] for line in told] == [["note", " top_p"], ["note", " tasks.path"]], told
    assert "80 of 160 rows repeat the prompt of an earlier row" in told[1]
    until(lambda: run.state == "running" and run.status.version >= 1)
    run.set(correction="none", staleness=3)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: correction: with staleness = 3")
    until(lambda: (run.settings.correction["name"], run.settings.staleness) == ("none", 3))
    run.set(temperature=0.9)
    assert capfd.readouterr().err == ""
    run.stop()
    until(lambda: run.state == "stopped")


def test_steering(tmp_path):
    run = rl.run("tiny", runs=tmp_path, **{**SMALL, **WITHOUT_MODEL, "steps": 100_000, "eval": []})
    until(lambda: run.status and run.status.version >= 2)
    again = rl.attach("tiny-1", runs=tmp_path)
    again.set(temperature=0.7, author="test")
    until(lambda: (run.rollouts["temperature"].tail(1).to_list() or [1])[0] == 0.7)
    row = run.commands.row(-1, named=True)
    assert (row["knob"], row["value"], row["status"], row["author"], row["apply"]) == (
        "temperature",
        "0.7",
        "applied",
        "test",
        "dispatch",
    )
    again.pause()
    until(lambda: run.state == "paused")
    held = run.status.version
    stood = stands(lambda: run.status.version)
    assert stood <= held + 1, "the batch that had begun, and no other"
    again.step()
    until(lambda: run.status.version == stood + 1)
    time.sleep(1)
    assert run.status.version == stood + 1
    again.go()
    until(lambda: run.status.version > stood + 2)
    for wrong in ({"temperature": 9}, {"seed": 3}, {"temprature": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            run.set(**wrong)
    again.stop(author="test")
    ended(run, "stopped")
    assert run.status.reason == "stopped by test"
    assert_books(run)
    with pytest.raises(ValueError, match="only a live run"):
        run.set(temperature=1.0)


def test_a_guardrail_pauses_the_run_and_says_why(tmp_path):
    guard = [{"name": "guard", "count": 16, "every": 2, "floor": 0.99}]
    run = rl.run(
        {
            "generator": "scripted",
            "clock": "virtual",
            "steps": 50,
            "group": 4,
            "batch": 32,
            "preflight": 0,
            "eval": guard,
        },
        runs=tmp_path,
    )
    until(lambda: run.state == "paused", 30)
    row = until(lambda: run.commands.to_dicts())[-1]
    assert (row["author"], row["knob"]) == ("guardrail", "pause") and "below its floor 0.99" in row["reason"]
    assert run.status.version == 0
    run.stop()
    ended(run, "stopped", 30)
    assert_books(run)


def ends_at_sigterm(run: rl.Run, pid: int) -> None:
    "SIGTERM to one of its processes ends a run as stop does."
    processes = processes_of(run)
    os.kill(pid, signal.SIGTERM)
    ended(run, "stopped")
    assert run.status.reason == "stopped by SIGTERM" and len(processes) >= 5
    assert_books(run)
    until(lambda: gone(processes), 10)


def test_a_killed_trainer_ends_the_run_with_closed_books(tmp_path):
    """In one worker with the generator, what it had published is lost with it:
    the policy of the last checkpoint is saved."""
    settings = {**SMALL, "steps": 100_000, "checkpoint_every": 2, "eval": []}
    run = rl.run("tiny", runs=tmp_path, placement="colocated", **settings)
    until(lambda: run.status and run.status.version >= 4 and run.checkpoints)
    worker_of(run, "worker").kill()
    ended(run, "failed")
    assert "trainer lost" in run.status.reason and "SIGKILL" in run.status.reason
    assert_books(run)
    assert f"the policy of version {list(run.checkpoints.values())[-1].version} is saved" in run.status.reason
    assert run_policy_differs(run) and not list(run.folder.glob("weights*"))


def test_a_killed_environment_is_started_again_and_sigterm_to_the_run_process_ends_a_run_as_stop_does(tmp_path):
    run = rl.run("tiny", runs=tmp_path, **{**SMALL, **WITHOUT_MODEL, "steps": 100_000})
    until(lambda: run.status and run.status.version >= 1)
    version = run.status.version
    worker_of(run, "environment").kill()
    until(lambda: run.status.version >= version + 3)
    ends_at_sigterm(run, run.status.pid)


def test_whoever_kills_all_of_a_run_can_still_close_its_books(tmp_path):
    run = rl.run("tiny", runs=tmp_path, **{**SMALL, "steps": 100_000, "staleness": 2, "eval": []})
    until(lambda: run.status and run.status.version >= 1)
    processes = processes_of(run)
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()
    until(lambda: run.state == "dead", 10)
    with pytest.raises(ValueError, match="only a live run"):
        run.pause()
    run.stop(author="test")
    assert (
        run.state == "failed"
        and run.status.reason.startswith("its processes were killed; closed by test; the policy of version ")
        and run.status.books["left_at_stop"]["count"] > 0
    )
    assert_books(run)
    until(lambda: gone(processes), 10)
    assert not list(run.folder.glob("weights*"))


def test_interrupting_the_command_line_finishes_the_step(tmp_path):
    command = [
        sys.executable,
        "-m",
        "rlbench.cli.main",
        "run",
        "tiny",
        "--json",
        *SET_WITHOUT_MODEL,
        "--set",
        "steps=100000",
        "--set",
        "batch=64",
        "--set",
        "group=8",
        "--name",
        "x",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "x"
    until(lambda: folder.exists() and (status := rl.Run(folder).status) and status.version >= 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=400)
    told = json.loads(out.splitlines()[-1])
    assert (
        process.returncode == 0 and told["state"] == "stopped" and told["books_closed"] and "Ctrl-C" in told["reason"]
    )
    assert_books(rl.Run(folder))


def nan_reward(r: rl.Rollout) -> float:
    return float("nan")


def text_reward(r: rl.Rollout):
    return "good"


def crashing_reward(r: rl.Rollout) -> float:
    return r.length / 0


def assert_no_reward(run: rl.Run, reward, words: str, log: str) -> None:
    "The run has failed by its reward: the function is named wherever one looks, and no rollout has a reward."
    assert run.state == "failed" and reward.__name__ in run.status.reason and words in run.status.reason
    assert all(reward.__name__ in m for m in run.rollouts.filter(pl.col("fate") == "environment_error")["message"])
    assert reward.__name__ in log
    assert run.rollouts["reward"].null_count() == len(run.rollouts) and "environment_error" in run.status.books
    assert_books(run)


def test_a_reward_that_crashes_ends_the_run_and_names_the_function(tmp_path):
    run = ended(
        rl.run("tiny", runs=tmp_path, reward=crashing_reward, **{**SMALL, **WITHOUT_MODEL, "score_retries": 0}),
        "failed",
    )
    assert_no_reward(run, crashing_reward, "ZeroDivisionError", (run.folder / "run.log").read_text())


@pytest.mark.parametrize(("reward", "words"), [(nan_reward, "nan"), (text_reward, "good")])
def test_a_reward_that_gives_no_number_ends_the_run_and_names_the_function(tmp_path, capfd, reward, words):
    "On the virtual clock, in this process."
    driver = inline_run(
        tmp_path, "a", {**SMALL, "generator": "torch", "model": "tiny", "reward": reward, "score_retries": 0}
    )
    assert_no_reward(rl.Run(driver.folder), reward, words, capfd.readouterr().err)


def terse(r: rl.Rollout, *, weight: rl.Knob(0, 1) = 0.1) -> float:
    return r.correct - weight * r.length / 64


def test_a_run_with_a_reward_of_ones_own_is_steered_like_any_other_and_sigterm_to_its_supervisor_ends_it(tmp_path):
    run = rl.run("tiny", runs=tmp_path, reward=terse, **{**SMALL, **WITHOUT_MODEL, "steps": 100_000, "eval": []})
    until(lambda: run.status and run.status.version >= 1)
    ids = run.set({"temperature": 0.8, "reward.weight": 0.5})
    rows = until(
        lambda: (
            (found := [r for r in run.commands.to_dicts() if r["command"] in ids and r["status"] == "applied"])
            and len(found) == 2
            and found
        )
    )
    assert {r["knob"] for r in rows} == {"temperature", "reward.weight"}
    until(lambda: run.rollouts.filter(pl.col("correct") & (pl.col("reward") < 0.96))["reward"].len() > 0)
    with pytest.raises(ValueError, match="reward.weight"):
        run.set({"reward.weight": 5})
    ends_at_sigterm(run, run.status.supervisor)


def hangs(r: rl.Rollout, *, seconds: rl.Knob(0, 600, unit="s") = 30.0) -> float:
    "Some are late; rollout 5 hears no alarm."
    import signal
    import time

    if r.id == 5:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(20 * seconds)
    if r.id % 16 == 3:
        time.sleep(seconds)
    return float(r.correct)


@pytest.fixture(scope="module")
def hung(tmp_path_factory) -> rl.Run:
    "A run whose reward hangs now and then."
    settings = {
        **SMALL,
        **WITHOUT_MODEL,
        "steps": 2,
        "eval": [],
        "preflight": 0,
        "score_deadline": 0.2,
        "score_retries": 0,
    }
    return ended(rl.run("tiny", runs=tmp_path_factory.mktemp("runs"), reward=hangs, **settings))


def test_a_reward_past_its_deadline_is_no_reward(hung):
    late = hung.rollouts.filter(pl.col("outcome") == "timeout")
    assert (
        len(late) > 0
        and late["reward"].null_count() == len(late)
        and set(late["fate"]) <= {"environment_error", "left_at_stop"}
    )
    assert_books(hung)


def test_an_environment_that_hangs_deaf_is_ended_and_the_run_goes_on(hung):
    assert hung.rollouts.filter(pl.col("fate") == "lost_environment")["rollout"].to_list() == [5]
    assert hung.steps["version"].to_list() == [1, 2]
    assert_books(hung)


def test_a_run_whose_process_cannot_begin_is_dead_and_not_starting(tmp_path, monkeypatch):
    "Of the process nothing is heard, since it ends at once: whoever waits for the run is told."
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        broken.setattr("multiprocessing.spawn._python_exe", b"/bin/false")
        broken.setenv("HF_HOME", str(tmp_path))  # read at import: the run comes out of a new server
        never = rl.run("tiny", runs=tmp_path, name="never")
    assert never.wait(20) == "dead" and never.state == "dead"
    assert not never.status.books_closed


def test_same_seed_same_digest_also_with_spawned_workers(finished, tmp_path, monkeypatch):
    "With two threads asked for, numpy starts its pool at import, so workers are spawned and not forked."
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    spawned = ended(rl.run("tiny", runs=tmp_path, **SMALL))
    told, before = ((run.folder / "run.log").read_text() for run in (spawned, finished))
    assert all(f"rlbench-{name} is spawned, not forked" in told for name in ("trainer", "generator", "environment"))
    assert "spawned" not in before
    assert spawned.status.digest and spawned.status.digest == finished.status.digest
    assert spawned.status.parts == finished.status.parts
