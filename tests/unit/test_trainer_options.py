"""Attention, optimizer and the pass over the vocabulary by name: each usable one trains, each other one is refused."""

from dataclasses import dataclass

import pytest
import torch
from small_trainers import flat, made_groups, small_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from rlbench.bench.gpu_records import CheckContext
from rlbench.bench.gpu_training_checks import compare_gradient_norms, see_optimizers
from rlbench.loop.config import make_config
from rlbench.loop.config_tables import ConfigError
from rlbench.models.fused_logprobs import liger_logprobs
from rlbench.models.model import flat_logprobs, token_logprobs
from rlbench.models.optimizers import load_state, make_optimizer, saved_state
from rlbench.models.trainer_options import (
    ADAMW_8BIT_BYTES,
    OPTIONS,
    check_options,
    is_installed,
    option_named,
    option_names,
    usable_text,
    why_unusable,
)
from rlbench.planning.plan_memory import check_trainer
from rlbench.planning.planfile import load_plan
from rlbench.runtime.checkpoint import read_trainer, read_weights, write_trainer
from rlbench.runtime.memory_plan import memory_plan
from rlbench.training.logprobs import set_attention
from rlbench.training.trainer import Trainer, TrainerConfig
from rlbench.workbench.doctor import trainer_option_checks
from rlbench.workbench.fork import check_not_fixed
from rlbench.workbench.prepare import check_usable_options

pytestmark = pytest.mark.usefixtures("one_thread")


def usable_here(field: str) -> list[str]:
    "The values of a field that a CPU can honour with the packages that are installed; bitsandbytes adds to them."
    return [option.value for option in OPTIONS[field] if not why_unusable(option, has_gpu=False)]


def updated_weights(groups, **settings) -> torch.Tensor:
    trainer = Trainer(small_model(), TrainerConfig(micro_tokens=200, **settings))
    for version in (1, 2):
        trainer.train(groups, version)
    return flat(trainer.model)


@pytest.mark.parametrize("name", usable_here("attn_implementation"))
def test_every_attention_makes_the_same_update_packed_or_padded(name):
    groups = made_groups(count=3)
    wanted = updated_weights(groups)
    for packing in (False, True):
        found = updated_weights(groups, attn_implementation=name, packing=packing)
        assert torch.allclose(found, wanted, rtol=0, atol=2e-5)


def test_another_attention_than_sdpa_leaves_the_shared_pass():
    "The shared pass has an attention of its own, so it would not honour the setting."
    assert Trainer(small_model(), TrainerConfig()).shares
    eager = Trainer(small_model(), TrainerConfig(attn_implementation="eager"))
    assert not eager.shares and eager.model.config._attn_implementation == "eager"


def test_an_attention_that_a_model_lacks_is_refused():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes, **heads))
    with pytest.raises(ValueError, match='GptOssForCausalLM cannot use .sdpa.*set attn_implementation = "eager"'):
        set_attention(model, "sdpa")
    set_attention(model, "eager")


@dataclass
class AdamSettings:
    optimizer: str
    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


def wide_model(seed: int = 0):
    "Its matrices have more than 4,096 numbers, fewer of which stay in 32 bits."
    torch.manual_seed(seed)
    sizes = dict(vocab_size=24, hidden_size=64, num_hidden_layers=2, intermediate_size=128, max_position_embeddings=256)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads, tie_word_embeddings=True, use_cache=False))


@pytest.mark.parametrize("name", usable_here("optimizer"))
def test_an_optimizer_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(name, tmp_path):
    groups, config = made_groups(count=3), TrainerConfig(optimizer=name)
    straight = Trainer(wide_model(), config)
    for version in (1, 2):
        straight.train(groups, version)
    write_trainer(tmp_path, straight)
    again = Trainer(wide_model(9), config)
    read_weights(tmp_path, again.model)
    read_trainer(tmp_path, again)
    for version in (3, 4):
        straight.train(groups, version)
        again.train(groups, version)
    assert torch.equal(flat(again.model), flat(straight.model)) and again.steps == 4


