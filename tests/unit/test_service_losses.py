"""The losses of the training service against plain torch: the same adapters after five steps, for each loss."""

import numpy as np
import pytest
import torch
from loss_data import ADAM, CONFIG, STEPS, carry_out, some_data

from rlbench.models.model import load_policy
from rlbench.service.service_records import (
    CreateModel,
    Datum,
    ForwardBackward,
    LoraShape,
    OptimStep,
    OrderFailed,
)
from rlbench.service.token_losses import TOKEN_LOSSES


def plain_loss(name: str, p: torch.Tensor, datum: Datum, config: dict) -> torch.Tensor:
    "The sum over the tokens of one datum, as section 5 of the protocol's description has it."
    w, q, a, mask = (
        torch.as_tensor(datum.inputs[key]) for key in ("weights", "logprobs", "advantages", "sequence_ratio_mask")
    )
    r = torch.exp(p - q)
    if name == "cross_entropy":
        return -(w * p).sum()
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -torch.min(r * a, torch.clip(r, config["clip_low_threshold"], config["clip_high_threshold"]) * a).sum()
    if name == "cispo":
        return -(torch.clip(r, 0.0, 4.0).detach() * a * p).sum()
    if name == "dro":
        return -(p * a - config["beta"] / 2 * (p - q) ** 2).sum()
    s = torch.exp(((p - q) * mask).sum() / mask.sum())
    return -torch.min(s * a, torch.clip(s, 0.9997, 1.0004) * a).sum()


