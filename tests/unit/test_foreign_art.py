"Runs of ART: parquet of both versions, the history, the state and the decisions of its tuner."

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from opened_runs import column, open_only

from rlbench.foreign.opening import opened_table
from rlbench.foreign.source import read_source

JSON_COLUMNS = ("format_version", "trajectory_index", "group_json", "trajectory_json")


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/art", tmp_path / "a model"))


def test_tables(run: Path) -> None:
    folder = open_only(run, "art")
    assert column(folder, "steps", "step") == [1, 2, 3]
    assert column(folder, "steps", "reward_mean") == [0.75, 0.5, 0.625]
    assert column(folder, "groups", "staleness") == [0, 0, 1, 0, 2, 0]
    assert column(folder, "groups", "size") == [4] * 6
    assert column(folder, "rollouts", "newest")[8] == 1 and column(folder, "rollouts", "dispatched")[8] == 0
    tokens = opened_table(folder, "tokens")
    assert tokens["tokens"][1].to_list() == [51, 50, 0] and len(tokens["logprobs"][1]) == 3
    assert column(folder, "steps", "entropy") == pytest.approx([0.8, 0.7, 0.6])


def test_absent(run: Path) -> None:
    source = read_source(open_only(run, "art"))
    assert not source.has("evals") and not source.has("rollouts.advantage") and not source.has("tokens.start_logprobs")
    assert source.remedy("changes").startswith("autotune")


def test_version_1(run: Path) -> None:
    "Files from before 2026 have the columns for analysis alone."
    for path in run.glob("trajectories/*/*.parquet"):
        pl.read_parquet(path).drop(JSON_COLUMNS).write_parquet(path)
    folder = open_only(run, "art")
    assert column(folder, "steps", "reward_mean") == [0.75, 0.5, 0.625]
    assert column(folder, "rollouts", "text")[:2] == ["7+5=12:42", "32"]
    assert column(folder, "rollouts", "k")[:5] == [0, 1, 2, 3, 0]
    source = read_source(folder)
    assert not source.has("tokens") and not source.has("rollouts.dispatched")


def test_validation_and_failures(run: Path) -> None:
    (run / "trajectories/val").mkdir()
    shutil.copyfile(run / "trajectories/train/0002.parquet", run / "trajectories/val/0002.parquet")
    path = run / "trajectories/train/0003.parquet"
    failed = json.dumps({"exceptions": [{"type": "TimeoutError", "message": "too slow", "traceback": ""}]})
    pl.read_parquet(path).with_columns(pl.lit(failed).alias("group_json")).write_parquet(path)
    folder = open_only(run, "art")
    assert column(folder, "evals", "avg") == [0.5] and column(folder, "evals", "step") == [2]
    assert column(folder, "steps", "reward_mean") == [0.75, 0.5, 0.625]
    rollouts = opened_table(folder, "rollouts").filter(pl.col("fate") == "environment_error")
    assert rollouts["message"].to_list() == ["TimeoutError: too slow"] * 2


def test_decisions(run: Path) -> None:
    settings = {"num_rollout_workers": 8, "queue_maxsize": 4}
    decision = {"step": 2, "state": "ok", "action": "grow", "reason": "the trainer waits", "previous": settings}
    decision["updated"] = {**settings, "num_rollout_workers": 16}
    (run / "pipeline_tuner").mkdir()
    profile = {"schema_version": 1, "settings": settings, "config": {}, "decisions": [decision]}
    (run / "pipeline_tuner/latest.json").write_text(json.dumps(profile))
    folder = open_only(run, "art")
    (change,) = opened_table(folder, "changes").to_dicts()
    assert (change["setting"], change["value"], change["step"]) == ("num_rollout_workers", "16", 2)
    assert change["reason"] == "grow: the trainer waits"
    assert "pipeline_tuner.settings.queue_maxsize" in column(folder, "settings", "name")
    assert any(name.startswith("state.") for name in column(folder, "settings", "name"))


def test_mutated(run: Path) -> None:
    "A file that is damaged, a trajectory that is no JSON, a torn line, a missing column, an unknown one."
    (run / "state.json").unlink()
    first = run / "trajectories/train/0001.parquet"
    first.write_bytes(first.read_bytes()[:-300])
    second = run / "trajectories/train/0002.parquet"
    table = pl.read_parquet(second).drop("metadata").with_columns(pl.lit(1).alias("extra"))
    broken = pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("{")).otherwise(pl.col("trajectory_json"))
    table.with_columns(broken.alias("trajectory_json")).write_parquet(second)
    (run / "trajectories/train/0003.parquet").rename(run / "trajectories/train/0107.parquet")
    history = run / "history.jsonl"
    history.write_text(history.read_text() + '{"train/reward": 0.3, "training_st')
    folder = open_only(run, "art")
    assert column(folder, "steps", "step") == [1, 2, 3, 107]
    assert len(opened_table(folder, "rollouts")) == 16