@pytest.mark.parametrize("name", usable_here("optimizer"))
def test_an_optimizers_state_takes_the_bytes_that_plans_count(name):
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 2**16))
    optimizer = make_optimizer(AdamSettings(name), [weights])
    weights.grad = weights.detach().clone()
    optimizer.step()
    moments = saved_state(optimizer)["state"][0]
    held = sum(value.nbytes for key, value in moments.items() if not key.startswith("qmap") and value.ndim)
    assert held == option_named("optimizer", name).state_bytes * len(weights)


@pytest.mark.parametrize("name", usable_here("optimizer"))
def test_moments_of_another_kind_are_refused(name):
    weights = torch.nn.Parameter(torch.ones(4))
    optimizer = make_optimizer(AdamSettings(name), [weights])
    other = "exp_avg" if option_named("optimizer", name).modules else "state1"
    saved = {"state": {0: {other: torch.zeros(4)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match="keep the optimizer of the run"):
        load_state(optimizer, saved)
    with pytest.raises(ValueError, match="optimizer: fixed"):
        check_not_fixed(["optimizer"])


PASSES = [flat_logprobs] + [liger_logprobs] * (is_installed("liger_kernel") and is_installed("triton"))


@pytest.mark.parametrize("flat_pass", PASSES, ids=lambda each: each.__name__)
def test_every_pass_over_the_vocabulary_gives_values_and_slopes_of_plain_softmax(flat_pass):
    "Liger's formulas run here where the package is installed; its kernels need a GPU."
    model = small_model()
    tokens_RT = torch.arange(36).reshape(3, 12) % 24
    lengths_R, temperature_R = torch.tensor([9, 5, 12]), torch.tensor([1.0, 0.5, 2.0])
    slope_RT = torch.linspace(-1, 1, 12).expand(3, 12)
    found_RT, entropy_RT = token_logprobs(model, tokens_RT, lengths_R, temperature_R, flat=flat_pass)
    (found_RT * slope_RT + entropy_RT * slope_RT.flip(1)).sum().backward()
    slopes = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    logits_RTV = model(input_ids=tokens_RT, use_cache=False).logits[:, :-1] / temperature_R[:, None, None]
    all_RTV = logits_RTV.log_softmax(-1)
    is_there_RT = torch.arange(1, 12) < lengths_R[:, None]
    wanted_RT = all_RTV.gather(-1, tokens_RT[:, 1:, None])[..., 0] * is_there_RT
    plain_RT = -(all_RTV.exp() * all_RTV).sum(-1) * is_there_RT
    (wanted_RT * slope_RT[:, 1:] + plain_RT * slope_RT.flip(1)[:, 1:]).sum().backward()
    assert torch.allclose(found_RT[:, 1:], wanted_RT, atol=1e-5) and torch.allclose(
        entropy_RT[:, 1:], plain_RT, atol=1e-5
    )
    assert torch.allclose(slopes, torch.cat([p.grad.flatten() for p in model.parameters()]), atol=1e-4)


UNUSABLE = [(field, name) for field in OPTIONS for name in option_names(field) if name not in usable_here(field)]


@pytest.mark.parametrize(("field", "name"), UNUSABLE, ids=lambda each: each)
def test_what_this_machine_cannot_honour_is_refused_before_work_starts(field, name):
    "By name, with the remedy: where a run is prepared, and in the trainer's own process. Never replaced."
    table = {field: name, "precision": "bf16" if option_named(field, name).needs_bf16 else "fp32"}
    asked = make_config({**table, "device": "auto"})
    with pytest.raises(ValueError, match=f'{field}: "{name}" needs .*set {field} = '):
        check_usable_options(asked.model_copy(update={"device": "cpu"}))
    settings = TrainerConfig(**{field: name, "precision": table["precision"]})
    with pytest.raises(ValueError, match=f'{field}: "{name}" needs .*set {field} = '):
        check_options(settings, has_gpu=False)


def test_a_trainer_refuses_in_its_own_process_too():
    "On a cluster it is on another machine than the one that started the run."
    with pytest.raises(ValueError, match='optimizer: "paged_adamw_8bit" needs a CUDA GPU'):
        Trainer(small_model(), TrainerConfig(optimizer="paged_adamw_8bit"))
    with pytest.raises(ValueError, match="fixed while a trainer lives"):
        Trainer(small_model(), TrainerConfig()).set(optimizer="adamw")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"optimizer": "paged_adamw_8bit", "device": "cpu"}, 'set device = "cuda", or optimizer = "adamw_fused"'),
        ({"attn_implementation": "flash_attention_2", "device": "cuda"}, 'set precision = "bf16"'),
        ({"optimizer": "adamw_8bit", "trainers": 2, "placement": "split"}, "set trainers = 1, or optimizer"),
        ({"logprobs": "liger", "trainers": 2, "placement": "split", "device": "cuda"}, "set trainers = 1, or logprobs"),
        ({"logprobs": "liger", "top_p": 0.9, "device": "cuda"}, "set top_p = 1 and top_k = 0"),
        (
            {"generator": "tinker", "trainer": "tinker", "tinker": "http://x:1", "optimizer": "adamw"},
            "optimizer: needs the",
        ),
        ({"use_liger_kernel": True}, "TRL's use_liger_kernel is logprobs here"),
        ({"optim": "adamw_bnb_8bit"}, 'adamw_bnb_8bit is "adamw_8bit"'),
        ({"padding_free": True}, "TRL's padding_free is packing here"),
        ({"use_remove_padding": True}, "verl's use_remove_padding is packing here"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "refused",
)
def test_settings_that_contradict_each_other_are_refused_at_once(table, words):
    with pytest.raises(ConfigError) as error:
        make_config(table)
    assert words in str(error.value)


