"""Many runs: the list of the command line, tags and notes, removing and archiving by pattern."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import fake_run
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.labels import read_labels
from rlbench.base.status import read_status, write_status
from rlbench.cli.main import app
from rlbench.workbench.ablation import ArmJob, start_or_attach
from rlbench.workbench.ablation_result import Arm

NAMES = [f"ablation-loss-cispo-3fa91c-s{n}" if n % 3 else f"tiny-{n}" for n in range(40)]


def make_runs(root: Path, names: list[str]) -> Path:
    "A folder with runs of these names; every fourth went on after its last evaluation and failed."
    for number, name in enumerate(names):
        folder = fake_run(
            root, name, batches=1 + number % 7, rollouts=0, state="failed" if number % 4 == 0 else "finished"
        )
        status = read_status(folder)
        at = time.time() - 40_000 * number
        write_status(
            folder, replace(status, version=status.version + 2 * (number % 4 == 0), started=at, updated=at + 60)
        )
    return root


def call(runs: Path, *arguments: str, code: int = 0) -> str:
    "What a command printed; both streams."
    done = CliRunner().invoke(app, [*arguments, "--runs", str(runs)], env={"COLUMNS": "80"})
    assert done.exit_code == code, done.output
    return done.output


def test_forty_runs_at_eighty_columns(tmp_path):
    """Each name stands whole on a line of at most 80 columns; a rate of an earlier version says so;
    conditions, tags and sorting narrow the list."""
    forty = make_runs(tmp_path / "runs", NAMES)
    call(forty, "tag", "tiny-0", "good", "paper")
    call(forty, "note", "tiny-0", "the one in the paper " * 5)
    lines = call(forty, "ls").splitlines()
    assert len(lines) == 42 and max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines[1:]} - {"#good"} == set(NAMES)
    assert next(line for line in lines if line.startswith("tiny-0 ")).split()[3:6] == ["0.36", "of", "v1"]
    assert [line.split()[0] for line in call(forty, "ls", "--tag", "good").splitlines()[1:]] == ["tiny-0", "#good"]
    assert {
        line.split()[1]
        for line in call(forty, "ls", "--where", "state=failed", "--where", "name=tiny-*").splitlines()[1:]
        if line[0] != " "
    } == {"failed"}
    told = json.loads(call(forty, "ls", "--sort", "held_out", "--json").splitlines()[-1])["runs"]
    assert len(told) == 40 and told[0]["held_out"] == max(run["held_out"] for run in told)
    (mine,) = [run for run in told if run["run"] == "tiny-0"]
    assert mine["tags"] == ["good", "paper"] and mine["held_out_at"] == 1 and mine["version"] == 3
    assert "is no condition" in call(forty, "ls", "--where", "good", code=2)


def test_tags_and_notes_from_every_side(tmp_path):
    "The handle, the command and another process's file are the same labels."
    runs = make_runs(tmp_path / "runs", ["tiny-3"])
    run = rl.attach("tiny-3", runs=runs)
    assert run.tag("base") == ("base",) and run.note == ""
    run.write_note("first")
    assert "#base" in call(runs, "tag", "tiny-3") and "first" in call(runs, "note", "tiny-3")
    call(runs, "tag", "tiny-3", "--drop", "base")
    assert run.tags == () and run.note == "first"
    with pytest.raises(ValueError, match="cannot be a tag"):
        run.tag("two words")
    with pytest.raises(ValueError, match="cannot be a tag"):
        rl.run("tiny", runs=runs, tags=["two words"])
    made = rl.run(
        "tiny",
        runs=runs,
        name="new",
        tags=["a"],
        note="b",
        generator="scripted",
        clock="virtual",
        steps=1,
        batch=8,
        group=8,
        preflight=0,
        eval=[],
    )
    assert read_labels(made.folder).tags == ("a",) == made.tags and made.note == "b"
    assert rl.run("tiny", runs=runs, name="new", exist="attach").folder == made.folder
    with pytest.raises(FileExistsError, match=r'rl.attach\("new"\).*exist="attach"'):
        rl.run("tiny", runs=runs, name="new")
    made.wait(400)


def test_several_are_removed_and_archived_by_pattern(tmp_path):
    "Running ones are refused by name before anything goes; archived ones are out of the list and come back."
    runs = make_runs(tmp_path / "runs", NAMES[:20])
    live = rl.attach("tiny-6", runs=runs).folder
    write_status(live, replace(read_status(live), state="running", host="elsewhere"))
    assert "'tiny-6' is running; stop it first" in call(runs, "rm", "tiny-*", "--yes", code=2)
    other = rl.attach("tiny-9", runs=runs).folder
    stopped = read_status(other)
    write_status(other, replace(stopped, state="running", host="elsewhere"))
    refused = call(runs, "rm", "tiny-*", "--yes", code=2)
    assert "rlbench stop tiny-6; rlbench stop tiny-9" in " ".join(refused.split())  # the verb takes one run
    write_status(other, stopped)
    assert len(rl.runs(runs)) == 20
    assert "moved to" in call(runs, "archive", "ablation-*", "tiny-0")
    assert "tiny-0 " not in call(runs, "ls") and "tiny-0 " in call(runs, "ls", "--archived")
    with pytest.raises(FileNotFoundError, match="it is archived"):
        rl.attach("tiny-0", runs=runs)
    call(runs, "archive", "--back", "tiny-*")
    assert rl.attach("tiny-0", runs=runs).state == "failed"
    removed = json.loads(call(runs, "rm", "tiny-1?", "tiny-0", "--yes", "--json").splitlines()[-1])["removed"]
    assert {Path(each).name for each in removed} == {"tiny-0", "tiny-12", "tiny-15", "tiny-18"} and not any(
        Path(each).exists() for each in removed
    )
    assert "fits 'nothing-*'" in call(runs, "rm", "nothing-*", "--yes", code=2)


def test_runs_of_an_ablation_say_arm_and_seed(tmp_path):
    """The folder's name tells arm and seed; arms that differ in what the words leave out have different names;
    an older name is found again."""
    first, second = (ArmJob(Arm("loss = cispo (high 0.3)", {}, hash_), 3, False) for hash_ in ("3fa91cde", "77aa00bb"))
    assert first.run_name == "loss-cispo-high-0.3-3fa91c-s3" != second.run_name
    assert ArmJob(Arm("band = 0.1–0.9", {}, "abcdef01"), 0, True).run_name == "band-0.1-0.9-abcdef-s0-again"
    older = fake_run(tmp_path / "runs", first.key, batches=1, rollouts=0)
    assert start_or_attach(first, {}, tmp_path)[0].folder == older
