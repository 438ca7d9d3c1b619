import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from opened_runs import MADE_UP, Tables, copy_made_up

pytestmark = pytest.mark.usefixtures("cache")


def response(task, place, version, runs, reward, **more):
    count = sum(count for _, count in runs)
    return {
        "task_id": task,
        "sample_idx": place,
        "seqlen": 4 + count,
        "prompt_len": 4,
        "head_version": runs[0][0],
        "tail_version": version,
        "version_rle": runs,
        "reward": reward,
        "prompt": f"{task}?",
        "completion": "x",
        **more,
    }


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_example_has_its_means_groups_and_versions_of_each_token():
    run = Tables(MADE_UP / "areal")
    assert run.found.kind == "areal" and run.found.path.name == "monday"
    assert run["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert run["groups"]["size"].to_list() == [4] * 6
    assert run["groups"]["staleness"].to_list() == [0, 0, 1, 0, 2, 0]
    assert run["groups"]["no_signal"].to_list() == [False, True, False, False, False, False]
    assert run["evals"].select("step", "version", "tasks", "avg").rows() == [(2, 2, 3, 1.0)]
    tokens = run["tokens"].join(run["rollouts"].select("rollout", "step", "k", "task", "length"), on="rollout")
    changed = tokens.filter(tokens["task"] == "4")
    assert changed["versions"].to_list()[0] == [0] * 5 + [2] * 5
    assert tokens["versions"].list.len().to_list() == tokens["length"].to_list()
    assert run["steps"]["mixed_share"].to_list() == [0.0, 0.5, 0.5]


def test_rewards_are_those_of_the_task_and_the_normalized_ones_stand_beside_them():
    rollouts = Tables(MADE_UP / "areal")["rollouts"]
    training = rollouts.filter(rollouts["fate"] == "trained")
    assert set(training["reward"]) == {0.0, 1.0}
    assert training["part_names"][0].to_list() == ["normalized"]
    assert {values[0] for values in training["part_values"].to_list()} == {-1.0, 1.0}


def test_sessions_give_times_and_phases_and_say_that_they_are_matched_by_order():
    run = Tables(MADE_UP / "areal")
    training = run["rollouts"].filter(run["rollouts"]["fate"] == "trained")
    assert set(training["seconds"]) == {2.5} and set(training["score_seconds"]) == {0.1}
    assert set(run["phases"]["name"]) == {"generate", "reward"} and len(run["phases"]) == 48
    assert any("sessions" in guess for guess in run.source.guesses)


def test_what_areal_does_not_write_is_absent():
    run = Tables(MADE_UP / "areal")
    assert not {"tokens", "logprobs", "start_logprobs", "advantages"} & set(run["tokens"].columns)
    assert not {"kl_sampler", "seconds", "loss", "truncated", "entropy"} & set(run["steps"].columns)
    assert "advantage" not in run["rollouts"].columns and not run["metrics"].columns
    assert run.source.missing["tokens.logprobs"]


def test_without_sessions_there_are_no_times(tmp_path):
    place = copy_made_up("areal", tmp_path)
    (session,) = place.rglob("sessions-*.jsonl")
    session.unlink()
    run = Tables(place)
    assert not {"seconds", "began", "at"} & set(run["rollouts"].columns) and not run["phases"].columns
    assert "session_tracer" in run.source.missing["rollouts.seconds"]
    assert not any("sessions" in guess for guess in run.source.guesses)


def test_turns_are_cut_where_the_segments_say(tmp_path):
    segments = [("prompt", 4, "p"), ("gen", 2, "a"), ("context", 3, "tool"), ("gen", 1, "b")]
    turns = [{"role": role, "len": count, "text": text} for role, count, text in segments]
    record = response(0, 0, 5, [[4, 2], [5, 1]], 1.0, segments=turns) | {"seqlen": 10}
    write(tmp_path / "trial/rollout/5/0.jsonl", [record])
    run = Tables(tmp_path)
    assert run["rollouts"].select("text", "turns", "length").rows() == [("b", 2, 6)]
    assert run["rollouts"]["said"].to_list() == [["a", "tool", "b"]]
    assert run["tokens"]["versions"].to_list() == [[4, 4, 4, 4, 4, 5]]
    assert run["tokens"]["mask"].to_list() == [[1, 1, 0, 0, 0, 1]]


def test_a_resumed_run_that_counts_tasks_again_loses_no_response(tmp_path):
    for version in (0, 7):
        write(
            tmp_path / f"trial/rollout/{version}/0.jsonl", [response(0, k, version, [[version, 3]], k) for k in (0, 1)]
        )
    run = Tables(tmp_path)
    assert run["steps"]["rollouts"].to_list() == [2, 2] and run["groups"]["size"].to_list() == [2, 2]
    assert run["groups"]["staleness"].to_list() == [0, 0]


def test_torn_lines_missing_and_unknown_fields_do_not_stop_the_rest(tmp_path):
    place = copy_made_up("areal", tmp_path)
    (path,) = place.rglob("rollout/1/2.jsonl")
    odd = [
        {"task_id": 2, "version_rle": "no", "seqlen": "many", "segments": 3, "reward": None, "new": {}},
        {"task_id": 2, "version_rle": [[0, 10**12], 5], "seqlen": 10, "prompt_len": 4, "segments": [3, {}]},
    ]
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in odd) + '{"task_id": 9, "samp')
    run = Tables(place)
    assert run["steps"]["rollouts"].to_list() == [8, 10, 8] and run["steps"]["reward_mean"].to_list() == [
        0.75,
        0.5,
        0.625,
    ]


def test_rejected_responses_are_not_part_of_the_training(tmp_path):
    write(tmp_path / "t/rollout/0/0.jsonl", [response(0, k, 0, [[0, 3]], 1.0) for k in (0, 1)])
    write(tmp_path / "t/rollout/0/1.jsonl", [response(1, k, 0, [[0, 3]], float(k)) for k in (0, 1)])
    sessions = [
        {"task_id": 0, "session_id": k, "submit_ts": 5.0, "status": "rejected", "reason": "filter"} for k in (0, 1)
    ]
    write(tmp_path / "t/session_tracer/sessions-r0.jsonl", sessions)
    run = Tables(tmp_path)
    assert run["groups"]["fate"].to_list() == ["filtered", "trained"]
    assert run["steps"].select("rollouts", "trained_rollouts", "reward_mean", "trained_reward").rows() == [
        (4, 2, 0.75, 0.5)
    ]


def test_sessions_of_tasks_that_ran_again_are_no_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "A restarted trial counts its tasks from 0 again: their sessions belong to no certain response, and are none."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    place = copy_made_up("areal", tmp_path)
    rollouts = next(place.rglob("rollout"))
    shutil.copytree(rollouts / "0", rollouts / "3")
    tables = Tables(place)
    assert tables["rollouts"].filter(pl.col("fate") == "trained").height == 24 + 8
    assert tables["rollouts"]["fate"].null_count() == 0 and tables["rollouts"].height == 24 + 8 + 3
