import json
import os
import pickle

import pytest
from opened_runs import MADE_UP, Tables, copy_made_up

from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.skyrl import unpickled_batch
from rlbench.foreign.source_files import ForeignError

pytestmark = pytest.mark.usefixtures("cache")


def test_the_example_has_its_means_groups_and_both_engines():
    run = Tables(MADE_UP / "skyrl")
    assert run.found.kind == "skyrl" and run.found.path.name == "exports"
    assert run["steps"]["step"].to_list() == [1, 2, 3]
    assert run["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert run["steps"]["length_mean"].to_list() == [8.625, 8.375, 8.5]
    assert run["groups"]["size"].to_list() == [4] * 6 and run["groups"]["group"].to_list() == [0, 1, 2, 3, 4, 5]
    assert run["steps"]["logprob_diff_mean"][0] == pytest.approx(0.001, abs=1e-5)
    tokens = run["tokens"]
    assert tokens["prompt_tokens"].to_list()[0] == [49, 55, 43, 50, 53, 61]
    assert {"advantages", "reference", "start_logprobs"} <= set(tokens.columns)
    assert tokens["tokens"].list.len().to_list() == tokens["logprobs"].list.len().to_list()


def test_what_skyrl_does_not_write_is_absent():
    run = Tables(MADE_UP / "skyrl")
    rollouts = run["rollouts"].filter(run["rollouts"]["fate"] == "trained")
    assert rollouts["reward"].null_count() == len(rollouts) and rollouts["text"].null_count() == len(rollouts)
    assert not {"dispatched", "seconds", "part_names", "at"} & set(run["rollouts"].columns)
    assert not {"reward_mean", "solved", "scored", "no_signal", "staleness"} & set(run["groups"].columns)
    assert not {"reward_std", "solve_rate", "lag_max", "seconds"} & set(run["steps"].columns)
    assert "phases" in run.source.missing


def test_scores_of_each_token_are_summed():
    run = Tables(MADE_UP / "skyrl")
    assert run["evals"].select("eval", "step", "version", "tasks", "avg").rows() == [("sums", 3, 3, 3, 1.0)]
    (path,) = (MADE_UP / "skyrl").rglob("aggregated_results.jsonl")
    summary = json.loads(path.read_text())
    found = run["metrics"].filter(run["metrics"]["evaluation"])
    assert dict(found.select("name", "value").rows()) == summary


def test_a_pickle_that_names_anything_else_is_refused_unbuilt(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "exports/dumped_data/global_step_1_training_input.pkl"
    path.parent.mkdir(parents=True)
    names = ["skyrl.backends.skyrl_train.training_batch", "TrainingInputBatch"]
    path.write_bytes(pickle.dumps([*names, Harmful()]))
    with pytest.raises(ForeignError, match="mkdir"):
        unpickled_batch(path)
    run = Tables(tmp_path / "exports")
    assert "mkdir" in run.source.unreadable[0] and not (tmp_path / "made").exists()


def test_the_rest_opens_without_a_batch_and_with_damage(tmp_path):
    place = copy_made_up("skyrl", tmp_path)
    first, second, _ = sorted(place.rglob("*.pkl"))
    first.write_bytes(first.read_bytes()[:3000])
    (path,) = place.rglob("sums.jsonl")
    odd = {"input_prompt": 3, "output_response": None, "score": ["x"], "env_class": 1, "env_extras": 5, "new": []}
    with open(path, "a") as file:
        file.write(json.dumps(odd) + '\n{"input_prompt": "torn')
    run = Tables(place)
    assert len(run.source.unreadable) == 1 and run["steps"]["step"].to_list() == [2, 3]
    for batch in place.rglob("*.pkl"):
        batch.unlink()
    evaluations = Tables(place)
    assert not evaluations["steps"].columns and len(evaluations["evals"]) >= 1
    assert evaluations.source.missing["tokens"] == "trainer.dump_data_batch=true"


def test_a_pickle_of_something_else_is_no_run(tmp_path):
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"batch": 1}))
    with pytest.raises(ForeignError):
        find_foreign_runs(tmp_path)