def plain_training(name: str, start: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    "Five steps with nothing but torch and the model of transformers, one datum at a time."
    policy = load_policy("tiny")
    model = policy.model.requires_grad_(False)
    plain = dict(model.named_parameters())
    plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    adapter = {key: tensor.clone().requires_grad_() for key, tensor in start.items()}
    optimizer = torch.optim.AdamW(
        adapter.values(), ADAM.learning_rate, (ADAM.beta1, ADAM.beta2), ADAM.eps, ADAM.weight_decay
    )
    for step in range(STEPS):
        for datum in some_data(policy, step):
            weights = dict(plain)
            for key in (key for key in adapter if key.endswith(".lora_A.weight")):
                layer = key.removesuffix(".lora_A.weight")
                product = adapter[layer + ".lora_B.weight"] @ adapter[key]
                weights[layer + ".weight"] = plain[layer + ".weight"] + 32 / rank * product
            tokens = torch.as_tensor(datum.tokens).long()[None]
            logits = torch.func.functional_call(model, weights, kwargs={"input_ids": tokens}, tie_weights=False).logits
            targets = torch.as_tensor(datum.inputs["target_tokens"]).long()
            p = logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
            plain_loss(name, p, datum, CONFIG.get(name, {})).backward()
        torch.nn.utils.clip_grad_norm_(adapter.values(), ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return adapter


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_adapters_after_five_steps_equal_plain_torch(tenant_trainer, name):
    shape = LoraShape(rank=8, seed=3, unembed=True)
    carry_out(tenant_trainer, CreateModel(0, name, shape))
    start = {key: tensor.detach().clone() for key, tensor in tenant_trainer.models[name].trained.items()}
    for step in range(STEPS):
        data = some_data(tenant_trainer.policy, step)
        for part in (data[:3], data[3:]):  # two requests accumulate
            carry_out(tenant_trainer, ForwardBackward(1, name, part, name, CONFIG.get(name, {})))
        carry_out(tenant_trainer, OptimStep(2, name, ADAM))
    expected = plain_training(name, start, shape.rank)
    trained = {key: tensor.detach() for key, tensor in tenant_trainer.models[name].trained.items()}
    apart = max(float((expected[key].detach() - tensor).abs().max()) for key, tensor in trained.items())
    moved = max(float((start[key] - tensor).abs().max()) for key, tensor in trained.items())
    print(f"{name}: {apart:.1e} apart after moving by {moved:.1e}")
    assert apart < 1e-5 < moved / 100


def test_a_custom_loss_is_forward_only_and_then_cross_entropy(tenant_trainer):
    "What the client does for a loss of its own: log-probabilities, its gradient, and weights of minus that gradient."
    data = some_data(tenant_trainer.policy, 0)
    for model in ("custom", "direct"):
        carry_out(tenant_trainer, CreateModel(0, model, LoraShape(rank=4, seed=1)))
    zero = tuple(Datum(d.tokens, {**d.inputs, "weights": np.zeros_like(d.inputs["weights"])}) for d in data)
    forward = carry_out(tenant_trainer, ForwardBackward(1, "custom", zero, "cross_entropy", {}, forward_only=True))
    assert all(tensor.grad is None for tensor in tenant_trainer.models["custom"].trained.values())
    weighted = []
    for datum, logprobs in zip(data, forward.logprobs):
        p = torch.as_tensor(logprobs).requires_grad_()
        plain_loss("importance_sampling", p, datum, {}).backward()
        weighted.append(Datum(datum.tokens, {**datum.inputs, "weights": -p.grad.numpy()}))
    carry_out(tenant_trainer, ForwardBackward(2, "custom", tuple(weighted), "cross_entropy", {}))
    carry_out(tenant_trainer, ForwardBackward(3, "direct", data, "importance_sampling", {}))
    for key, tensor in tenant_trainer.models["direct"].trained.items():
        assert torch.allclose(tensor.grad, tenant_trainer.models["custom"].trained[key].grad, rtol=1e-4, atol=1e-5)


def test_stable_reinforce_is_refused_or_said_to_be_another_loss(tenant_trainer):
    data = some_data(tenant_trainer.policy, 0)
    carry_out(tenant_trainer, CreateModel(0, "stable", LoraShape(rank=2)))
    refused = tenant_trainer.answer(ForwardBackward(1, "stable", data, "stable_reinforce", {"kl_coeff": 0.1}))
    assert isinstance(refused, OrderFailed) and refused.fault == "user"
    assert 'loss_fn="importance_sampling"' in refused.message
    tenant_trainer.stand_in = True
    try:
        out = carry_out(tenant_trainer, ForwardBackward(2, "stable", data, "stable_reinforce", {"kl_coeff": 0.1}))
    finally:
        tenant_trainer.stand_in = False
    cispo = carry_out(tenant_trainer, ForwardBackward(3, "stable", data, "cispo", {}, forward_only=True))
    assert out.metrics["stable_reinforce_computed_as_cispo:max"] == 1
    assert out.metrics["loss:sum"] == pytest.approx(cispo.metrics["loss:sum"])


def test_a_request_that_fails_leaves_gradients_and_weights_as_they_were(tenant_trainer):
    data = some_data(tenant_trainer.policy, 0)
    carry_out(tenant_trainer, CreateModel(0, "hurt", LoraShape(rank=2)))
    carry_out(tenant_trainer, ForwardBackward(1, "hurt", data, "ppo", {}))
    model = tenant_trainer.models["hurt"]
    before = {key: (tensor.detach().clone(), tensor.grad.clone()) for key, tensor in model.trained.items()}
    huge = {**data[-1].inputs, "advantages": np.full_like(data[-1].inputs["advantages"], 3e38)}
    bad = (*data[:-1], Datum(data[-1].tokens, huge))
    failed = tenant_trainer.answer(ForwardBackward(2, "hurt", bad, "importance_sampling", {}))
    assert isinstance(failed, OrderFailed) and failed.fault == "user" and "not" in failed.message
    for key, (weights, gradient) in before.items():
        assert torch.equal(weights, model.trained[key]) and torch.equal(gradient, model.trained[key].grad)


def test_metrics_of_parts_join_to_those_of_the_whole(tenant_trainer):
    "The client cuts a large request into chunks and adds their metrics up."
    data = some_data(tenant_trainer.policy, 1)
    carry_out(tenant_trainer, CreateModel(0, "parts", LoraShape(rank=2)))
    whole, one, two = (
        carry_out(tenant_trainer, ForwardBackward(1, "parts", part, "ppo", {}, True))
        for part in (data, data[:5], data[5:])
    )
    for name, value in whole.metrics.items():
        joined = max if name.endswith(":max") else sum
        assert joined((one.metrics[name], two.metrics[name])) == pytest.approx(value, rel=1e-4), name
    assert all(name.rpartition(":")[2] in ("sum", "max") for name in whole.metrics)
    assert all(
        np.allclose(a, b, atol=1e-5) for a, b in zip(whole.logprobs, (*one.logprobs, *two.logprobs), strict=True)
    )
