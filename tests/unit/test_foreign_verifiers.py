"""Evaluations of verifiers, of 0.4 and from before, as it writes them and mutated."""

import json
import shutil
from pathlib import Path

import pytest
from opened_runs import MADE_UP, Tables, kinds_under, rewrite_lines, tear_last_line

pytestmark = pytest.mark.usefixtures("cache")

VERIFIERS = MADE_UP / "verifiers"
EPISODES = VERIFIERS / "sums--tiny--bash--1a2b3c4d"
RESULTS = VERIFIERS / "evals/sums--tiny/1a2b3c4d"


def test_both_kinds_are_recognised():
    assert kinds_under(VERIFIERS) == ["verifiers-legacy", "verifiers-v1"]


@pytest.mark.parametrize("folder", [EPISODES, RESULTS])
def test_an_evaluation_has_no_steps_versions_or_advantages(folder):
    tables = Tables(folder)
    assert tables["evals"].select("eval", "k", "tasks", "avg").rows() == [("sums", 2, 3, 0.5)]
    assert tables.column("rollouts", "reward") == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert not {"dispatched", "advantage", "staleness"} & set(tables["rollouts"].columns)
    assert tables["steps"].is_empty() and "steps" in tables.source.missing
    assert set(tables.column("rollouts", "fate")) == {"evaluated"}


def test_tools_and_tokens_of_an_episode():
    tables = Tables(EPISODES)
    first = tables["rollouts"].row(0, named=True)
    assert (first["turns"], first["calls"], first["text"]) == (2, 1, "42")
    assert "17+25" in first["said"][0] and first["said"][1] == "42"
    tokens = tables["tokens"].row(0, named=True)
    assert len(tokens["tokens"]) == len(tokens["logprobs"]) == len(tokens["turn"]) == 15
    assert tokens["turn"] == [0] * 12 + [1] * 3 and tokens["prompt_tokens"] == [49, 55, 43, 50, 53, 61]
    assert ("sampling.temperature", "1.0") in tables["settings"].rows()


def test_figures_and_settings_of_results():
    tables = Tables(RESULTS)
    figures = dict(tables["metrics"].select("name", "value").rows())
    assert figures["avg_reward"] == 0.5 and figures["pass_at_k/2"] == 1.0
    assert ("rollouts_per_example", "2") in tables["settings"].rows()
    assert tables["tokens"].is_empty() and tables.source.missing["tokens"]


def test_another_evaluation_opens(tmp_path):
    "Three responses a task, without configuration; unknown, missing and odd fields, and a torn line."
    run = Path(shutil.copytree(EPISODES, tmp_path / "other--model--x--00000000"))
    shutil.rmtree(run / "configs")
    traces = run / "traces.jsonl"
    traces.write_text(traces.read_text() + traces.read_text().replace('"id":"trace', '"id":"again'))

    def change(record: dict) -> dict:
        record["env"] = {"name": "products", "new": 1}
        record["traces"][0]["nodes"][0]["token_ids"] = "none"
        record["traces"][0]["rewards"]["correct"].pop("weight")
        return record

    rewrite_lines(traces, change)
    tear_last_line(traces)
    tables = Tables(run)
    assert tables["evals"].select("eval", "k", "tasks").rows() == [("products", 4, 3)]
    assert len(tables["rollouts"]) == 11 and "prompt_tokens" not in tables["tokens"].columns


def test_results_of_completion_models_and_trajectories(tmp_path):
    "Plain texts, milliseconds, and tokens in a requested state column."
    turn = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    record = {
        "example_id": "x",
        "prompt": "1+1=",
        "completion": " 2",
        "reward": "0.5",
        "timing": {"generation_ms": 500, "total_ms": 600},
        "is_truncated": True,
        "trajectory": [{"tokens": turn}, {"tokens": turn}],
    }
    folder = tmp_path / "sums--tiny" / "abc"
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text(json.dumps(record) + "\n")
    tables = Tables(folder)
    row = tables["rollouts"].row(0, named=True)
    assert (row["prompt"], row["text"], row["reward"], row["seconds"], row["reason"]) == (
        "1+1=",
        " 2",
        0.5,
        0.5,
        "length",
    )
    assert tables["tokens"].row(0, named=True)["turn"] == [0, 1]
    assert tables.column("evals", "eval") == ["sums"]


def test_a_failure_without_tokens_has_no_length(tmp_path):
    "Some write 0 tokens for an episode that failed before it began; a response that ended at once has length 0."
    place = Path(shutil.copytree(RESULTS, tmp_path / "evaluation"))
    counts = iter([0, 0, 0, 8, 8, 8])

    def change(record: dict) -> dict:
        count = next(counts)
        failed = {"error": "the server is gone", "reward": None} if count == 0 and record["example_id"] == 0 else {}
        return record | failed | {"token_usage": {"output_tokens": count}}

    rewrite_lines(place / "results.jsonl", change)
    tables = Tables(place)
    assert tables.column("rollouts", "length") == [None, None, 0, 8, 8, 8]
    assert tables.column("evals", "length_mean") == [6.0]  # of the two tasks that have lengths
