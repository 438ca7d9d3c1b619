"""The whole loop saved, and resumed: from a random moment on the virtual clock, and from killed processes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from inline import Told, inline_run
from properties import RANDOMS, examples
from resumed_runs import SYNC, a_run, check_resumed, taken_up
from small_loops import a_command, a_config

from rlbench.base.ledger_reading import read_resumes, read_table
from rlbench.base.run_files import read_json
from rlbench.base.status import read_status, write_status
from rlbench.loop.config import make_config
from rlbench.loop.config_files import captured_functions, read_config
from rlbench.loop.ending import FINISHED
from rlbench.records import TrainMetrics
from rlbench.runtime.checkpoint import (
    CHECKPOINT_SCHEMA,
    checkpoint_folders,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
)
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.halves import TrainerHalf
from rlbench.runtime.lineage import BY_PLACE, commands_to_replay
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.fork import prepare_fork
from rlbench.workbench.starting import check_resumable
from rlbench.workbench.supervisor import load_newest_usable


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        {"generator": "scripted"},
        {"generator": "torch", "model": "tiny", "max_tokens": 24, "steps": 4, "filter": "none", "checkpoint_every": 1},
    ],
    ids=["scripted", "tiny"],
)
@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_a_resumed_synchronous_run_is_the_same_run(tmp_path, table, placement):
    """Killed at some moments and resumed, once again killed on the way:
    digest, steps and trained rollouts of the run that nobody touched."""
    table = SYNC | table | {"placement": placement}
    whole = a_run(tmp_path / "whole", table)
    drive(whole)
    shares = (0.6, 0.95) if table["generator"] == "torch" else (0.45, 0.7, 0.95)
    killed = {share: tmp_path / f"killed-{share}" for share in shares}
    first = a_run(tmp_path / "first", table, {int(share * whole.state.seq): killed[share] for share in shares})
    drive(first)
    assert first.state.digest == whole.state.digest
    for share, copy in killed.items():
        again = tmp_path / f"again-{share}"
        resumed = taken_up(copy, 1, {int(0.97 * whole.state.seq): again})
        drive(resumed)
        for driver in [resumed] + ([taken_up(again, 2)] if again.exists() else []):
            drive(driver) if driver.state.phase not in FINISHED else None
            check_resumed(driver)
            assert driver.state.digest == whole.state.digest
            columns = ["version", "trained_tokens", "solve_rate", "loss", "entropy", "optimizer_steps"]
            assert read_table(driver.folder, "steps", columns).equals(read_table(whole.folder, "steps", columns))


class KilledAtCheckpoint(Told):
    "A driver whose run folder is copied as soon as it has another checkpoint than the one it began with."

    def flush(self) -> None:
        super().flush()
        if self.copies and checkpoint_folders(self.folder)[-1].name != self.start.folder.name:
            shutil.copytree(self.folder, self.copies.pop(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, table",
    [
        (
            196,
            {
                "placement": "colocated",
                "staleness": 2,
                "concurrency": 32,
                "checkpoint_every": 1,
                "seed": 248,
                "virtual": {"train": 0.1, "publish": 0.01},
            },
        ),
        (
            205,
            {
                "placement": "split",
                "staleness": 2,
                "concurrency": 32,
                "checkpoint_every": 2,
                "seed": 226,
                "eval": [],
                "virtual": {"train": 0.0001, "publish": 0.5},
            },
        ),
        (
            267,
            {
                "placement": "colocated",
                "staleness": 1,
                "concurrency": 8,
                "checkpoint_every": 1,
                "seed": 257,
                "eval": [],
                "virtual": {"train": 0.0001, "publish": 0.01},
            },
        ),
    ],
    ids=["slow trainer", "slow publish", "few slots"],
)
def test_killed_again_right_after_the_checkpoint_that_follows_a_resume(tmp_path, moment, table):
    """What the first kill lost is not all dispatched again by then:
    its attempts get numbers that none of before the first kill has."""
    drive(a_run(tmp_path / "first", SYNC | table, {moment: tmp_path / "killed"}))
    again = taken_up(tmp_path / "killed", kind=KilledAtCheckpoint)
    again.copies = [tmp_path / "again"]
    drive(again)
    second = taken_up(tmp_path / "again", 2)
    assert any(rollout >= second.state.dispatch.next_rollout for rollout in second.state.checkpoints.free_attempts), (
        "an attempt of before the first kill waits to be dispatched again"
    )
    drive(second)
    check_resumed(second)


@pytest.mark.slow
def test_a_run_killed_between_its_last_checkpoint_and_its_end_is_finished(tmp_path):
    "Nothing is left to train, but the policy is to be saved and the books to be closed; a finished run is refused."
    whole = a_run(tmp_path / "whole", SYNC)
    drive(whole)
    late = a_run(tmp_path / "late", SYNC, {whole.state.seq - 1: tmp_path / "killed"})
    drive(late)
    folder = tmp_path / "killed"
    assert checkpoint_folders(folder)[-1].name == "v000008"
    write_status(folder, replace(read_status(folder), state="failed"))
    check_resumable(folder, {})
    driver = taken_up(folder)
    drive(driver)
    check_resumed(driver)
    assert driver.state.digest == whole.state.digest and read_status(folder).state == "finished"
    with pytest.raises(ValueError, match="has spent its budget"):
        check_resumable(folder, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        {"stragglers": "partial"},
        {"environment": "scripted", "max_turns": 4},
        {"stragglers": "requeue", "straggler_unit": "rollout"},
    ],
    ids=["partial", "episodes", "requeue"],
)
def test_a_fork_in_the_middle_of_things_closes_its_books(tmp_path, table):
    "What was written of rollouts that are alive is the fork's, whatever they are waiting for."
    run = a_run(
        tmp_path / "run", SYNC | {"staleness": 2, "eval": [], "checkpoint_every": 1, "checkpoints_kept": 9} | table
    )
    drive(run)
    begun = set()
    for folder in checkpoint_folders(run.folder)[:-1]:
        child = prepare_fork(run.folder, f"of-{folder.name}", read_manifest(folder).version)
        driver = Driver(
            child,
            read_config(child),
            make_pools(read_config(child)),
            load_checkpoint(find_checkpoint(child), captured_functions(child)),
        )
        begun |= {member.status for member in driver.state.rollouts.values() if member.tokens}
        drive(driver)
        assert read_status(child).books_closed and driver.state.version == 8
    assert begun - {"done", "generated", "scoring"} or "requeue" in table.values(), "some had been begun"


@pytest.mark.slow
def test_a_command_that_waits_at_a_checkpoint_takes_effect_once_more(tmp_path):
    "Undone with what it did, and asked for still: the journal says so, and nobody has to ask again."
    for heard in range(60, 400, 3):
        run = a_run(
            tmp_path / f"run-{heard}",
            SYNC,
            {heard + 25: tmp_path / f"killed-{heard}"},
            told=[(heard, "temperature", 0.5, 0)],
        )
        drive(run)
        killed = tmp_path / f"killed-{heard}"
        last = load_checkpoint(find_checkpoint(killed)) if killed.exists() and checkpoint_folders(killed) else None
        if last and last.state.commands.waiting and len(read_table(killed, "commands")):
            break
    driver = taken_up(killed)
    drive(driver)
    journal = read_table(killed, "commands").filter(pl.col("knob") == "temperature")
    assert journal["status"].to_list() == ["applied", "lost", "applied"] and journal["reason"][1].endswith(
        "it takes effect once more"
    )
    assert driver.state.config.temperature == 0.5 and driver.state.digest == run.state.digest
    assert [said.knob for said in commands_to_replay(read_table(killed, "commands"), BY_PLACE, 8)] == ["temperature"]


@pytest.mark.slow
@examples(16)
@given(r=RANDOMS)
def test_a_random_run_resumed_at_a_random_moment_closes_its_books(r, tmp_path_factory):
    "Whatever the configuration and the commands: what is resumed ends with closed books, and resumed again, too."
    folder = tmp_path_factory.mktemp("resumed")
    table = a_config(r) | {
        "virtual": {
            "scripted_errors": r.choice((0.0, 0.2)),
            "train": r.choice((0.0001, 0.002)),
            "publish": r.choice((0.01, 0.5)),
        },
        "checkpoint_every": r.choice((1, 1, 2, 3)),
        "after_resume": r.choice(("keep", "keep", "drop")),
        "checkpoints_kept": r.choice((1, 2, 5)),
    }
    told = [(r.randint(1, 300), *a_command(r, make_config(table))) for _ in range(r.choice((0, 4, 8)))] + [
        (r.randint(20, 200), "checkpoint", None, 0)
    ] * r.choice((0, 1))
    copies = {r.randint(30, 300): folder / f"copy-{i}" for i in range(2)}
    drive(a_run(folder / "run", table, copies, told))
    for copy in [copy for copy in copies.values() if copy.exists() and checkpoint_folders(copy)]:
        onward = {r.randint(30, 300): folder / f"{copy.name}-onward"}
        driver = taken_up(copy, 1, onward)
        drive(driver)
        check_resumed(driver)
        for second in [path for path in onward.values() if path.exists()]:
            driver = taken_up(second, 1 + len(read_resumes(second)))
            drive(driver)
            check_resumed(driver)


@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    """The second and the third save find no room, in the run process and at the trainer:
    the journal says so, nothing of them is left, the digest is that of a run that had room."""
    import errno

    from rlbench.runtime import checkpoints as d
    from rlbench.runtime import worker as w

    drive(whole := a_run(tmp_path / "whole", SYNC))
    saves = []

    def full(*args):
        saves.append(args)
        if len(saves) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return begin(*args)

    begin, finish = d.begin_checkpoint, d.finish_checkpoint
    monkeypatch.setattr(d, "begin_checkpoint", full)
    drive(driver := a_run(tmp_path / "full", SYNC))
    refused = read_table(driver.folder, "commands").filter(pl.col("knob") == "checkpoint")
    assert refused["status"].to_list() == ["refused"] * 2 and all(
        "dropped: No space left" in reason for reason in refused["reason"]
    )
    assert (
        driver.state.digest == whole.state.digest
        and len(saves) == 7
        and not list((driver.folder / "checkpoints").glob(".*"))
    )
    monkeypatch.setattr(d, "begin_checkpoint", begin)
    monkeypatch.setattr(
        w,
        "scripted_trainer_half",
        lambda: TrainerHalf(
            lambda groups, version: (TrainMetrics(), {}, 0.0, {}),
            *[lambda *_: None] * 3,
            checkpoint=lambda folder: finish(Path(folder) / "nowhere", None),
        ),
    )
    drive(driver := a_run(tmp_path / "trainer", SYNC))
    assert (
        driver.state.digest == whole.state.digest
        and not checkpoint_folders(driver.folder)
        and len(read_table(driver.folder, "commands")) == 7
    )


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    """Saved before the stop, with its queue; resumed, it ends with the steps it was asked for.

    A command that took effect after the checkpoint is undone and says so."""
    table = SYNC | {"staleness": 2, "eval": [], "checkpoint_every": 100}
    stopped = a_run(
        tmp_path / "run",
        table,
        told=[(150, "checkpoint", None, 0), (220, "temperature", 0.5, 0), (300, "stop", None, 0)],
    )
    drive(stopped)
    assert (
        stopped.state.reason.startswith("stopped")
        and [f.name for f in checkpoint_folders(stopped.folder)][-1] == find_checkpoint(stopped.folder).name
    )
    last = load_checkpoint(find_checkpoint(stopped.folder))
    assert last.manifest.reason == "before a stop" and last.state.config.temperature == 0.5 and last.state.groups
    shutil.copytree(tmp_path / "run", tmp_path / "early")
    for folder in checkpoint_folders(tmp_path / "early"):
        if load_checkpoint(folder).state.config.temperature == 0.5:
            shutil.rmtree(folder)
    for folder, temperature in ((tmp_path / "run", 0.5), (tmp_path / "early", 1.0)):
        driver = taken_up(folder)
        drive(driver)
        check_resumed(driver)
        assert driver.state.version == 8 and driver.state.config.temperature == temperature
        told = read_table(folder, "commands").filter(pl.col("knob") == "temperature")["status"].to_list()
        assert told == (["applied"] if temperature == 0.5 else ["applied", "lost"])


def aged(folder: Path) -> Path:
    "Make a run's newest checkpoint, configuration and tables what they were before runs could judge code."
    place = find_checkpoint(folder)
    told, manifest = (read_json(place / name) for name in ("state.json", "manifest.json"))
    for name in ("batch", "window", "has_alerted"):
        del told["state"]["scoring"][name]
    for config in filter(None, (told["state"]["config"], told["state"]["placement"]["built"])):
        for name in ("sandbox", "infra_warn", "infra_stop"):
            del config[name]
    for name in ("pool", "verdicts"):
        del told["kept"]["meters"][name]
    manifest["rows"].pop("verdicts", None)
    (place / "state.json").write_text(json.dumps(told))
    manifest["files"]["state.json"] = (place / "state.json").stat().st_size
    (place / "manifest.json").write_text(json.dumps(manifest))
    lines, keep = (folder / "config.toml").read_text().splitlines(), []
    for line in lines:
        keep.append(not line.startswith("[sandbox") if line.startswith("[") else (keep[-1] if keep else True))
    (folder / "config.toml").write_text(
        "\n".join(line for line, kept in zip(lines, keep) if kept and not line.startswith("infra_"))
    )
    return place


@pytest.mark.slow
def test_a_checkpoint_of_before_there_were_sandboxes(tmp_path):
    """What is not in it has its default, and the run that goes on from it is the run that nobody touched.

    One that lacks what has none is refused by name."""
    whole = a_run(tmp_path / "whole", SYNC)
    drive(whole)
    copy = tmp_path / "killed"
    drive(a_run(tmp_path / "first", SYNC, {int(0.6 * whole.state.seq): copy}))
    place = aged(copy)
    assert (
        '"has_alerted":' not in (place / "state.json").read_text() and "infra" not in (copy / "config.toml").read_text()
    )
    resumed = taken_up(copy)
    assert (
        resumed.state.scoring.batch,
        resumed.state.scoring.window,
        resumed.state.scoring.has_alerted,
        resumed.meters.verdicts,
        resumed.state.config.infra_stop,
    ) == ((0, 0), (0, 0), False, (0, 0, 0), 0.2)
    drive(resumed)
    check_resumed(resumed)
    assert resumed.state.digest == whole.state.digest and read_table(copy, "steps")["infra_masked"].to_list()[-1] == 0.0
    place = aged(tmp_path / "first")
    told = read_json(place / "state.json")
    del told["state"]["dispatch"]["curriculum"]
    (place / "state.json").write_text(json.dumps(told))
    manifest = read_json(place / "manifest.json")
    manifest["files"]["state.json"] = (place / "state.json").stat().st_size
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="cannot be read .*curriculum.*; take the one before"):
        load_checkpoint(place, {})


def test_responses_of_an_older_rlbench_under_top_p_are_said_at_resume(tmp_path, capsys):
    """Its checkpoints have no sampling masks, and no field for them;
    one of today, or one drawn from all tokens, says nothing."""
    table = {
        "group": 4,
        "batch": 16,
        "steps": 4,
        "concurrency": 32,
        "preflight": 0,
        "eval": [],
        "staleness": 2,
        "checkpoint_every": 2,
    }
    said = {}
    for name, change in {"cut": {"top_p": 0.8}, "whole": {}}.items():
        place = inline_run(tmp_path, name, table | change).folder / "checkpoints" / "v000002"
        load_newest_usable(place.parent.parent, {})
        assert "note:" not in capsys.readouterr().err
        for folder in {*checkpoint_folders(place.parent.parent)} - {place}:
            shutil.rmtree(folder)
        text = (place / "state.json").read_text()
        older = re.sub(r',"sampling_mask":(null|\{[^{}]*\})', "", text)
        count = len(re.findall(r'"kind":"response"', older))
        assert older != text and count
        (place / "state.json").write_text(older)
        told = json.loads((place / "manifest.json").read_text())
        told["files"]["state.json"] = len(older.encode())
        (place / "manifest.json").write_text(json.dumps(told))
        load_newest_usable(place.parent.parent, {})
        said[name] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
        assert check_resumable(place.parent.parent, {"steps": 6}) == [
            line.removeprefix("note: ") for line in said[name]
        ]
    (line,) = said["cut"]
    assert line.startswith(f"note: top_p: {count} responses in v000002 are of an older rlbench") and said["whole"] == []


SCHEMA_1 = Path(__file__).parents[1] / "helpers" / "schema_1_runs.tar.gz"


@pytest.mark.parametrize("name", ["waves", "partial", "episodes"])
def test_a_run_saved_under_schema_1_continues_as_it_did_then(tmp_path, name):
    """Killed and resumed runs of the rlbench whose state was one flat record:
    resumed today they end with the same digest."""
    shutil.unpack_archive(SCHEMA_1, tmp_path)
    expected = read_json(tmp_path / "digests.json")[name]
    resumed = taken_up(tmp_path / name)
    assert resumed.start.manifest.schema == 1
    drive(resumed)
    check_resumed(resumed)
    assert resumed.state.digest == expected["digest"] and resumed.state.books == expected["books"]
    assert read_manifest(checkpoint_folders(resumed.folder)[-1]).schema == CHECKPOINT_SCHEMA
