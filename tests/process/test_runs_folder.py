"""Where runs live, from which folder they are found, and what of a moved run still works."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.run_files import create_run_folder
from rlbench.base.runs_folder import RUNS_VARIABLE
from rlbench.base.status import Status, write_status
from rlbench.cli.main import app
from rlbench.loop.config_files import absolute_config, load_config, write_config
from rlbench.views.report import write_report

SCRIPTED = dict(
    generator="scripted",
    clock="virtual",
    steps=3,
    batch=32,
    group=8,
    preflight=0,
    checkpoint_every=1,
    eval=[],
    filter="none",
)


def write_tasks(path: Path, count: int = 60) -> Path:
    "A file of tasks."
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(count)))
    return path


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a configuration, a task file and a subfolder, in which a finished run lies;
    the working directory is the subfolder."""
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    project = tmp_path / "project"
    (project / "nbs").mkdir(parents=True)
    (project / "runs").mkdir()
    write_tasks(project / "sums.jsonl")
    (project / "mine.toml").write_text('tasks = {name = "file", path = "sums.jsonl"}\n')
    monkeypatch.chdir(project / "nbs")
    run = rl.run("../mine.toml", name="monday", **SCRIPTED)
    assert run.wait(400) == "finished", run.status
    return project


def call(*arguments: str, code: int = 0):
    "What a command printed; both streams."
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


def test_a_run_is_found_from_every_folder_and_goes_on_after_a_move(project, monkeypatch):
    """One folder of runs for a project; absolute paths in config.toml; a moved folder opens, resumes and forks;
    a changed file is said, a lost one refused."""
    assert (project / "runs" / "monday" / "config.toml").is_file()
    assert rl.attach("monday").config.tasks["path"] == str(project / "sums.jsonl")
    assert rl.attach("runs/monday").folder == project / "runs" / "monday"
    assert "monday" in call("ls")

    moved = project.parent / "moved"
    moved.mkdir()
    shutil.move(project / "runs" / "monday", moved / "monday")
    monkeypatch.chdir(moved.parent)
    monkeypatch.setenv(RUNS_VARIABLE, "moved")
    run = rl.attach("monday")
    assert run.folder == moved / "monday" and run.status.version == 3
    assert "finished" in call("show", "monday") and write_report(run.folder).is_file()

    write_tasks(project / "sums.jsonl", 61)
    with pytest.warns(UserWarning, match="sums.jsonl' has changed since the run 'monday' began"):
        child = run.fork(at=2, steps=4)
    assert child.wait(400) == "finished" and child.folder == moved / "monday-1"
    assert "note: tasks.path" in call("resume", "monday", "--set", "steps=5", "--quiet")
    assert run.status.version == 5

    (project / "sums.jsonl").unlink()
    before = (run.folder / "status.json").read_bytes()
    assert "ln -s NEW" in call("resume", "monday", "--set", "steps=7", code=2)
    assert run.state == "finished" and (run.folder / "status.json").read_bytes() == before
    assert "finished" in call("show", "monday") and run.config.steps == 3  # reading needs no file of others


def test_what_a_model_in_another_run_was(tmp_path, monkeypatch):
    "A policy inside a run's folder that has moved is a refusal that says where it was."
    policy = tmp_path / "runs" / "base" / "policy"
    shutil.copytree(str(files("rlbench.data") / "tiny"), policy)
    folder = create_run_folder(tmp_path / "runs", "child")
    monkeypatch.chdir(tmp_path / "runs")
    write_config(folder, absolute_config(load_config({**SCRIPTED, "model": "base/policy"})))
    write_status(folder, Status("finished", version=3))
    run = rl.attach("child")
    assert run.config.model == str(policy)
    (tmp_path / "runs" / "base").rename(tmp_path / "runs" / "renamed")
    with pytest.raises(FileNotFoundError, match=r"model: .*runs/base/policy' is gone.*put it back"):
        run.resume(steps=5)
    assert run.state == "finished"
