"""Checkpoints of several families, from the Hub's format to a trained policy and back,
and what the output layer costs."""

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, SHAPE, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rlbench.models.model import (
    base_weights,
    encode_observation,
    encode_prompt,
    fp32_head,
    load_policy,
    save_policy,
    token_logprobs,
)
from rlbench.objective.objective import make_objective
from rlbench.records import Group, Rollout, Task, prompt_segment, response_segment
from rlbench.training.trainer import Trainer, TrainerConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def made_group(policy, size: int = 4) -> Group:
    "Random responses to one prompt, sampled with what the policy says of them; every second one is right."
    draws, task, prompt, members = np.random.default_rng(0), Task("t", "1+2=", ""), encode_prompt(policy, "1+2="), []
    for k in range(size):
        answer = draws.integers(3, 20, 10 + k)
        tokens = torch.as_tensor(np.concatenate([prompt, answer]))[None].long()
        with torch.no_grad():
            logprobs_RT, _ = token_logprobs(policy.model, tokens, torch.tensor([tokens.shape[1]]))
        segments = (
            prompt_segment(prompt),
            response_segment(answer, logprobs_RT[0, len(prompt) :].numpy(), np.zeros(len(answer))),
        )
        members.append(Rollout(k, 0, 0, k, task, segments, reward=float(k % 2)))
    return Group(0, task, tuple(members))


def own_logprobs(model, tokens_RT) -> torch.Tensor:
    "Log-probability of every token but the first, by the model's own forward pass."
    with torch.no_grad():
        logprobs_RTV = model(input_ids=tokens_RT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logprobs_RTV.gather(-1, tokens_RT[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_a_family_is_loaded_trained_and_saved(name, tmp_path):
    family, folder = FAMILIES[name], checkpoint(name, tmp_path / "hub")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (family.shard != "50GB")
    policy = load_policy(str(folder))
    assert next(policy.model.parameters()).dtype == torch.float32 and policy.stop_ids == (1,) and policy.context == 128
    text = policy.tokenizer.decode(encode_prompt(policy, "1+2=").tolist())
    assert text == ("x1+2=yz" if family.template else "1+2=")
    assert policy.tokenizer.decode(encode_observation(policy, "3+4=").tolist()) == (
        "x3+4=yz" if family.template else "3+4="
    )

    tokens_RT = torch.randint(3, 20, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours_RT, _ = token_logprobs(policy.model, tokens_RT, torch.tensor([24, 24, 24]), elements=240)
    assert torch.allclose(ours_RT[:, 1:], own_logprobs(policy.model, tokens_RT), atol=1e-4)

    before = {key: tensor.clone() for key, tensor in base_weights(policy.model).items()}
    trainer = Trainer(policy.model, TrainerConfig(learning_rate=1e-2), make_objective(), policy.pad_id)
    metrics = trainer.train([made_group(policy)], 1).metrics
    assert metrics.kl_sampler < 1e-6 and metrics.grad_norm > 0 and metrics.update_norm > 0
    still = [key for key, tensor in base_weights(policy.model).items() if torch.equal(tensor, before[key])]
    assert not still, still

    written = save_policy(policy, tmp_path / "policy")
    again = AutoModelForCausalLM.from_pretrained(written)
    assert torch.allclose(own_logprobs(again, tokens_RT), own_logprobs(policy.model, tokens_RT), atol=1e-5)
    assert AutoConfig.from_pretrained(written).architectures == AutoConfig.from_pretrained(folder).architectures
    assert load_policy(str(written)).stop_ids == policy.stop_ids


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_saved_mixture_of_experts_has_the_names_of_its_checkpoint(name, tmp_path):
    "Inside a model the experts are one tensor; other tools read them one by one."
    from safetensors import safe_open

    def names(folder):
        files = [safe_open(path, "pt") for path in folder.glob("*.safetensors")]
        return sorted(key for file in files for key in file.keys())  # noqa: SIM118 - a file is no dict

    folder = checkpoint(name, tmp_path / "hub")
    policy = load_policy(str(folder))
    assert any(".experts.3." in key for key in names(folder)) and not any(
        ".experts.3." in key for key in base_weights(policy.model)
    )
    assert names(save_policy(policy, tmp_path / "policy")) == names(folder)


class Widest(TorchDispatchMode):
    """Notes the most elements of any tensor over the vocabulary, forward and backward;
    the output layer's own weight, turned, is none."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.ndim
                and tensor.shape[-1] == SHAPE["vocab_size"]
                and tensor.shape[0] != SHAPE["hidden_size"]
            ):
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.parametrize("wide", [False, True])
def test_never_more_logits_than_asked_for_in_forward_and_backward(wide, tmp_path):
    policy = load_policy(str(checkpoint("llama", tmp_path / "hub")))
    model = fp32_head(policy.model) if wide else policy.model
    tokens_RT, lengths_R = (
        torch.randint(3, 20, (4, 50), generator=torch.Generator().manual_seed(1)),
        torch.tensor([50, 50, 20, 3]),
    )
    seen = []
    for elements in (7 * 48, 2**24):
        with Widest() as widest:
            logprobs_RT, entropy_RT = token_logprobs(model, tokens_RT, lengths_R, elements=elements)
            (logprobs_RT.sum() + entropy_RT.sum()).backward()
        seen.append(widest.most)
    assert seen[0] == 7 * 48 < seen[1], seen
