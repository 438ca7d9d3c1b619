"""The policy that a failed run has saved is evaluated once, and nothing of it can hurt the end of the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_run import fake_run
from patience import until
from real_runs import assert_books, run_policy_differs
from tensorboard_files import from_tensorboard
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import read_json, write_json
from rlbench.base.status import living_processes, read_status
from rlbench.cli.main import app
from rlbench.loop.config_files import load_config, to_toml
from rlbench.runtime.actors import Refused
from rlbench.runtime.checkpoint import POLICY_NOTE
from rlbench.views.report import write_report
from rlbench.views.run_summary import read_summary
from rlbench.workbench import last_evaluation
from rlbench.workbench.last_evaluation import evaluate_failed_run, reason_against
from rlbench.workbench.offline import Evaluated

EVALUATION = "rlbench-evaluation"[:15]  # name of its process
SMALL = dict(
    batch=64,
    group=8,
    preflight=0,
    staleness=1,
    placement="split",
    eval=[{"name": "held_out", "count": 32, "k": 2, "every": 0}, {"name": "other", "count": 8, "every": 0}],
)
FIGURES = dict(
    avg=0.25,
    avg_se=0.01,
    avg_low=0.23,
    avg_high=0.27,
    pass_at_k=0.25,
    pass_low=0.23,
    pass_high=0.27,
    maj_at_k=0.25,
    maj_low=0.23,
    maj_high=0.27,
)


def call(runs: Path, *arguments: str) -> str:
    "What a command printed."
    done = CliRunner().invoke(app, [*arguments, "--runs", str(runs)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def told_json(runs: Path, *arguments: str) -> dict:
    "What a command printed as JSON."
    return json.loads(call(runs, *arguments, "--json").splitlines()[-1])


def log_of(run: rl.Run) -> str:
    return (run.folder / "run.log").read_text()


def killed(runs: Path, name: str, victim: str = "trainer", **settings) -> tuple[rl.Run, list[psutil.Process]]:
    "A real run of which one process was killed after three versions, and the processes it had."
    run = rl.run("tiny", runs=runs, name=name, **SMALL | {"steps": 100_000} | settings)
    until(lambda: run.status and run.status.version >= 3, 120)
    status = run.status
    supervisor = psutil.Process(status.supervisor)
    processes = [supervisor, *supervisor.children(recursive=True)]
    os.kill({"supervisor": status.supervisor}.get(victim) or status.workers[victim], signal.SIGKILL)
    return run, processes


def test_a_run_that_lost_its_trainer_has_its_policy_evaluated(tmp_path):
    """One row of the first set, marked, of the saved version;
    command line, report and the policy's note tell it, and every sink has it."""
    run, processes = killed(tmp_path, "lost", sinks=["tensorboard"], checkpoint_every=2)
    assert run.checkpoints and run.wait(180) == "failed"
    assert "trainer lost" in run.status.reason and "SIGKILL" in run.status.reason
    assert_books(run)
    version = read_json(run.folder / "policy" / POLICY_NOTE)["version"]
    # the trainer had a worker of its own: what it had published is there, also if no checkpoint has it
    assert run.status.version - 1 <= version <= run.status.version
    assert f"the policy of version {version} is saved" in run.status.reason
    assert run_policy_differs(run) and not list(run.folder.glob("weights*"))
    rows = run.evals.filter(run.evals["after_failure"].fill_null(False)).to_dicts()
    assert [(row["eval"], row["version"], row["tasks"], row["k"]) for row in rows] == [("held_out", version, 32, 2)], (
        log_of(run)
    )
    (row,) = rows
    assert (
        0 <= row["avg_low"] <= row["avg"] <= row["avg_high"] <= 1
        and row["digest"] is None
        and row["tokens"] > 0
        and version >= 1
    )
    assert read_json(run.folder / "policy" / POLICY_NOTE)["rated"] == version
    listed = next(each for each in told_json(tmp_path, "ls")["runs"] if each["run"] == "lost")
    assert listed["held_out"] == row["avg"] and listed["held_out_at"] == version and listed["held_out_after_failure"]
    told = told_json(tmp_path, "show", "lost")
    assert told["evaluated_after_failure"] and told["solve_rate_end"] == row["avg"]
    assert f"of version {version}, the saved policy, measured after the run had failed" in " ".join(
        call(tmp_path, "show", "lost").split()
    )
    assert "after the run had failed" in (run.folder / "report.html").read_text()
    assert f"after the failure: the saved policy solves {row['avg']:.3f}" in log_of(run)
    assert from_tensorboard(run.folder)[0]["eval/held_out/avg"][-1] == (version, pytest.approx(row["avg"]))
    until(lambda: not living_processes(processes), 10)


def test_a_run_without_its_supervisor_is_not_evaluated(tmp_path):
    "The run process ends in good order by itself."
    run, processes = killed(tmp_path, "alone", "supervisor")
    assert run.wait(400) == "stopped" and run.status.books_closed
    until(lambda: not living_processes(processes), 15)
    assert not run.evals["after_failure"].any() and "after the failure" not in log_of(run)


def test_a_signal_to_the_supervisor_ends_the_evaluation(tmp_path):
    "Somebody who wants the run to be gone does not wait for a figure; the report is still written."
    run, processes = killed(tmp_path, "hurry")
    supervisor = psutil.Process(run.status.supervisor)
    (evaluation,) = until(lambda: [p for p in supervisor.children(recursive=True) if p.name() == EVALUATION], 120)
    evaluation.suspend()  # it must not be ready before it is ended
    assert evaluation.parent().name() == "rlbench-forks", "it is a fork of the run's server"
    supervisor.terminate()
    until(lambda: not living_processes(processes), 30)
    assert "could not be evaluated: it was stopped by a signal" in log_of(run)
    assert run.state == "failed" and (run.folder / "report.html").exists() and not run.evals["after_failure"].any()