def test_doctor_names_every_option_and_where_it_was_tried():
    for has_gpu in (False, True):
        for check in trainer_option_checks(has_gpu):
            assert all(name in check.found for name in option_names(check.name))
            assert "tested on a CPU and on an H200" in check.found
    assert "liger (its formulas tested on a CPU, its kernels not" in usable_text("logprobs", True, lambda module: True)
    flash = "flash_attention_2, flash_attention_3 (needs a GPU, and was not measured on one)"
    assert flash in usable_text("attn_implementation", True, lambda module: True)


def test_an_option_needs_all_of_its_packages():
    "Liger without the package that it compiles its kernels for Hopper GPUs with fails in the first batch."
    liger = option_named("logprobs", "liger")
    assert not why_unusable(liger, True, lambda module: True)
    assert "needs nvidia-cutlass-dsl, which is not installed" in why_unusable(
        liger, True, lambda module: module == "liger_kernel"
    )


def test_plans_count_the_bytes_of_the_optimizer():
    def bytes_of(optimizer: str) -> float:
        needs = memory_plan(make_config({"optimizer": optimizer})).needs
        return next(need.bytes for need in needs if need.what == "gradients, AdamW")

    parameters = memory_plan(make_config({})).parameters
    assert bytes_of("adamw") == bytes_of("adamw_fused") == 12 * parameters
    assert bytes_of("adamw_8bit") == bytes_of("paged_adamw_8bit") == (4 + ADAMW_8BIT_BYTES) * parameters


def test_a_trainer_that_is_too_small_for_32_bits_may_do_for_8():
    plan = load_plan("prime-qwen3-235b", {"trainer.offload": False, "trainer.gpus": 25})
    with pytest.raises(ValueError, match='trainer.optimizer = "adamw_8bit", or trainer.offload = true'):
        check_trainer(plan)
    check_trainer(load_plan(plan, {"trainer.optimizer": "adamw_8bit"}))


def test_gpu_check_finds_an_option_with_other_gradients(tmp_path):
    context = CheckContext(str(tmp_path))
    norms = {"sdpa": 1.0, "eager": 1.0005, "flex_attention": 1.01}

    def measure(context, groups, attn_implementation, precision):
        return norms[attn_implementation], 0.1

    settings = {name: {"attn_implementation": name} for name in norms}
    found = compare_gradient_norms(context, settings, measure)
    assert not found.holds and "flex_attention 1.0e-02" in found.text
    del settings["flex_attention"]
    assert compare_gradient_norms(context, settings, measure).holds


def test_gpu_check_tries_every_usable_optimizer_through_a_checkpoint(tmp_path):
    found = see_optimizers(CheckContext(str(tmp_path)))
    assert found.holds and set(found.figures) == {f"{name}_distance" for name in usable_here("optimizer")}
