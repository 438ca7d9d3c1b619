"Tables of responses of any kind, with and without a mapping of their columns; and archives."

import csv
import json
import tarfile
import zipfile
from pathlib import Path

import polars as pl
import pytest

from rlbench.foreign.opening import cached_folder, opened_table, read_rest, refresh
from rlbench.foreign.registry import find_foreign_runs, found_run_of_json
from rlbench.foreign.source import read_source
from rlbench.foreign.source_files import ForeignError

pytestmark = pytest.mark.usefixtures("cache")

MAPPING = {"prompt": "question", "response": "answer_text", "reward": "judge.score", "step": "iteration"}
RECORDS = [
    {
        "question": f"{task}+1=",
        "answer_text": str(task + try_),
        "judge": {"score": float(try_ == 1)},
        "iteration": step,
        "task": "sums",
    }
    for step in (1, 2)
    for task in (3, 4)
    for try_ in (1, 2)
]
FLAT = {"prompt": "question", "response": "answer_text", "reward": "score", "step": "iteration"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    "A folder with the records as JSON lines."
    folder = tmp_path / "mine"
    folder.mkdir()
    write_lines(folder / "all.jsonl", RECORDS)
    return folder


def write_lines(path: Path, records: list[dict]) -> None:
    "Write records as JSON lines."
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def flat_records() -> list[dict]:
    "The records without a nested column."
    return [{**record, "judge": "x", "score": record["judge"]["score"]} for record in RECORDS]


def open_only(path: Path, columns: dict[str, str] | None = None) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path, columns=columns)
    assert found.kind == "plain"
    refresh(found)
    return cached_folder(found)


def test_mapping(place: Path) -> None:
    folder = open_only(place, MAPPING)
    steps = opened_table(folder, "steps")
    assert steps["step"].to_list() == [1, 2] and steps["reward_mean"].to_list() == [0.5, 0.5]
    rollouts = opened_table(folder, "rollouts")
    assert rollouts["prompt"][0] == "3+1=" and rollouts["text"][0] == "4" and rollouts["task"][0] == "sums"
    assert opened_table(folder, "groups")["size"].to_list() == [2] * 4
    source = read_source(folder)
    assert any("same prompt" in guess for guess in source.guesses) and not source.has("tokens")
    assert found_run_of_json(source.found).columns == MAPPING


def test_other_mapping_has_another_folder(place: Path) -> None:
    (first,) = find_foreign_runs(place, columns=MAPPING)
    (second,) = find_foreign_runs(place, columns=MAPPING | {"prompt": "task"})
    assert cached_folder(first) != cached_folder(second)
    read_rest(second, 1)
    assert refresh(second) and opened_table(cached_folder(second), "rollouts")["prompt"][0] == "sums"


@pytest.mark.parametrize("kind", ["json", "table of a list", "csv", "parquet"])
def test_kinds_of_files(tmp_path: Path, kind: str) -> None:
    records = flat_records()
    path = tmp_path / f"table.{'json' if 'list' in kind else kind}"
    if kind == "parquet":
        pl.DataFrame(records).write_parquet(path)
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text(json.dumps({"name": "x", "rows": records} if "list" in kind else records))
    folder = open_only(path, FLAT)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.5, 0.5]


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    pl.DataFrame(RECORDS).write_parquet(tmp_path / "table.parquet")
    folder = open_only(tmp_path / "table.parquet", MAPPING)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.5, 0.5]


def test_columns_with_our_names(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "8*7="}]
    said = [{"role": "assistant", "content": c} for c in ("49+7", "56")]
    turns = [said[0], {"role": "user", "content": "go on"}, said[1]]
    record = {"prompt": chat, "response": turns, "reward": 1, "correct": "true", "tokens": [1, 2], "parts": {"a": 0.5}}
    write_lines(tmp_path / "mine.jsonl", [record, record | {"reward": "high", "tokens": "none"}])
    rollouts = opened_table(open_only(tmp_path / "mine.jsonl"), "rollouts")
    assert rollouts["prompt"][0] == "8*7=" and rollouts["text"][0] == "56" and rollouts["turns"][0] == 2
    assert rollouts["reward"].to_list() == [1.0, None] and rollouts["length"].to_list() == [2, None]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"promt": "question"}, "did you mean 'prompt'"),
        ({"prompt": "questions"}, "all.jsonl has no such column (the nearest of 6: question"),
        ({"prompt": 3}, "give the name of a column as text"),
    ],
)
def test_refused_mappings(place: Path, columns: dict, words: str) -> None:
    with pytest.raises(ForeignError) as refused:
        find_foreign_runs(place, columns=columns)
    assert words in str(refused.value)


def test_mapping_with_another_kind_is_refused(place: Path) -> None:
    with pytest.raises(ForeignError, match="they choose the part that is the reward"):
        find_foreign_runs(place, "verl", MAPPING)


def test_changed_copy(place: Path) -> None:
    path = place / "all.jsonl"
    records = [record | {"iteration": record["iteration"] + 7, "more": [1]} for record in RECORDS[:5]]
    records[0].pop("judge")
    records[1]["judge"] = "none"
    write_lines(path, [*records, {"question": "1+1=", "judge": {"score": float("nan")}}])
    with open(path, "a") as file:
        file.write('{"question": "torn')
    folder = open_only(place, MAPPING)
    assert opened_table(folder, "rollouts")["reward"].to_list() == [None, None, 1.0, 0.0, 1.0, None]


@pytest.mark.parametrize("kind", [".zip", ".tar.gz"])
def test_archive(tmp_path: Path, place: Path, kind: str, cache: Path) -> None:
    archive = tmp_path / f"sent{kind}"
    if kind == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.write(place / "all.jsonl", "run/all.jsonl")
    else:
        with tarfile.open(archive, "w:gz") as file:
            file.add(place / "all.jsonl", "run/all.jsonl")
    folder = open_only(archive, MAPPING)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.5, 0.5]
    source = read_source(folder)
    assert source.path == str(archive)
    unpacked = list((cache / "unpacked").glob("*/*"))
    open_only(archive, MAPPING)
    assert list((cache / "unpacked").glob("*/*")) == unpacked and len(unpacked) == 1


def test_damage_within_an_archive_is_named_in_words(tmp_path: Path) -> None:
    archive = tmp_path / "sent.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("run/a.csv", "question,score\n1+1=,1\n")
        file.writestr("run/b.csv", b"question,score\n\xff\xfe,1\n")
    folder = open_only(archive, {"prompt": "question", "reward": "score"})
    (words,) = read_source(folder).unreadable
    assert words.startswith(f"in {archive}: run/b.csv: damaged")
    with pytest.raises(ForeignError) as refused:
        find_foreign_runs(archive, columns={"prompt": "q"})
    assert "cache" not in str(refused.value)


def test_archives_that_lead_out_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "bad.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../out.jsonl", "{}")
    with pytest.raises(ForeignError, match="leads out"):
        find_foreign_runs(archive)
    archive.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ForeignError, match="damaged"):
        find_foreign_runs(archive)