# Main functions of the process, importable by a spawned one.
def measures(connection, folder: str) -> None:
    connection.send(
        Evaluated(
            "held_out", 512, 1, 1.0, **FIGURES, length_mean=20.0, tokens=9, seconds=1.0, levels=[1], level_rates=[0.25]
        )
    )


def hangs(connection, folder: str) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(folder) / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def crashes(connection, folder: str) -> None:
    os._exit(3)


def is_killed_by_the_kernel(connection, folder: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses(connection, folder: str) -> None:
    connection.send(Refused("MemoryError: no more"))


def failed_run(root: Path, limit: float = 60.0) -> Path:
    "A made-up run that failed after version 60 of its last evaluation, with a saved policy of version 66."
    folder = fake_run(
        root,
        "failed",
        rollouts=50,
        state="failed",
        reason="trainer lost; the policy of version 66 is saved; old warning",
    )
    (folder / "config.toml").write_text(to_toml(load_config("tiny", {"deadlines": {"evaluate": limit}})))
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text("{}")
    write_json(folder / "policy" / POLICY_NOTE, {"version": 66, "warning": "old warning"})
    return folder


def test_a_measured_policy_is_told_everywhere(tmp_path):
    "The figures of the process become a row; a warning about the policy is replaced; a second evaluation is refused."
    folder = failed_run(tmp_path)
    before = len(read_table(folder, "evals"))
    assert evaluate_failed_run(folder, main=measures)
    rows = read_table(folder, "evals").to_dicts()
    assert len(rows) == before + 1 and (rows[-1]["version"], rows[-1]["avg"], rows[-1]["after_failure"]) == (
        66,
        0.25,
        True,
    )
    assert (
        read_status(folder).reason == "trainer lost; the policy of version 66 is saved"
        and read_status(folder).books_closed
    )
    assert "0.25 after failing" in call(tmp_path, "ls") and max(map(len, call(tmp_path, "ls").splitlines())) <= 80
    assert (
        read_summary(folder).evaluated_after_failure
        and "held_out (after the run had failed)" in write_report(folder).read_text()
    )
    assert not evaluate_failed_run(folder, main=measures) and len(read_table(folder, "evals")) == before + 1


@pytest.mark.parametrize(
    ("main", "words"),
    [(crashes, "exit status 3"), (is_killed_by_the_kernel, "killed by SIGKILL"), (refuses, "MemoryError: no more")],
)
def test_an_evaluation_that_dies_changes_nothing(tmp_path, capfd, main, words):
    folder = failed_run(tmp_path)
    before, rows = read_status(folder), read_table(folder, "evals")
    assert not evaluate_failed_run(folder, main=main)
    assert (
        read_status(folder) == before and read_table(folder, "evals").equals(rows) and words in capfd.readouterr().err
    )
    assert (
        not read_summary(folder).evaluated_after_failure
        and "after the run had failed" not in write_report(folder).read_text()
    )


def test_an_evaluation_that_hangs_is_ended_with_all_it_started(tmp_path, capfd):
    folder = failed_run(tmp_path, limit=15.0)
    began = time.monotonic()
    assert not evaluate_failed_run(folder, main=hangs)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert time.monotonic() - began < 29 and "took longer than deadlines.evaluate = 15 s" in capfd.readouterr().err
    until(
        lambda: (
            not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        ),
        5,
    )


@pytest.mark.parametrize(("generator", "is_forked"), [("torch", True), ("vllm", False)])
def test_an_evaluation_is_forked_from_the_server_unless_vllm_generates(tmp_path, monkeypatch, generator, is_forked):
    "The libraries of vLLM do not bear a fork."
    folder = failed_run(tmp_path)
    (folder / "config.toml").write_text(to_toml(load_config("tiny", {"generator": generator})))
    seen = []
    monkeypatch.setattr(last_evaluation, "ProcessHandle", lambda *_, server, **named: seen.append(server))
    monkeypatch.setattr(last_evaluation, "wait_for_evaluation", lambda *_: "it was not begun")
    monkeypatch.setattr(last_evaluation, "end_evaluation", lambda handle: None)
    server = object()
    assert not evaluate_failed_run(folder, server=server)
    assert seen == [server if is_forked else None]


def test_who_is_not_evaluated_and_why(tmp_path, capfd):
    "Each reason is one sentence; without a policy nothing is said."
    folder = failed_run(tmp_path)
    for settings, words in (
        ({"clock": "virtual"}, "virtual clock"),
        ({"eval": []}, "names no evaluation set"),
        ({"deadlines": {"evaluate": 0.0}}, "deadlines.evaluate is 0"),
        ({"max_turns": 1}, ""),
    ):
        assert words in reason_against(folder, load_config("tiny", settings)) and bool(words) == bool(
            reason_against(folder, load_config("tiny", settings))
        )
    assert "environment" in reason_against(folder, load_config("tiny-fix")) or "sandbox" in reason_against(
        folder, load_config("tiny-fix")
    )
    assert "runs programs in a sandbox" in reason_against(folder, load_config("tiny-code"))
    write_json(folder / "policy" / POLICY_NOTE, {"version": 60, "warning": ""})
    assert reason_against(folder, load_config("tiny")) == "version 60 has been evaluated already"
    capfd.readouterr()
    assert not evaluate_failed_run(folder, main=measures)
    assert capfd.readouterr().err.splitlines() == [
        "after the failure: the saved policy is not evaluated: version 60 has been evaluated already"
    ]
    (folder / "policy" / "config.json").unlink()
    assert not evaluate_failed_run(folder, main=measures) and not capfd.readouterr().err
