"""PPO with a critic: what it learns, what must not change it, and how it lives through a run."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from inline import check_books, inline_run
from resumed_runs import SYNC, a_run, check_resumed, taken_up
from safetensors.torch import load_file
from small_trainers import VOCAB, flat, made_groups, small_model

from rlbench.advantage import gae
from rlbench.base.ledger_reading import read_table
from rlbench.loop.config_files import captured_functions, load_config, read_config
from rlbench.loop.config_tables import ConfigError
from rlbench.models.heads import ValueModel
from rlbench.objective.objective import make_objective
from rlbench.records import Group, Rollout, Task, prompt_segment, response_segment
from rlbench.runtime.checkpoint import checkpoint_folders, find_checkpoint, load_checkpoint, read_manifest
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools
from rlbench.runtime.torch_generator import load_run_policy
from rlbench.runtime.torch_trainer import new_critic
from rlbench.runtime.worker import build_halves
from rlbench.training.batch import Arrays, Context, prepare_batch
from rlbench.training.critic import CriticConfig, ValueCritic, batch_values, critic_mask, explained_share
from rlbench.training.trainer import Trainer, TrainerConfig, TrainerExtras
from rlbench.workbench.fork import prepare_fork

PPO = make_objective({"name": "gae", "lam": 1.0})


pytestmark = pytest.mark.usefixtures("one_thread")


def small_critic(seed: int = 0, **settings_) -> ValueCritic:
    return ValueCritic(ValueModel(small_model(seed).base_model), CriticConfig(**settings_))


def laid_out(groups, critic: ValueCritic, goal=PPO) -> Arrays:
    return prepare_batch(groups, goal, context=Context(values=critic.values))


def told_by_the_first_token(count: int = 64, seed: int = 0) -> list[Group]:
    "Groups of one: responses of four tokens, right if the first of them is in the upper half of the vocabulary."
    random, groups = np.random.default_rng(seed), []
    for g in range(count):
        task, tokens = Task(f"t{g}", "", ""), random.integers(1, VOCAB, 4)
        segments = (prompt_segment([1, 2, 3]), response_segment(tokens, np.full(4, -3.0), np.zeros(4)))
        groups.append(Group(g, task, (Rollout(g, 0, g, 0, task, segments, reward=float(tokens[0] >= VOCAB // 2)),)))
    return groups


def test_it_learns_what_each_prefix_is_worth():
    "Before the first token: the share of right answers. After it: what that token decided."
    critic = small_critic(learning_rate=5e-3, epochs=4, clip=0)
    first = [critic.train(laid_out(told_by_the_first_token(seed=seed), critic)) for seed in range(12)]
    arrays = laid_out(told_by_the_first_token(seed=99), critic)
    truth_RT = np.repeat(arrays.rewards_R[:, None], 4, 1)
    truth_RT[:, 0] = 0.5
    assert np.abs(arrays.values_RT[:, 3:] - truth_RT).mean() < 0.15
    assert (
        explained_share(arrays.values_RT, arrays.returns_RT, arrays.mask_RT) > 0.5 > 0.1 > first[0]["value_explained"]
    )
    after_RT = arrays.advantages_RT[:, 3:]
    assert (
        np.abs(after_RT[:, 0]).mean() > 0.3 > np.abs(after_RT[:, 1:]).mean()
    )  # the token that decided is the one that is blamed or praised


def test_a_fresh_critic_says_nothing_and_gae_is_then_the_return():
    critic = small_critic()
    arrays = laid_out(made_groups(), critic)
    assert (
        not arrays.values_RT.any()
        and np.allclose(arrays.advantages_RT, arrays.returns_RT)
        and critic.train(arrays)["value_explained"] == 0
    )
    assert critic.values(arrays).any() and critic.batches == 1 and critic.steps == 1


def test_gae_through_the_batch_is_the_one_done_by_hand():
    "Rewards 0, 0, 1 and values .2, .4, .6, behind a prompt of three tokens; whitening touches the advantages alone."
    task = Task("t", "", "")
    groups = [
        Group(
            0,
            task,
            (
                Rollout(
                    0,
                    0,
                    0,
                    0,
                    task,
                    (prompt_segment([1, 2, 3]), response_segment([4, 5, 6], [-1.0] * 3, [0] * 3)),
                    reward=1.0,
                ),
            ),
        )
    ]
    context = Context(values=lambda arrays: np.array([[9, 9, 9, 0.2, 0.4, 0.6]]))
    plain, white = (
        prepare_batch(groups, make_objective({"name": "gae", "lam": 0.95, "whitened": whitened}), context=context)
        for whitened in (False, True)
    )
    assert np.allclose(plain.advantages_RT[0], [0, 0, 0, 0.751, 0.58, 0.4]) and np.allclose(
        plain.returns_RT[0], [0, 0, 0, 0.951, 0.98, 1]
    )
    assert (
        np.array_equal(white.returns_RT, plain.returns_RT)
        and abs(white.advantages_RT.sum()) < 1e-5 < white.advantages_RT.std()
    )
    ours = gae([1.0], np.array([[0.2, 0.4, 0.6]]), np.ones((1, 3)), gamma=0.5, lam=0.95)[0][0]  # surprises 0, -.1, .4
    assert np.allclose(ours, [0.475 * (-0.1 + 0.475 * 0.4), -0.1 + 0.475 * 0.4, 0.4])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_split_and_the_padding_do_not_change_what_it_learns(steps):
    groups, after = made_groups(), []
    for micro_tokens in (16_384, 64):
        critic = small_critic(optimizer_steps=steps, epochs=2, micro_tokens=micro_tokens)
        figures = [critic.train(laid_out(groups, critic)) for _ in range(2)]
        after.append((flat(critic.model), figures[-1]))
    assert torch.allclose(after[0][0], after[1][0], rtol=0, atol=2e-5) and critic.steps == 2 * 2 * steps
    assert np.allclose(list(after[0][1].values()), list(after[1][1].values()), atol=1e-4)
    arrays = laid_out(groups, critic)
    wider = replace(
        arrays,
        **{
            name: np.pad(getattr(arrays, name), ((0, 0), (0, 7)))
            for name in ("tokens_RT", "mask_RT", "values_RT", "returns_RT", "advantages_RT")
        },
    )
    width = arrays.mask_RT.shape[1]
    found_RT = batch_values(critic.model, wider, critic.config, critic.device)
    assert (
        np.array_equal(found_RT[:, :width], batch_values(critic.model, arrays, critic.config, critic.device))
        and not found_RT[:, width:].any()
    )


@pytest.mark.slow
def test_a_value_that_has_moved_far_enough_stops_learning():
    "Ten epochs go further without a bound, and a bound keeps all values near where they began."
    moved = {}
    for clip in (0.0, 0.05):
        critic = small_critic(learning_rate=1e-2, epochs=10, clip=clip)
        arrays = laid_out(made_groups(), critic)
        critic.train(arrays)
        moved[clip] = np.abs(critic.values(arrays) - arrays.values_RT)[arrays.mask_RT].mean()
    assert moved[0.05] < 0.5 * moved[0.0], moved


def test_it_learns_from_new_rollouts_of_the_policy_alone():
    critic = small_critic()
    arrays = laid_out(made_groups(), critic)
    some_R = arrays.groups_R < 2
    assert (
        not critic_mask(replace(arrays, replayed_R=some_R))[some_R].any()
        and not critic_mask(replace(arrays, shown_R=some_R))[some_R].any()
    )
    alone = small_critic()
    alone.train(laid_out(made_groups()[2:], alone))
    critic.train(replace(arrays, replayed_R=some_R))
    assert torch.allclose(flat(critic.model), flat(alone.model), rtol=0, atol=2e-5)
    nothing = critic.train(replace(arrays, replayed_R=np.ones(len(arrays), bool)))
    assert nothing == {"value_loss": None, "value_explained": None}


def test_a_reward_that_is_no_number_leaves_both_models_as_they_were():
    critic = small_critic()
    trainer = Trainer(small_model(), TrainerConfig(), PPO, extras=TrainerExtras(critic=critic))
    before = flat(trainer.model), flat(critic.model)
    huge = [replace(g, rollouts=tuple(replace(r, reward=1e38) for r in g.rollouts)) for g in made_groups()]
    with pytest.raises(FloatingPointError, match="critic: its gradient is not finite"):
        trainer.train(huge, 1)
    assert (
        torch.equal(flat(trainer.model), before[0])
        and torch.equal(flat(critic.model), before[1])
        and trainer.steps == critic.steps == 0
    )


def test_warm_up_moves_the_critic_and_not_the_policy():
    critic = small_critic()
    trainer = Trainer(small_model(), TrainerConfig(critic_warmup=2), PPO, extras=TrainerExtras(critic=critic))
    weights, values, moved = flat(trainer.model), flat(critic.model), []
    for version in (1, 2, 3):
        trainer.train(made_groups(seed=version), version)
        moved.append((not torch.equal(flat(trainer.model), weights), not torch.equal(flat(critic.model), values)))
    assert moved == [(False, True), (False, True), (True, True)]


def test_groups_of_one_are_trained():
    groups = told_by_the_first_token()
    critic = small_critic(learning_rate=5e-3)
    trainer = Trainer(small_model(), TrainerConfig(optimizer_steps=2), PPO, extras=TrainerExtras(critic=critic))
    results = [trainer.train(groups, version) for version in (1, 2)]
    assert all(
        r.metrics.update_norm > 0 and r.metrics.optimizer_steps == 2 and len(r.advantages) == 64 for r in results
    )
    assert results[0].metrics.value_explained == 0 and results[1].metrics.value_loss < results[0].metrics.value_loss
    assert min(results[1].advantages.values()) < 0 < max(results[1].advantages.values())


RUN = SYNC | {
    "generator": "torch",
    "model": "tiny",
    "max_tokens": 24,
    "steps": 5,
    "filter": "none",
    "checkpoint_every": 1,
    "checkpoints_kept": 9,
    "eval": [],
    "advantage": {"name": "gae", "lam": 0.95},
    "critic": True,
    "critic_epochs": 2,
    "optimizer_steps": 2,
    "critic_warmup": 1,
}


def saved(folder) -> dict:
    return load_file(find_checkpoint(folder) / "trainer" / "critic.safetensors") | {
        f"policy {k}": v for k, v in load_file(find_checkpoint(folder) / "trainer" / "weights.safetensors").items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement,more", [("colocated", {}), ("split", {"lora": {"rank": 2}})], ids=["colocated", "split-adapters"]
)
def test_a_resumed_run_goes_on_to_the_bit(placement, more, tmp_path):
    "Killed in the middle: the same digest, figures, policy, critic and moments as the run that nobody touched."
    table = RUN | {"placement": placement} | more
    drive(whole := a_run(tmp_path / "whole", table))
    drive(a_run(tmp_path / "first", table, {int(0.6 * whole.state.seq): tmp_path / "killed"}))
    before = saved(tmp_path / "killed")
    drive(resumed := taken_up(tmp_path / "killed"))
    check_resumed(resumed)
    ours, theirs = saved(whole.folder), saved(resumed.folder)
    assert (
        resumed.state.digest == whole.state.digest
        and ours.keys() == theirs.keys()
        and any(name.startswith("moments.") for name in ours)
    )
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()) and any(
        not torch.equal(tensor, before[name]) for name, tensor in ours.items()
    )
    columns = ["version", "loss", "value_loss", "value_explained", "update_norm"]
    steps = read_table(whole.folder, "steps", columns)
    assert read_table(resumed.folder, "steps", columns).equals(steps) and steps["value_loss"].null_count() == 0
    assert steps["update_norm"].to_list()[0] == 0 < min(steps["update_norm"].to_list()[1:])


@pytest.mark.slow
def test_a_critic_is_asked_from_the_version_on_that_swaps_it_in(tmp_path):
    """From grpo to gae and back while the run lives; the critic's knobs are live,
    and while nobody asks it learns nothing."""
    whole = inline_run(tmp_path, "plain", RUN | {"steps": 8, "advantage": "grpo", "critic_warmup": 0})
    third = whole.state.seq // 8
    swaps = [
        (2 * third, "advantage", {"name": "gae", "lam": 1.0}, 0),
        (2 * third, "critic_learning_rate", 5e-3, 0),
        (2 * third, "critic_epochs", 3, 0),
        (6 * third, "advantage", "grpo", 0),
    ]
    driver = inline_run(tmp_path, "swapped", RUN | {"steps": 8, "advantage": "grpo", "critic_warmup": 0}, swaps)
    check_books(driver)
    commands = read_table(driver.folder, "commands").filter(pl.col("status") == "applied")
    told = read_table(driver.folder, "steps")["value_loss"].to_list()
    at = [version for knob, version in commands.select("knob", "version").rows() if knob == "advantage"]
    assert [v is not None for v in told] == [at[0] <= version < at[1] for version in range(8)] and 0 < at[0] < at[1] < 8
    assert set(read_table(whole.folder, "steps")["value_loss"].to_list()) == {None}
    assert commands["knob"].to_list().count("critic_epochs") == 1


@pytest.mark.slow
def test_a_fork_may_begin_with_a_critic_that_its_parent_did_not_have(tmp_path):
    drive(run := a_run(tmp_path / "run", RUN | {"advantage": "grpo", "critic": False}))
    version = read_manifest(checkpoint_folders(run.folder)[1]).version
    child = prepare_fork(run.folder, "with-critic", version, taken={"critic": True, "advantage": "gae"})
    driver = taken_up_fork(child)
    drive(driver)
    told = read_table(child, "steps").filter(pl.col("version") > version)
    assert (
        told["value_loss"].null_count() == 0
        and told["update_norm"].to_list()[0] == 0 < told["update_norm"].to_list()[1]
    )  # its own first batch warms it up


def taken_up_fork(child) -> Driver:
    return Driver(
        child,
        read_config(child),
        make_pools(read_config(child)),
        load_checkpoint(find_checkpoint(child), captured_functions(child)),
    )


def test_settings_that_cannot_be():
    for settings_, said in (
        ({"advantage": "gae"}, "needs the values of a critic; set critic = true"),
        ({"critic": True, "trainers": 2}, "trainers = 2"),
        ({"critic": True, "value_clip": -1.0}, "value_clip"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("tiny", settings_)


def test_the_critic_of_a_policy_with_adapters_is_whole(tmp_path):
    config = load_config(
        "tiny",
        {"lora": {"rank": 4}, "critic": True, "advantage": "gae", "critic_learning_rate": 0.003, "value_clip": 0.5},
    )
    policy = load_run_policy(config)
    critic = new_critic(config, policy)
    assert all(p.requires_grad for p in critic.model.parameters()) and not any(
        ".lora_" in name for name, _ in critic.model.named_parameters()
    )
    assert (critic.config.learning_rate, critic.config.clip, critic.config.epochs) == (0.003, 0.5, 1) and new_critic(
        load_config("tiny"), policy
    ) is None
    _, learner = build_halves(config, ["1+2="], ("trainer",), tmp_path)
    beside = next(c.cell_contents for c in learner.train.__closure__ if isinstance(c.cell_contents, Trainer)).extras
    learner.configure(load_config(config, {"critic_epochs": 3, "critic_learning_rate": 0.0}))
    assert (beside.critic.config.epochs, beside.critic.config.learning_rate) == (3, 0.0)
