"Runs of open-instruct: token ids, and text where a tokenizer is at hand."

import json
import shutil
from pathlib import Path

import pytest

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/open_instruct", tmp_path / "traces"))


def open_only(path: Path) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path)
    assert found.kind == "open-instruct" and found.path.name == "monday"
    refresh(found)
    return cached_folder(found)


def test_tables(place: Path) -> None:
    folder = open_only(place)
    steps = opened_table(folder, "steps")
    assert steps["reward_mean"].to_list() == [0.5, 0.5, 0.625]  # the solved group of step 1 was left out
    assert opened_table(folder, "groups")["size"].to_list() == [4] * 5
    tokens = opened_table(folder, "tokens")
    assert tokens["tokens"][1].to_list() == [51, 50, 0] and len(tokens["logprobs"][0]) == 10
    assert opened_table(folder, "rollouts")["length"].to_list()[:2] == [10, 3]
    source = read_source(folder)
    assert (
        not source.has("rollouts.text") and not source.has("rollouts.prompt") and not source.has("rollouts.staleness")
    )
    assert "tokenizer" in source.remedy("rollouts.text")


def test_text_with_a_tokenizer(place: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    folder = place.parent / "model"
    folder.mkdir()
    vocabulary = {chr(code): code for code in range(1, 128)} | {"": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    metadata = place / "monday_metadata.jsonl"
    record = json.loads(metadata.read_text()) | {"model_name": str(folder)}
    metadata.write_text(json.dumps(record) + "\n")
    rollouts = opened_table(open_only(place), "rollouts")
    assert (rollouts["prompt"][0], rollouts["text"][0], rollouts["answer"][0]) == ("17+25=", "7+5=12:42", "42")


def test_changed_copy(place: Path) -> None:
    path = place / "monday_rollouts_000000.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[0]) | {"step": 9, "new": [1], "logprobs": None, "request_info": None, "reward": "0.5"}
    record.pop("ground_truth")
    lines[0] = json.dumps(record)
    (place / "monday_rollouts_000001.jsonl").write_text("\n".join(lines[:3]) + '\n{"step": 3, "torn')
    path.write_text("\n".join(lines[3:]) + "\n")
    (place / "monday_metadata.jsonl").unlink()
    other = place / "monday_rollouts_000000.jsonl"
    shutil.copy(other, place / "tuesday_rollouts_000000.jsonl")
    monday, tuesday = find_foreign_runs(place)
    assert (monday.path.name, tuesday.path.name) == ("monday", "tuesday")
    refresh(monday)
    rollouts = opened_table(cached_folder(monday), "rollouts")
    assert len(rollouts) == 20 and rollouts["reward"].to_list()[-3] == 0.5
