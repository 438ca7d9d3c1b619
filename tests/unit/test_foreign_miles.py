import json

import pytest
import torch
from opened_runs import MADE_UP, Tables, copy_made_up

pytestmark = pytest.mark.usefixtures("cache")


def append(path, *records):
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def event(kind, at, index, turn=-1, group=-1, version=""):
    return {
        "ts": at,
        "kind": kind,
        "sample_index": index,
        "group_index": group,
        "turn": turn,
        "weight_version": version,
    }


def test_the_example_has_its_means_groups_and_staleness():
    run = Tables(MADE_UP / "miles")
    assert run.found.kind == "miles" and run.found.path.name == "dump"
    assert run["steps"]["step"].to_list() == [0, 1, 2]
    assert run["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert run["groups"]["size"].to_list() == [4] * 6
    assert run["groups"]["staleness"].to_list() == [0, 0, 1, 0, 2, 0]
    assert run["groups"]["no_signal"].to_list() == [False, True, False, False, False, False]


def test_events_conversations_and_columns_meet_in_one_row():
    run = Tables(MADE_UP / "miles")
    row = run["rollouts"].row(8, named=True)
    assert (row["key"], row["step"], row["prompt"], row["text"], row["length"]) == ("8", 1, "8*7=", "8*7=54:54", 10)
    assert (row["dispatched"], row["newest"], row["turns"]) == (0, 1, 1)
    assert row["seconds"] == pytest.approx(0.8, abs=1e-5) and row["at"] == 13.0
    assert run["tokens"]["prompt_tokens"].to_list()[8] == [56, 42, 55, 61]


def test_the_dashboard_gives_metrics_phases_engines_and_arguments():
    run = Tables(MADE_UP / "miles")
    assert run["steps"]["loss"].to_list() == [-0.01, -0.02, -0.03]
    queue = run["metrics"].filter(run["metrics"]["name"] == "data_buffer/length")
    assert queue["value"].to_list() == [16, 8, 0] and queue["step"].null_count() == 3
    assert run["hosts"].select("name", "host", "gpus").rows() == [("http://10.0.0.1:30000", "10.0.0.1", [0])]
    phases = run["phases"].filter(run["phases"]["role"] == "train")
    assert phases["name"].to_list()[:3] == ["ref_log_probs", "actor_train", "update_weights"]
    assert run["settings"].rows() == [("--n-samples-per-prompt", "4")]


def test_what_the_example_does_not_have_is_absent():
    run = Tables(MADE_UP / "miles")
    assert not {"start_logprobs", "advantages", "reference"} & set(run["tokens"].columns)
    assert run["tokens"]["versions"].null_count() == 8  # of two versions: the border is not written
    assert not {"kl_sampler", "generator_compute", "entropy", "seconds"} & set(run["steps"].columns)
    assert not {"said", "calls", "score_seconds", "answer"} & set(run["rollouts"].columns)
    assert not run["evals"].columns and "--eval-interval" in run.source.missing["evals"]


def test_samples_of_dumps_join_the_events_and_evaluations_do_not(tmp_path):
    place = copy_made_up("miles", tmp_path)
    sample = {"index": 8, "group_index": 2, "tokens": [1, 2, 3], "response_length": 2, "weight_versions": ["0", "1"]}
    dump = {"rollout_id": 1, "metadata": {}, "samples": [sample | {"reward": 0.0, "label": "56"}]}
    folder = place / "dump/rollout_data"
    folder.mkdir()
    torch.save(dump, folder / "1.pt")
    torch.save({**dump, "samples": [sample | {"reward": 1.0, "weight_versions": ["1"]}]}, folder / "eval_1.pt")
    events = [event("attempt_start", 1790000500.0, 8), event("attempt_end", 1790000700.0, 8)]
    append(place / "dump/dashboard/trajectories.jsonl", *events)  # of an evaluation: without a group
    run = Tables(place)
    assert run["steps"]["rollouts"].to_list() == [8, 8, 8]
    row = run["rollouts"].filter(run["rollouts"]["key"] == "8").row(0, named=True)
    assert (row["answer"], row["text"], row["at"]) == ("56", "8*7=54:54", 13.0)
    assert run["evals"].select("step", "version", "avg").rows() == [(1, 1, 1.0)]


def test_the_key_of_the_reward_is_read_from_the_arguments(tmp_path):
    place = copy_made_up("miles", tmp_path)
    meta = place / "dump/dashboard/meta.json"
    arguments = {"reward_key": "exact", "rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 8}
    meta.write_text(json.dumps({"run_name": "other", "start_ts": 1.0, "args": arguments}))
    sample = {"index": 30, "group_index": 9, "reward": {"score": 5.0, "exact": 0.25}, "response_length": 0}
    (place / "dump/rollout_data").mkdir()
    torch.save({"rollout_id": 3, "metadata": {}, "samples": [sample]}, place / "dump/rollout_data/3.pt")
    append(
        place / "dump/dashboard/metrics.jsonl", {"step_key": "train/step", "step": 7, "metrics": {"train/loss": 1.0}}
    )
    run = Tables(place)
    assert run["steps"].filter(run["steps"]["step"] == 3).select("reward_mean", "loss").rows() == [(0.25, 1.0)]
    assert not any("`score`" in guess for guess in run.source.guesses)


def test_open_phases_torn_lines_and_odd_records_do_not_stop_the_rest(tmp_path):
    dashboard = copy_made_up("miles", tmp_path) / "dump/dashboard"
    append(next(dashboard.glob("phases/*.jsonl")), {"name": "rollout", "t0": 1790000040.0, "t1": -1, "gpus": None})
    append(
        dashboard / "trajectories.jsonl", {"kind": 3, "sample_index": "x"}, {"ts": "soon"}, event("gen_end", 5.0, 99)
    )
    append(dashboard / "topology.jsonl", {"ts": 1.0, "engines": [3, {"gpus": [[1]]}]}, {"ts": 2.0, "engines": None})
    append(dashboard / "metrics.jsonl", {"step_key": None, "metrics": 3}, {"metrics": {"x": "y"}})
    append(dashboard.parent / "trajectory/2.jsonl", {"sample_index": 24, "messages": "none"}, {"messages": [3]})
    with open(dashboard / "metrics.jsonl", "a") as file:
        file.write('{"ts": 1790000050.0, "step_k')
    run = Tables(dashboard.parent)
    assert run["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625] and len(run["phases"]) == 36
    assert not run.source.unreadable
