"""A view opens a run folder once: each table, the configuration and the status are read at most once."""

import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import Resume, note_resume, open_table, read_table
from rlbench.base.run_files import create_run_folder
from rlbench.runtime.run_reader import RunReader
from rlbench.views.loss_card import loss_card, loss_cards
from rlbench.views.stored_rollout import read_rollout
from rlbench.workbench.handle import example_run

WATCHED: list[tuple[Path, Counter]] = []


def count_open(event: str, arguments: tuple) -> None:
    "An audit hook: counts the files under a watched folder that Python opens."
    if event == "open" and WATCHED and isinstance(arguments[0], (str, bytes, Path)):
        folder, counts = WATCHED[-1]
        path = Path(arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0])
        if folder in path.parents:
            counts[path.relative_to(folder).as_posix()] += 1


sys.addaudithook(count_open)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    "A finished scripted run."
    return example_run(tmp_path_factory.mktemp("runs"))


def files_opened(folder: Path, look) -> Counter:
    "How often each file of a run folder is opened by a look."
    WATCHED.append((folder, Counter()))
    try:
        look()
    finally:
        _, counts = WATCHED.pop()
    return counts


def segments_opened(monkeypatch, look) -> Counter:
    "How often each sealed segment is opened by a look."
    counts, scan = Counter(), pl.scan_parquet

    def counted(paths, *arguments, **named):
        counts.update(str(path) for path in (paths if isinstance(paths, list) else [paths]))
        return scan(paths, *arguments, **named)

    monkeypatch.setattr(pl, "scan_parquet", counted)
    look()
    return counts


def once(counts: Counter, *names: str) -> bool:
    "Whether nothing among the tables, and none of these files, was opened twice; tables were opened at all."
    tables = {name: count for name, count in counts.items() if name.startswith("ledger/") and "/" in name[7:]}
    return bool(tables) and set(tables.values()) == {1} and all(counts[name] <= 1 for name in names)


def test_a_loss_card_opens_each_file_once(example, monkeypatch):
    "Rollouts, tokens, commands and steps once each, and the configuration once, also for several cards."
    trained = example.rollouts.filter(pl.col("fate") == "trained")["rollout"]

    def look():
        assert loss_card(example.folder, trained[0]).swap(loss="gspo").frame.height

    counts = files_opened(example.folder, look)
    assert once(counts, "config.toml", "status.json"), counts
    assert {name.split("/")[1] for name in counts if name.startswith("ledger/") and "/" in name[7:]} == {
        "rollouts",
        "tokens",
        "commands",
        "steps",
    }
    several = files_opened(example.folder, lambda: loss_cards(example.folder, trained[:6].to_list(), ["ppo", "gspo"]))
    assert once(several, "config.toml", "status.json"), several
    assert set(segments_opened(monkeypatch, look).values()) <= {1}


def test_a_stored_rollout_opens_each_table_once(example):
    "The inspector reads its row, its tokens and its verdict from one look."
    rollout = example.rollouts["rollout"][0]
    counts = files_opened(example.folder, lambda: read_rollout(example.folder, rollout))
    assert once(counts), counts


def test_answers_belong_to_one_moment(tmp_path):
    "Rows that are written after the first question are not in later answers; another reader has them."
    folder = create_run_folder(tmp_path, "live")
    ledger = Ledger(folder, 0, seal_rows=3)
    ledger.extend("steps", [{"at": 1.0, "version": version} for version in (1, 2, 3, 4)])
    ledger.flush()
    reader = RunReader(folder)
    assert reader.columns("steps", ["version"])["version"].to_list() == [1, 2, 3, 4]
    ledger.extend("steps", [{"at": 2.0, "version": version} for version in (5, 6, 7)])
    ledger.close()
    assert reader.rows("steps", range(9), ["version"])["version"].to_list() == [1, 2, 3, 4]
    assert RunReader(folder).columns("steps", ["version"]).height == 7
    assert [*reader.opened] == ["steps"]


def test_an_opened_table_is_the_table_that_is_read(tmp_path):
    "Sealed rows, the tail, and what a resume took back: lazily and at once the same, for every table and column."
    folder = create_run_folder(tmp_path, "resumed")
    ledger = Ledger(folder, 0, seal_rows=2)
    for version in range(1, 6):
        ledger.append("steps", at=1.0, version=version)
        ledger.append("rollouts", at=1.0, rollout=version, **{"try": 0}, fate="trained", trained_at=version)
        ledger.append("commands", at=1.0, command=str(version), knob="batch", value="1", status="applied")
    ledger.close()
    note_resume(folder, Resume(1, "v000002", 2, {"steps": 1, "rollouts": 1}, {"steps": 4, "rollouts": 4}, (0,)))
    for table in ("steps", "rollouts", "commands", "evals"):
        assert open_table(folder, table).collect().equals(read_table(folder, table)), table
        narrow = open_table(folder, table).select("seq", "at").collect()
        assert narrow.equals(read_table(folder, table, ["seq", "at"])), table
    assert read_table(folder, "rollouts")["fate"].to_list().count("lost_resume") == 2


def test_a_segment_that_is_missing_is_named(tmp_path):
    "As `read_table` does."
    folder = create_run_folder(tmp_path, "torn")
    ledger = Ledger(folder, 0, seal_rows=2)
    for version in range(6):
        ledger.append("steps", at=1.0, version=version)
        ledger.flush()
    ledger.close()
    first = min((folder / "ledger/steps").glob("*.parquet"))
    first.unlink()
    with pytest.raises(ValueError, match="rows 0 to .* of table steps are missing"):
        open_table(folder, "steps")
    with pytest.raises(FileNotFoundError, match="no folder"):
        RunReader(tmp_path / "nowhere")
