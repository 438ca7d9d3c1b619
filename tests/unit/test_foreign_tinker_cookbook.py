"Runs of tinker-cookbook: what its files say, what they do not say, and what a damaged or changed copy still gives."

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from opened_runs import open_only, rewrite_lines

from rlbench.foreign.opening import opened_table
from rlbench.foreign.source import read_source


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/tinker_cookbook", tmp_path / "some run"))


def test_tables(run: Path) -> None:
    folder = open_only(run, "tinker-cookbook")
    steps = opened_table(folder, "steps")
    assert steps["step"].to_list() == [0, 1, 2] and steps["version"].to_list() == [1, 2, 3]
    assert steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert steps["lag_max"].to_list() == [0, 1, 2]
    groups = opened_table(folder, "groups")
    assert groups["size"].to_list() == [4] * 6
    assert groups["staleness"].to_list() == [0, 0, 1, 0, 2, 0]
    assert groups["no_signal"].to_list() == [False, True, False, False, False, False]
    rollouts = opened_table(folder, "rollouts")
    assert rollouts["text"][0] == "7+5=12:42" and rollouts["prompt"][0] == "17+25=" and rollouts["length"][0] == 10
    assert opened_table(folder, "phases").filter(pl.col("name") == "train_step")["seconds"].to_list() == [3.9] * 3


def test_absent(run: Path) -> None:
    source = read_source(open_only(run, "tinker-cookbook"))
    assert not source.has("tokens") and not source.has("evals") and not source.has("rollouts.advantage")
    assert "rollout_json_export" in source.remedy("evals") and not source.guesses


def test_settings_and_checkpoints(run: Path) -> None:
    folder = open_only(run, "tinker-cookbook")
    settings = dict(opened_table(folder, "settings").select("name", "value").iter_rows())
    assert settings["dataset_builder.group_size"] == "4"
    assert json.loads(settings["checkpoints.000002.sampler_path"]).startswith("tinker://")
    assert "staleness = 2" in (folder / "config.toml").read_text()


def test_only_metrics(run: Path) -> None:
    for folder in run.glob("iteration_*"):
        shutil.rmtree(folder)
    folder = open_only(run, "tinker-cookbook")
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert read_source(folder).remedy("rollouts") == "rollout_json_export=True"


def test_texts_of_the_logtree(run: Path) -> None:
    for path in run.glob("iteration_*/*.jsonl"):
        rewrite_lines(path, lambda record: {**record, "steps": [{**turn, "logs": {}} for turn in record["steps"]]})
    rollouts = opened_table(open_only(run, "tinker-cookbook"), "rollouts")
    texts = rollouts.filter(pl.col("text").is_not_null())
    assert texts["k"].to_list() == [0, 0, 0] and texts["text"][0] == "7+5=12:42"
    assert len(rollouts) == 24


def test_evaluation(run: Path) -> None:
    path = run / "iteration_000001/eval_held_out_rollout_summaries.jsonl"
    shutil.copyfile(run / "iteration_000001/train_rollout_summaries.jsonl", path)
    rewrite_lines(path, lambda record: {**record, "split": "eval/held_out", "sampling_client_step": 1})
    folder = open_only(run, "tinker-cookbook")
    assert opened_table(folder, "evals").row(0, named=True)["avg"] == 0.5
    assert opened_table(folder, "evals")["eval"].to_list() == ["held_out"]
    assert opened_table(folder, "evals")["version"].to_list() == [1]
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]


def test_resumed(run: Path) -> None:
    "The rows that a resume has cut are not read again from the file that it keeps."
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.with_name("metrics.jsonl.pre_resume_000001").write_text("".join(lines).replace("0.5", "0.9"))
    assert opened_table(open_only(run, "tinker-cookbook"), "steps")["reward_mean"].to_list() == [0.75, 0.5, 0.625]


def test_mutated(run: Path) -> None:
    "Other numbers of steps and responses, unknown and missing fields, a value of another type, a torn line."
    shutil.rmtree(run / "iteration_000000")
    (run / "config.json").unlink()
    summaries = run / "iteration_000001/train_rollout_summaries.jsonl"

    def edit(record: dict) -> dict:
        record = {**record, "iteration": None, "extra": [1], "tags": 7}
        if record["traj_idx"] == 2:
            record["steps"] = "none"
            del record["sampling_client_step"]
        return record

    rewrite_lines(summaries, edit)
    summaries.write_text(summaries.read_text()[:-40])
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 9, "env/all/rew')
    folder = open_only(run, "tinker-cookbook")
    rollouts = opened_table(folder, "rollouts")
    assert rollouts.group_by("step").len().sort("step")["len"].to_list() == [7, 8]
    assert opened_table(folder, "steps")["step"].to_list() == [0, 1, 2]
