"Runs of NeMo-RL: rows of padded batches, validations, and scalars beside them."

import shutil
from pathlib import Path

import polars as pl
import pytest
from opened_runs import Tables, copy_made_up, rewrite_lines

from rlbench.foreign.nemo_rl import read_trained
from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/nemo_rl/exp_001", tmp_path / "some run"))


def open_only(path: Path) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path)
    assert found.kind == "nemo-rl"
    refresh(found)
    return cached_folder(found)


def test_tables(run: Path) -> None:
    folder = open_only(run)
    steps = opened_table(folder, "steps")
    assert steps["step"].to_list() == [1, 2, 3] and steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert steps["length_mean"].to_list() == [8.625, 8.375, 8.5]
    assert all(0 < mismatch < 0.01 for mismatch in steps["kl_sampler"])
    assert opened_table(folder, "groups")["size"].to_list() == [4] * 6
    tokens = opened_table(folder, "tokens")
    assert tokens["tokens"][1].to_list() == [51, 50, 0] and len(tokens["prompt_tokens"][0]) == 6
    columns = ("tokens", "mask", "logprobs", "start_logprobs", "advantages")
    assert all(tokens[name].list.len().to_list() == tokens["tokens"].list.len().to_list() for name in columns)
    evals = opened_table(folder, "evals")
    assert (evals["eval"][0], evals["step"][0], evals["avg"][0], evals["tasks"][0]) == ("validation", 3, 1.0, 3)
    source = read_source(folder)
    assert not source.has("rollouts.staleness") and "async_grpo" in source.remedy("rollouts.dispatched")


def test_masked(run: Path) -> None:
    rewrite_lines(run / "train_data_step2.jsonl", lambda record: record | {"sample_loss_mask": [0.0]})
    rollouts = opened_table(open_only(run), "rollouts")
    assert set(rollouts.filter(step=2)["fate"]) == {"masked"}


def test_turns() -> None:
    record = {
        "content": [["be brief", "17+25=", "add", "42", "So 42."]],
        "rewards": [1.0],
        "input_lengths": [7],
        "token_ids": [[1, 2, 3, 4, 5, 6, 7, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 0, 1, 1, 0]],
        "generation_logprobs": [[0.0, 0.0, -1.0, 0.0, 0.0, -2.0, -3.0, 0.0]],
        "idx": 0,
    }
    (response,) = read_trained(record, 1)
    assert response.prompt == "be brief\n17+25=" and response.said == ["add", "42", "So 42."]
    assert response.text == "So 42." and response.mask == [1, 0, 0, 1, 1]
    assert response.logprobs == [-1.0, 0.0, 0.0, -2.0, -3.0] and response.advantages is None


def test_changed_copy(run: Path) -> None:
    (run / "train_data_step2.jsonl").rename(run / "train_data_step40.jsonl")
    (run / "train_data_step3.jsonl").unlink()
    (run / "val_data_step3.jsonl").unlink()
    rewrite_lines(run / "train_data_step40.jsonl", lambda record: record | {"token_ids": None, "more": {"a": 1}})
    with open(run / "train_data_step1.jsonl", "a") as file:
        file.write('{"content": [["17+25=", "4')
    folder = open_only(run)
    steps = opened_table(folder, "steps")
    assert steps["step"].to_list() == [1, 40] and steps["reward_mean"].to_list() == [0.75, 0.5]
    assert opened_table(folder, "rollouts").filter(step=40)["text"][0] == "8*7=54:54"


def test_older_lines_without_tokens(run: Path) -> None:
    for path in run.glob("train_data_step*.jsonl"):
        rewrite_lines(
            path, lambda record: {name: record[name] for name in ("content", "rewards", "input_lengths", "idx")}
        )
    folder = open_only(run)
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert not read_source(folder).has("tokens")


def test_scalars_belong_to_the_run(run: Path, root: Path) -> None:
    shutil.copytree(root / "tests/foreign/openrlhf/monday", run / "tensorboard")
    folder = open_only(run)
    assert "train/policy_loss" in opened_table(folder, "metrics")["name"].to_list()


def test_responses_without_a_prompt_are_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Equal prompts make a group. Two lines without a prompt have none in common."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    place = copy_made_up("nemo_rl", tmp_path)
    numbers = iter(range(100))
    rewrite_lines(next(place.rglob("train_data_step1.jsonl")), lambda record: without_text(record, next(numbers)))
    tables = Tables(place)
    first = tables["rollouts"].filter(pl.col("step") == 1)
    assert first["group"].null_count() == 2 and tables.column("groups", "size") == [2, 4, 4, 4, 4, 4]


def without_text(record: dict, number: int) -> dict:
    return record | {"content": None} if number < 2 else record
