"""Runs that train adapters: what is moved, saved and taken up again."""

import tomllib

import pytest
import torch
from checkpoints import FAMILIES, checkpoint
from patience import until
from peft import PeftModel
from real_runs import assert_books, ended
from resumed_runs import SYNC, a_run, check_resumed, taken_up
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlbench as rl
from rlbench.base.run_files import WEIGHTS_FILE
from rlbench.loop.config import with_knob
from rlbench.loop.config_files import load_config, to_toml
from rlbench.loop.config_tables import ConfigError
from rlbench.models.lora import adapter_weights, add_adapters, save_trained, scale_of
from rlbench.models.model import base_weights, load_policy, token_logprobs
from rlbench.runtime.checkpoint import find_checkpoint
from rlbench.runtime.driver import drive
from rlbench.runtime.worker import build_halves
from rlbench.training.weight_transport import SharedWeights, moving_weights, served_weights
from rlbench.training.weights_file import HEADER
from rlbench.workbench.fork import prepare_fork
from rlbench.workbench.supervisor import rescue_policy

SMALL = dict(
    batch=64,
    group=8,
    preflight=0,
    staleness=1,
    eval=[{"name": "held_out", "count": 32, "every": 0}],
    lora={"rank": 4, "alpha": 8.0},
    learning_rate=2e-3,
)
TOKENS = torch.randint(3, 20, (4, 20), generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("one_thread")


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model.eval(), TOKENS, torch.full((4,), 20))[0]


def disturbed(model, seed: int = 0):
    "The model with adapters that are not nothing."
    draws = torch.Generator().manual_seed(seed)
    for tensor in adapter_weights(model).values():
        tensor.normal_(0, 0.05, generator=draws)
    return model


def test_a_split_run_moves_only_adapters_and_leaves_a_policy_that_loads_anywhere(tmp_path):
    run = rl.run("tiny", runs=tmp_path, placement="split", steps=4, checkpoint_every=4, **SMALL)
    size = until(lambda: (run.folder / WEIGHTS_FILE).exists() and (run.folder / WEIGHTS_FILE).stat().st_size)
    ended(run)
    assert_books(run)
    tiny = load_policy("tiny").model
    start = add_adapters(load_policy("tiny").model, 4, 8.0, seed=run.config.seed)
    bytes_of = lambda named: sum(t.numel() * t.element_size() for t in named.values())  # noqa: E731
    assert (
        2 * bytes_of(moving_weights(start))
        <= size - HEADER
        < 2 * bytes_of(moving_weights(start)) + 2 * 64 * len(moving_weights(start))
        < 0.2 * bytes_of(moving_weights(tiny))
    )

    stored = load_file(max((run.folder / "checkpoints").glob("v*")) / "trainer" / "weights.safetensors")
    assert stored.keys() == adapter_weights(start).keys() and all(".lora_" in name for name in stored)
    assert all(not torch.equal(stored[name], tensor) for name, tensor in adapter_weights(start).items())
    for name, tensor in adapter_weights(start).items():
        tensor.copy_(stored[name])
    policy = AutoModelForCausalLM.from_pretrained(run.folder / "policy")
    beside = PeftModel.from_pretrained(load_policy("tiny").model, run.folder / "policy" / "adapter").get_base_model()
    assert torch.allclose(logprobs(policy), logprobs(start), atol=1e-4) and torch.allclose(
        logprobs(beside), logprobs(start), atol=1e-5
    )
    assert not torch.allclose(logprobs(policy), logprobs(tiny), atol=1e-3)
    moved = {name for name, tensor in base_weights(policy).items() if not torch.equal(tensor, base_weights(tiny)[name])}
    assert moved == {name.replace(".lora_A.", ".") for name in stored if ".lora_A." in name}
    kl = [row["kl_sampler"] for row in run.steps.to_dicts()]
    assert max(kl) < 0.05, kl  # what is served is what is trained


def newest_weights(folder) -> dict:
    return load_file(find_checkpoint(folder) / "trainer" / "weights.safetensors")


