import pytest
import torch
from opened_runs import MADE_UP, Tables, copy_made_up

from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source_files import ForeignError

pytestmark = pytest.mark.usefixtures("cache")


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def sample(index, group, reward, versions, length=3):
    return {
        "index": index,
        "group_index": group,
        "prompt": f"{group}?",
        "tokens": [1, 2, *range(length)],
        "response": "x",
        "response_length": length,
        "reward": reward,
        "weight_versions": versions,
        "status": "completed",
    }


def test_the_example_has_its_means_groups_versions_and_both_engines():
    run = Tables(MADE_UP / "slime")
    assert run.found.kind == "slime" and run.found.path.name == "dump"
    steps, groups, tokens = run["steps"], run["groups"], run["tokens"]
    assert steps["step"].to_list() == [0, 1, 2] and steps["version"].to_list() == [1, 2, 3]
    assert steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert groups["group"].to_list() == [0, 1, 2, 3, 4, 5] and groups["size"].to_list() == [4] * 6
    assert groups["no_signal"].to_list() == [False, True, False, False, False, False]
    assert groups["staleness"].to_list() == [0, 0, 1, 0, 2, 0]
    assert steps["truncated"].to_list() == [0, 0.125, 0]
    assert steps["logprob_diff_mean"][0] == pytest.approx(0.001, abs=1e-5)
    assert {"advantages", "reference", "start_logprobs", "versions", "mask"} <= set(tokens.columns)
    assert tokens["versions"].null_count() == 8  # of two versions, without the border between them


def test_what_slime_does_not_write_is_absent():
    run = Tables(MADE_UP / "slime")
    assert not {"seconds", "began", "ended", "at", "calls", "tool_seconds"} & set(run["rollouts"].columns)
    assert not {"seconds", "generator_compute", "trainer_compute", "at", "loss"} & set(run["steps"].columns)
    assert run.source.missing["phases"] and not run["metrics"].columns


def test_the_evaluation_keeps_its_version_and_is_no_part_of_the_training():
    run = Tables(MADE_UP / "slime")
    assert run["evals"].select("eval", "step", "version", "tasks", "avg").rows() == [("evaluation", 2, 2, 3, 1.0)]
    assert run["rollouts"]["fate"].to_list().count("evaluated") == 3 and run["steps"]["rollouts"].to_list() == [8, 8, 8]


def test_rewards_that_are_tables_take_their_number_from_the_training(tmp_path):
    run = Tables(MADE_UP / "slime")
    last = run["rollouts"].filter(pl_is_table(run["rollouts"]))
    assert last["reward"].to_list() == [0, 1, 1, 0] and last["part_names"][0].to_list() == ["score", "format"]
    assert not any("score" in guess for guess in run.source.guesses)
    without = copy_made_up("slime", tmp_path)
    for path in without.glob("dump/train_data/*"):
        path.unlink()
    guessed = Tables(without)
    assert guessed["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert any("`score`" in guess for guess in guessed.source.guesses)
    assert "start_logprobs" not in guessed["tokens"].columns
    assert guessed.source.missing["tokens.start_logprobs"].startswith("--dump-details")


def pl_is_table(rollouts):
    return rollouts["part_names"].is_not_null()


def test_training_in_columns_opens_like_format_2(tmp_path):
    run = copy_made_up("slime", tmp_path)
    for path in run.glob("dump/train_data/*"):
        dump = torch.load(path, weights_only=True)
        path.unlink()
        for rank in (0, 1):
            share = dump["samples"][rank::2]
            columns = {
                name: [each[name] for each in share] for name in ("tokens", "loss_masks", "log_probs", "advantages")
            }
            columns["response_lengths"] = torch.tensor([each["response_lengths"] for each in share])
            columns["sample_indices"] = [each["sample_index"] for each in share]
            columns["partition"] = [each["rollout_position"] for each in share]
            columns["raw_reward"] = dump["raw_reward"]
            columns["micro_batch_indices"] = [[0, 1], [2, 3]]
            content = {"rollout_id": dump["rollout_id"], "rank": rank, "rollout_data": columns}
            write(path.with_name(f"{dump['rollout_id']}_{rank}.pt"), content)
    opened, example = Tables(run), Tables(MADE_UP / "slime")
    assert opened["steps"]["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert opened["tokens"]["advantages"].to_list() == example["tokens"]["advantages"].to_list()
    assert "reference" not in opened["tokens"].columns


def test_versions_counted_from_1_and_from_a_restart_fit_the_steps(tmp_path):
    def dump(step, versions):
        samples = [sample(2 * step + k, step, float(k), [str(version)]) for k, version in enumerate(versions)]
        write(tmp_path / f"a/rollout_data/{step}.pt", {"rollout_id": step, "samples": samples})

    for step, versions in enumerate([(1, 1), (2, 1), (3, 3)]):  # slime hands out version 1 before step 0
        dump(step, versions)
    dump(3, (1, 1))  # restarted
    dump(4, (2, 1))
    run = Tables(tmp_path / "a")
    assert run["groups"]["staleness"].to_list() == [0, 1, 0, 0, 1]
    assert run["rollouts"]["dispatched"].to_list() == [0, 0, 1, 0, 2, 2, 3, 3, 4, 3]
    assert run["tokens"]["versions"].to_list()[-1] == [3, 3, 3]
    assert [guess for guess in run.source.guesses if guess.startswith("versions")] == [
        "versions: from step 0 on they are the system's numbers -1, so that the newest fits its step",
        "versions: from step 3 on they are the system's numbers +2, so that the newest fits its step",
    ]


def test_a_restart_that_gives_indices_again_loses_no_sample(tmp_path):
    for step in (5, 6):
        samples = [sample(index, 0, 1.0, ["default"]) for index in range(4)]
        write(tmp_path / f"{step}.pt", {"rollout_id": step, "samples": samples, "unknown": {"x": 1}})
    run = Tables(tmp_path)
    assert run["steps"]["rollouts"].to_list() == [4, 4] and "dispatched" not in run["rollouts"].columns


def test_broken_samples_and_files_do_not_stop_the_rest(tmp_path):
    run = copy_made_up("slime", tmp_path)
    odd = ["text", None, {}, {"index": "x", "tokens": 5, "response_length": "many", "reward": "high", "prompt": 3}]
    good = sample(99, 7, 1.0, None) | {"loss_mask": [1], "rollout_log_probs": ["a", "b", "c"], "metadata": None}
    write(run / "dump/rollout_data/7.pt", {"samples": [*odd, good]})
    whole = (run / "dump/rollout_data/2.pt").read_bytes()
    (run / "dump/rollout_data/2.pt").write_bytes(whole[: len(whole) // 2])
    opened = Tables(run)
    assert len(opened.source.unreadable) == 1 and "2.pt" in opened.source.unreadable[0]
    assert opened["steps"]["step"].to_list() == [0, 1, 2, 7]
    assert opened["steps"]["rollouts"].to_list() == [8, 8, 8, 3]


def test_folders_of_samples_beside_each_other_are_runs(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name / "0.pt", {"rollout_id": 0, "samples": [sample(0, 0, 1.0, [])]})
    assert [run.path.name for run in find_foreign_runs(tmp_path)] == ["one", "two"]
    write(tmp_path / "three/weights.pt", {"weight": torch.zeros(3)})
    with pytest.raises(ForeignError):
        find_foreign_runs(tmp_path / "three")
