"Runs of Trackio: the database, the inbox and the files of traces, and rollouts of TRL's asynchronous GRPO."

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source


@pytest.fixture
def home(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up folder of Trackio."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/trackio", tmp_path / "trackio home"))


def open_only(path: Path) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path)
    assert found.kind == "trackio"
    refresh(found)
    return cached_folder(found)


def change(home: Path, *statements: str) -> None:
    "Change the database."
    with closing(sqlite3.connect(home / "huggingface.db")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_database(home: Path) -> None:
    folder = open_only(home)
    steps = opened_table(folder, "steps")
    assert steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert steps["lag_max"].to_list() == [0, 1, 2] and steps["seconds"].to_list() == [11.9] * 3
    groups = opened_table(folder, "groups")
    assert groups["size"].to_list() == [4] * 6 and groups["staleness"].to_list() == [0, 0, 1, 0, 2, 0]
    rollouts = opened_table(folder, "rollouts")
    assert (rollouts["text"][0], rollouts["prompt"][0], rollouts["length"][0]) == ("7+5=12:42", "17+25=", 10)
    settings = dict(opened_table(folder, "settings").select("name", "value").iter_rows())
    assert settings == {"learning_rate": "1e-06", "max_staleness": "4"}
    source = read_source(folder)
    assert not source.has("tokens") and not source.has("evals") and not source.has("hosts")


def test_files_of_traces_alone(home: Path) -> None:
    (home / "huggingface.db").unlink()
    folder = open_only(home)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert opened_table(folder, "groups")["staleness"].to_list() == [0, 0, 1, 0, 2, 0]


def test_steps_that_are_versions(home: Path) -> None:
    change(home, "update traces set step = step - 1")
    assert opened_table(open_only(home), "groups")["staleness"].to_list() == [0, 0, 1, 0, 2, 0]


def test_several_runs_of_a_database(home: Path) -> None:
    row = "insert into metrics (run_id, timestamp, run_name, step, metrics) values"
    change(
        home,
        f"{row} ('b', '2026-09-21T14:13:32', 'tues/day', 5, '{{\"loss\": 0.5, \"note\": \"x\"}}')",
        f"{row} ('c', 'no time', 'monday', 7, 'torn {{')",
    )
    found = find_foreign_runs(home / "huggingface.db")
    assert [run.path.name for run in found] == ["monday (c)", "monday (run-0001)", "tues_day"]
    assert refresh(found[2]) and not refresh(found[2])
    steps = opened_table(cached_folder(found[2]), "steps")
    assert steps["step"].to_list() == [5] and steps["loss"].to_list() == [0.5]
    refresh(found[0])
    assert not len(opened_table(cached_folder(found[0]), "steps"))


def test_older_database(home: Path) -> None:
    change(
        home,
        "create table old as select id, timestamp, run_name, step, metrics from metrics",
        "drop table metrics",
        "alter table old rename to metrics",
        "drop table traces",
    )
    shutil.rmtree(home / "traces")
    folder = open_only(home)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert not read_source(folder).has("rollouts")


def test_rows_in_the_log_of_the_database(home: Path) -> None:
    (found,) = find_foreign_runs(home)
    refresh(found)
    with closing(sqlite3.connect(home / "huggingface.db")) as connection:
        connection.execute("pragma journal_mode = wal")
        columns = "(run_id, timestamp, run_name, step, metrics)"
        values = "('run-0001', '2026-09-21T14:15:00', 'monday', 4, '{\"train/reward\": 0.9}')"
        connection.execute(f"insert into metrics {columns} values {values}")
        connection.commit()
        before = {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}
        assert refresh(found)
        assert opened_table(cached_folder(found), "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625, 0.9]
        assert {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()} == before


def test_inbox(home: Path) -> None:
    trace = {
        "_type": "trackio.trace",
        "messages": [{"role": "user", "content": "8*7="}, {"role": "assistant", "content": "56"}],
        "metadata": {"reward": 1.0, "group_id": 3, "model_version": 2, "rewards/right": 1.0},
    }
    common = {"v": 1, "kind": "metric", "project": "sums", "run": "friday", "run_id": "r1"}
    records = [
        common | {"step": 3, "timestamp": "2026-09-21T14:13:32+00:00", "metrics": {"reward": 0.5}, "config": {"a": 1}},
        common | {"step": 3, "metrics": {"rollouts": [trace, trace]}, "log_id": "l"},
        common | {"kind": "alert", "title": "low"},
    ]
    for place, record in enumerate(records):
        path = home / f"inbox/writer/{place:08d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n" + '{"torn')
    found = {run.path.name: run for run in find_foreign_runs(home)}
    refresh(found["friday"])
    folder = cached_folder(found["friday"])
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.5]
    rollouts = opened_table(folder, "rollouts")
    assert rollouts["text"].to_list() == ["56", "56"] and rollouts["staleness"].to_list() == [0, 0]


def test_what_trackio_itself_writes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    place = tmp_path / "written"
    place.mkdir()
    monkeypatch.setattr(utils, "TRACKIO_DIR", place)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", place)
    SQLiteStorage.bulk_log("sums", "today", [{"reward": 0.25}, {"reward": 0.5}], steps=[1, 2], config={"lr": 1})
    steps = opened_table(open_only(place), "steps")
    assert steps["reward_mean"].to_list() == [0.25, 0.5]