def test_a_resumed_run_with_adapters_is_the_run_that_was_not_stopped(tmp_path):
    "Killed in the middle and taken up: the same digest, and the same adapters to the bit."
    table = SYNC | {
        "generator": "torch",
        "model": "tiny",
        "max_tokens": 24,
        "steps": 4,
        "filter": "none",
        "checkpoint_every": 1,
        "eval": [],
        "placement": "split",
        "lora": {"rank": 4, "dropout": 0.1},
    }
    drive(whole := a_run(tmp_path / "whole", table))
    drive(a_run(tmp_path / "first", table, {int(0.6 * whole.state.seq): tmp_path / "killed"}))
    before = newest_weights(tmp_path / "killed")
    drive(resumed := taken_up(tmp_path / "killed"))
    check_resumed(resumed)
    ours, theirs = newest_weights(whole.folder), newest_weights(resumed.folder)
    assert resumed.state.digest == whole.state.digest and ours.keys() == theirs.keys()
    with pytest.raises(ValueError, match="lora: fixed, since the checkpoint holds its parent's"):
        prepare_fork(whole.folder, "wider", taken={"lora.rank": 8})
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()) and any(
        not torch.equal(tensor, before[name]) for name, tensor in ours.items()
    )


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_what_a_generator_is_given_is_the_merged_policy(placement, tmp_path):
    "The halves of a run, in this process: every version that is published is written with, base weights are untouched."
    config = load_config("tiny", {"lora": {"rank": 4}, "placement": placement})
    (tmp_path / "config.toml").write_text(to_toml(config))
    parts = [("trainer",), ("generator",)] if placement == "split" else [("generator", "trainer")]
    halves = [build_halves(config, ["1+2="], part, tmp_path) for part in parts]
    writer, learner = halves[-1][0], halves[0][1]
    trainer = learner.train.__closure__ and next(
        c.cell_contents for c in learner.train.__closure__ if hasattr(c.cell_contents, "optimizer")
    )
    before = {name: tensor.clone() for name, tensor in base_weights(trainer.model).items()}
    disturbed(trainer.model)
    learner.publish(1)
    assert writer.load(1, "keep") == 1
    wanted = served_weights(trainer.model, moving_weights(trainer.model))
    for name, (tensor, shape) in writer.generator.weights.targets.items():
        assert torch.equal(
            tensor, wanted[name].expand(tensor.shape) if tensor.ndim != wanted[name].ndim else wanted[name]
        ), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in base_weights(trainer.model).items())
    assert sum(p.numel() for g in trainer.optimizer.param_groups for p in g["params"]) == sum(
        t.numel() for t in adapter_weights(trainer.model).values()
    )


def test_a_run_that_failed_leaves_the_merged_policy(tmp_path):
    "What was published as adapters is saved as a policy."
    (tmp_path / "config.toml").write_text(to_toml(load_config("tiny", {"lora.rank": 4, "seed": 3})))
    trained = disturbed(add_adapters(load_policy("tiny").model, 4))
    SharedWeights(tmp_path / WEIGHTS_FILE, moving_weights(trained), create=True).write(5, moving_weights(trained))
    assert rescue_policy(tmp_path) == 5
    assert torch.allclose(
        logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "policy")), logprobs(trained), atol=1e-4
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_every_family_merge_into_a_checkpoint_of_it(name, tmp_path):
    policy = load_policy(str(checkpoint(name, tmp_path / "hub")))
    plain = logprobs(policy.model)
    disturbed(add_adapters(policy.model, 2))
    assert scale_of(policy.model) == 8 and not torch.allclose(logprobs(policy.model), plain, atol=1e-2)
    written = save_trained(policy, tmp_path / "policy")
    assert torch.allclose(logprobs(AutoModelForCausalLM.from_pretrained(written)), logprobs(policy.model), atol=1e-3)


def test_settings_that_cannot_be():
    for settings_, said in (
        ({"lora.rank": -1}, "lora.rank: -1"),
        ({"lora.dropout": 1.5}, "lora.dropout: 1.5"),
        ({"lora.rang": 4}, "rank"),
        ({"rollout_dtype": "int8"}, "rollout_dtype"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("tiny", settings_)
    config = load_config("tiny", {"lora": {"rank": 4, "targets": ["query"]}})
    assert tomllib.loads(to_toml(config))["lora"] == {"rank": 4, "alpha": 16.0, "targets": ["query"], "dropout": 0.0}
    with pytest.raises(
        ValueError,
        match="lora.targets: 'query' is no linear layer of this model; use \"all-linear\", or some of down_proj",
    ):
        build_halves(config, ["1+2="], ("generator", "trainer"))
    with pytest.raises(ValueError, match="lora.rank: fixed for the whole run"):
        with_knob(config, "lora.rank", 8)
