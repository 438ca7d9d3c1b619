"Runs of rLLM: episodes, one file each."

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from opened_runs import column, open_only

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/rllm", tmp_path / "an experiment"))


def edit(path: Path, **changes: object) -> None:
    "Replace some fields of an episode."
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tables(run: Path) -> None:
    folder = open_only(run, "rllm")
    assert column(folder, "steps", "step") == [1, 2, 3]
    assert column(folder, "steps", "reward_mean") == [0.75, 0.5, 0.625]
    assert column(folder, "groups", "size") == [4] * 6
    assert sum(column(folder, "groups", "no_signal")) == 1
    rollouts = opened_table(folder, "rollouts").filter(pl.col("task") == "a", pl.col("step") == 2).sort("k")
    assert (
        rollouts["text"][1] == "7+5=12:42" and rollouts["answer"][1] == "42" and rollouts["k"].to_list() == [0, 1, 2, 3]
    )


def test_absent(run: Path) -> None:
    source = read_source(open_only(run, "rllm"))
    assert not source.has("tokens") and not source.has("rollouts.dispatched") and not source.has("rollouts.staleness")
    assert source.remedy("evals").startswith("trainer.log_episodes") and not source.guesses


def test_validation(run: Path) -> None:
    step = run / "episodes/train_step_2_epoch_0"
    shutil.copytree(step, step.with_name("val_step_2_epoch_0"))
    folder = open_only(run, "rllm")
    assert column(folder, "evals", "avg") == [0.5] and column(folder, "evals", "eval") == ["val"]
    assert column(folder, "steps", "rollouts") == [8, 8, 8]


def test_grows(run: Path) -> None:
    "An episode that was half written at the first look is there at the next."
    path = sorted(run.glob("episodes/train_step_3_epoch_0/*"))[0]
    whole = path.read_text()
    path.write_text(whole[:200])
    (found,) = find_foreign_runs(run)
    refresh(found)
    folder = cached_folder(found)
    assert len(opened_table(folder, "rollouts")) == 23 and sum(read_source(folder).damaged.values()) == 1
    path.write_text(whole)
    assert refresh(found)
    assert len(opened_table(folder, "rollouts")) == 24 and not read_source(folder).damaged


def test_mutated(run: Path) -> None:
    "Missing and unknown fields, values of other types, a summary among the episodes, other names."
    paths = sorted(run.glob("episodes/train_step_1_epoch_0/*"))
    edit(paths[0], trajectories=[], extra=1)
    edit(paths[1], task="8*7=", metrics=None, is_correct="yes")
    edit(paths[2], episode_id=7, termination_reason=None)
    turns = [{"observation": "8*7=", "model_response": "55"}, {"observation": "no", "model_response": "56"}]
    edit(paths[3], trajectories=[{"steps": turns, "reward": 1}], timing={"llm_time": 2.5, "total_time": 3})
    (paths[0].parent / "batch_summary.json").write_text(json.dumps({"training_step": 1, "mode": "train"}))
    folder = open_only(run, "rllm")
    rollouts = opened_table(folder, "rollouts")
    assert len(rollouts) == 24
    (said,) = rollouts["said"].drop_nulls().to_list()
    assert said == ["55", "no", "56"]
    assert column(folder, "phases", "seconds") == [2.5]


def test_a_uid_that_occurs_twice_in_an_episode(run: Path) -> None:
    "Three trajectories under one uid, and two without any, are five responses."
    path = sorted(run.glob("episodes/train_step_1_epoch_0/*"))[0]
    turns = [{"observation": "8*7=", "model_response": str(number)} for number in range(5)]
    named = [{"name": "solver", "uid": "same", "steps": [turn], "reward": 1.0} for turn in turns[:3]]
    nameless = [{"name": "judge", "steps": [turn], "reward": 0.0} for turn in turns[3:]]
    edit(path, trajectories=[*named, *nameless])
    folder = open_only(run, "rllm")
    assert len(opened_table(folder, "rollouts")) == 23 + 5
    texts = opened_table(folder, "rollouts").filter(pl.col("text").is_in(["0", "1", "2", "3", "4"]))["text"]
    assert sorted(texts) == ["0", "1", "2", "3", "4"]
