"""Runs without a model in real processes: the script of the virtual clock, real verdicts,
and PyTorch in none of the processes."""

import json
import os
import threading
import time

import numpy as np
import polars as pl
import pytest
from command_line import command_facts, run_verb
from inline import inline_run
from patience import until

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.environments.scripted_environment import is_scripted_right
from rlbench.environments.tasks import make_tasks
from rlbench.loop.config import make_config
from rlbench.loop.digest import read_trace
from rlbench.records import Group, Rollout, Sampling, Task, response_segment
from rlbench.reward import VERIFIERS
from rlbench.runtime.halves import paced_generator_half, paced_trainer_half, scripted_text
from rlbench.runtime.messages import GenerateRequest, GenerateResult, ResponseRequest, TrainRequest
from rlbench.runtime.worker import Worker
from rlbench.views.loss_card import loss_card

SCRIPTED = dict(
    generator="scripted",
    clock="real",
    steps=6,
    batch=32,
    group=4,
    staleness=0,
    preflight=8,
    preflight_k=2,
    max_tokens=32,
    eval=[{"name": "held_out", "count": 16, "every": 3}],
)
FAST = {"scripted_pace": 0.0}

# Loaded by every Python process of a test, which has a file of its own: it writes the names of modules when they are
# imported, and those that it has from the process it was forked from. It has no thread: such a process is not forked.
WATCH = """
import os, sys

def write_names(names):
    with open(os.path.join(os.environ["MODULES_FOLDER"], str(os.getpid())), "a") as file:
        for name in names:
            if name.partition(".")[0] in ("rlbench", "torch", "transformers", "vllm"):
                file.write(name + " ")

def note_import(event, arguments):
    if event == "import":
        write_names(arguments[:1])

sys.addaudithook(note_import)
os.register_at_fork(after_in_child=lambda: write_names(list(sys.modules)))
"""


def test_no_process_of_a_scripted_run_imports_torch(tmp_path, monkeypatch):
    """Neither the run's own processes nor those of a fork, a replay and a resumed run, nor the commands that start,
    show and compare them."""
    watch, modules = tmp_path / "watch", tmp_path / "modules"
    watch.mkdir(), modules.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", f"{watch}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MODULES_FOLDER", str(modules))
    table = {**SCRIPTED, "steps": 100_000, "checkpoint_every": 2, "virtual": {"scripted_pace": 0.2}}
    settings = [f"--set={knob}={json.dumps(value)}" for knob, value in table.items() if knob not in ("eval", "virtual")]
    command_facts(tmp_path, "run", "tiny", "--name", "x", "-d", *settings, "--set=virtual.scripted_pace=0.2")
    run = rl.attach("x", runs=tmp_path / "runs")
    until(lambda: run.status.version >= 3 and run.checkpoints)
    own = {run.status.pid, run.status.supervisor, *run.status.workers.values()}
    run.set(temperature=0.5)
    run.stop()
    assert run.wait(400) == "stopped"
    at = list(run.checkpoints.values())[-1].version
    command_facts(tmp_path, "fork", "x", "--name", "y", f"--set=steps={at + 2}")
    child = rl.attach("y", runs=tmp_path / "runs")
    assert child.wait(400) == "finished" and child.replay().wait(400).equal
    command_facts(tmp_path, "resume", "x", "-d")
    until(lambda: run.state == "running" and run.status.version > at)
    own |= {run.status.pid, run.status.supervisor, *run.status.workers.values()}
    run.stop()
    assert run.wait(400) == "stopped"
    command_facts(tmp_path, "show", "x")
    command_facts(tmp_path, "compare", "x", "y")
    told = {int(path.name): set(path.read_text().split()) for path in modules.iterdir()}
    assert len(own) == 10 and own <= set(told), (
        "every process of the run was looked at, before it was stopped and after it was resumed"
    )
    assert all("rlbench.runtime.actors" in told[pid] for pid in own)
    guilty = {
        pid: {name for name in names if name.partition(".")[0] != "rlbench"}
        for pid, names in told.items()
        if any(name.partition(".")[0] != "rlbench" for name in names)
    }
    assert not guilty, guilty


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_a_synchronous_run_writes_what_the_virtual_clock_writes(tmp_path, placement):
    """The same tokens, lengths and verdicts, judged for real in the environment's process; the same events;
    and no weights."""
    virtual = inline_run(tmp_path, "virtual", {**SCRIPTED, "clock": "virtual", "placement": placement})
    real = rl.run(SCRIPTED | {"placement": placement, "virtual": FAST}, name="real", runs=tmp_path)
    assert real.wait(400) == "finished", (real.folder / "run.log").read_text()[-2000:]
    columns = [
        "rollout",
        "try",
        "group",
        "k",
        "task",
        "fate",
        "reason",
        "length",
        "correct",
        "reward",
        "oldest",
        "newest",
        "trained_at",
    ]
    mine, theirs = (
        read_table(folder, "rollouts", columns).sort("rollout", "try") for folder in (real.folder, virtual.folder)
    )
    assert mine.equals(theirs) and 0.1 < mine["correct"].mean() < 0.9
    mine, theirs = (
        read_table(folder, "tokens", ["rollout", "try", "tokens", "logprobs"]).sort("rollout", "try")
        for folder in (real.folder, virtual.folder)
    )
    assert mine.equals(theirs)
    assert read_trace(real.folder).parts["events"] == read_trace(virtual.folder).parts["events"]
    assert (
        not read_trace(real.folder).parts["weights"]
        and not list(real.folder.glob("weights*"))
        and not (real.folder / "policy").exists()
    )
    assert (
        (real.steps["grad_norm"] > 0).all()
        and real.steps["loss"].n_unique() == 6
        and (virtual.state.version, real.status.version) == (6, 6)
    )


