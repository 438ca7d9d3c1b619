"""What is said of a run folder that is damaged, and of words that name no run."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import run_verb

import rlbench as rl
from rlbench.base.lease import STALE_S, run_state
from rlbench.base.ledger_reading import open_table, read_table
from rlbench.base.runs_folder import find_run_folder
from rlbench.base.status import read_status, value_in_force
from rlbench.runtime.listing import keep_where, read_listed
from rlbench.workbench.handle import example_run


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> rl.Run:
    "A run without a model that has ended."
    return example_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(example, tmp_path) -> Path:
    "A copy of its folder, to be damaged."
    return shutil.copytree(example.folder, tmp_path / "runs" / "copied")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_working_directory(name, copied, monkeypatch):
    "Not even for a verb that removes."
    monkeypatch.chdir(copied)
    with pytest.raises(ValueError, match="names no run"):
        find_run_folder(name)
    told = run_verb(copied, "rm", name, "--yes", code=2)
    assert "names no run" in told.stderr and copied.is_dir()


def test_a_run_is_removed_from_within_its_folder(copied):
    "The verb says so, although its working directory is gone."
    told = run_verb(copied, "rm", "copied", "--yes", "--runs", copied.parent)
    assert told.stdout.strip() == f"removed {copied}" and not copied.exists()


@pytest.mark.parametrize("text", ["[1]", "{}", '{"state": 3}', "null"])
def test_a_file_that_holds_no_status_is_named(text, copied):
    "A list of runs has a line for it, and other runs."
    (copied / "status.json").write_text(text)
    with pytest.raises(ValueError, match=r"status\.json: holds no status of a run"):
        read_status(copied)
    assert read_listed(copied).state == "unreadable"
    told = run_verb(copied, "show", "copied", "--runs", copied.parent, code=2)
    assert "status.json" in told.stderr


def test_a_damaged_table_names_its_file(copied):
    "Whether it is read at once or asked later; other tables are read as before."
    segments = sorted((copied / "ledger" / "rollouts").glob("*.parquet"))
    os.truncate(segments[0], 100)
    for read in (read_table, open_table):
        with pytest.raises(ValueError, match=f"{segments[0].name}: is damaged or cut off"):
            read(copied, "rollouts")
    assert len(read_table(copied, "steps")) == 8
    told = run_verb(copied, "show", "copied", "--runs", copied.parent, code=2)
    assert segments[0].name in told.stderr


def test_a_run_without_a_status_starts_only_for_a_while(copied):
    "Afterwards nobody writes one any more."
    (copied / "status.json").unlink()
    assert run_state(copied, None) == "starting"
    told = run_verb(copied, "show", "copied", "--runs", copied.parent)
    assert told.stdout.strip() == "copied: starting; it has written no status yet"
    long_ago = (copied / "config.toml").stat().st_mtime - 2 * STALE_S
    os.utime(copied / "config.toml", (long_ago, long_ago))
    (copied / "lease.json").unlink(missing_ok=True)
    assert run_state(copied, None) == "dead" and read_listed(copied).state == "dead"
    told = run_verb(copied, "show", "copied", "--runs", copied.parent, code=2)
    assert "has no status.json" in told.stderr


def test_a_budget_that_was_raised_is_shown(copied):
    "In the list, with the version."
    status = json.loads((copied / "status.json").read_text())
    (copied / "status.json").write_text(json.dumps(status | {"state": "stopped", "changed": {"steps": [4000, 3]}}))
    assert read_listed(copied).version_text == "8/4000"
    assert value_in_force(None, "steps", 7) == 7


def test_a_condition_on_a_field_that_no_run_has_is_refused(copied):
    "One on a setting that the run has is not."
    listed = [read_listed(copied)]
    assert keep_where(listed, ["generator=scripted", "loss.low<1"]) == listed
    with pytest.raises(ValueError, match="where: unknown name 'generater'.*generator"):
        keep_where(listed, ["generater=scripted"])


def test_a_missing_configuration_is_a_caution_of_a_comparison(example, copied):
    "The exams do not differ: that of the copy is not known."
    (copied / "config.toml").write_text("{{{")
    told = rl.compare(example, rl.attach(copied)).cautions
    assert "The configuration of copied (config.toml) is missing or cannot be read, so its exam is not known." in told