def test_one_that_is_taken_up_again_goes_on_with_its_script(tmp_path):
    "Killed as a whole and resumed, it writes the tokens that it would have written in one go."
    whole = inline_run(tmp_path, "virtual", {**SCRIPTED, "clock": "virtual", "steps": 12, "eval": []})
    run = rl.run(
        SCRIPTED | {"steps": 12, "eval": [], "checkpoint_every": 2, "virtual": {"scripted_pace": 0.5}},
        name="real",
        runs=tmp_path,
    )
    until(lambda: run.status and run.status.version >= 5)
    os.kill(run.status.pid, 9)
    assert run.wait(400) == "failed" and "run process lost" in run.status.reason and "policy" not in run.status.reason
    run.resume()
    assert run.wait(400) == "finished", (run.folder / "run.log").read_text()[-2000:]
    mine, theirs = (
        read_table(folder, "rollouts", ["rollout", "fate", "length", "correct", "trained_at"])
        .filter(pl.col("fate") == "trained")
        .sort("rollout")
        for folder in (run.folder, whole.folder)
    )
    assert mine.equals(theirs) and len(mine) > 300


def test_a_generator_that_is_started_again_has_the_newest_version(tmp_path):
    "There is no file of weights in which it could find it: the loop publishes once more."
    run = rl.run(
        SCRIPTED
        | {"steps": 100_000, "eval": [], "staleness": 1, "placement": "split", "virtual": {"scripted_pace": 0.1}},
        runs=tmp_path,
    )
    until(lambda: run.status and run.status.version >= 5)
    for _ in range(5):  # on a busy machine a blow may fall when nothing is being generated
        os.kill(run.status.workers["generator"], 9)
        version = run.status.version
        until(lambda: run.status.version >= version + 5)
        if "lost_generator" in run.status.books:
            break
    run.stop()
    assert run.wait(400) == "stopped" and run.status.books["lost_generator"]["count"] > 0
    trained = run.rollouts.filter(pl.col("fate") == "trained")
    assert (trained["trained_at"] - 1 - trained["oldest"]).max() <= 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> rl.Run:
    "A short run that has ended."
    run = rl.run(
        SCRIPTED | {"steps": 2, "eval": [], "preflight": 0, "virtual": FAST},
        name="short",
        runs=tmp_path_factory.mktemp("runs"),
    )
    assert run.wait(400) == "finished"
    return run


@pytest.mark.parametrize(
    "verb",
    [
        ["sample", "short", "1+1="],
        ["eval", "short"],
        ["export", "short", "policy"],
        ["export", "short", "policy", "--best"],
    ],
    ids=" ".join,
)
def test_what_needs_a_policy_is_refused_with_the_remedy(finished, verb):
    done = run_verb(finished.folder.parent, *verb, "--runs", finished.folder.parent, code=2)
    assert (
        "run: 'short' has generator = \"scripted\" and no policy" in done.stderr
        and 'generator = "torch"' in done.stderr
    ), done.stderr
    assert not (finished.folder.parent / "policy").exists()


def test_log_probabilities_of_a_policy_are_refused(finished):
    rollout = int(finished.rollouts.filter(pl.col("fate") == "trained")["rollout"][0])
    with pytest.raises(ValueError, match=r"no policy to compute log-probabilities with; .* generator = \"torch\""):
        loss_card(finished.folder, rollout, policy=True)


def test_failures_of_the_script_are_for_the_virtual_clock():
    table = {"generator": "scripted", "virtual": {"scripted_errors": 0.1}}
    with pytest.raises(ValueError, match='scripted_errors: 0.1 needs scripted verdicts.*clock = "virtual"'):
        make_config(table)
    assert make_config(table | {"clock": "virtual"}).virtual.scripted_errors == 0.1


@pytest.mark.parametrize("verifier", ["exact", "numeric", "math", "gsm8k"])
def test_the_text_is_judged_as_the_script_says(verifier):
    "Half of them right, more or less; a verifier that reads the text agrees on every one."
    tasks = make_tasks({"name": "arithmetic"}, "train", 0)[:60]
    answers = {task.id: f"#### {task.answer}" if verifier == "gsm8k" else task.answer for task in tasks}
    drawn = [is_scripted_right(7, task, n) for n, task in enumerate(tasks)]
    given = [
        VERIFIERS[verifier](scripted_text(7, task, n, np.array([3, 1, 0])), answers[task.id])
        for n, task in enumerate(tasks)
    ]
    assert given == drawn and 5 < sum(drawn) < 55


def wait_of(config, do_some, monkeypatch) -> float:
    "Seconds that a worker without a model waits for some units of work."
    waits: list[float] = []
    sleep, here = time.sleep, threading.get_ident()

    def note_and_sleep(seconds: float) -> None:
        if threading.get_ident() == here:
            waits.append(seconds)
        sleep(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", note_and_sleep)
        do_some(Worker(config, paced_generator_half(config), paced_trainer_half(config, None)))
    return sum(waits)


def test_stated_times_are_waited_for_at_the_pace(monkeypatch):
    """Eight decode steps of 0.05 s and 100 trained tokens of 0.002 s:
    0.6 s at pace 1, 0.3 s at pace 0.5, nothing at pace 0."""
    task = Task("t", "1+1=", "2", level=1)
    rollout = Rollout(0, 0, 0, 0, task, (response_segment([1] * 100, [0.0] * 100, [0] * 100),))
    told = []

    def do_some(worker) -> None:
        worker.work()
        worker.receive(GenerateRequest((ResponseRequest((0, 0), "1+1=", Sampling(max_tokens=8), 5, task=task),)))
        told.extend(worker.work().results)
        worker.receive(TrainRequest((Group(0, task, (rollout,)),), 1))
        (spent,) = worker.work().spent
        assert (spent.part, spent.kind, spent.work, spent.units) == ("trainer", "compute", "train", 100)

    table = {"generator": "scripted", "decode_steps": 8, "sleep": False, "placement": "colocated"}
    paces = {
        pace: wait_of(
            make_config(
                table
                | {
                    "virtual": {
                        "decode": 0.05,
                        "prefill": 0.0,
                        "train": 0.002,
                        "scripted_length": 1000.0,
                        "scripted_pace": pace,
                    }
                }
            ),
            do_some,
            monkeypatch,
        )
        for pace in (0.0, 0.5, 1.0)
    }
    assert paces == pytest.approx({0.0: 0.0, 0.5: 0.3, 1.0: 0.6})
    texts = {said.text for said in told if isinstance(said, GenerateResult)}
    assert len(texts) == 1 and texts.pop().rpartition("#### ")[2] in ("2", "no answer")
