"""A small model, and groups with the log-probabilities it gives."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlbench.models.model import token_logprobs
from rlbench.records import Group, Rollout, Task, prompt_segment, response_segment

VOCAB = 24


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=64,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def made_groups(
    count: int = 6, size: int = 6, temperature: float = 1.0, noise: float = 0.0, seed: int = 0
) -> list[Group]:
    """Random responses with the log-probabilities of `small_model(0)`, disturbed by normal noise;
    every third one is right."""
    random, model, groups = np.random.default_rng(seed), small_model(), []
    for g in range(count):
        task, members = Task(f"t{g}", "", ""), []
        for k in range(size):
            length = 4 + int(np.clip(random.lognormal(2.5, 0.8), 1, 100))
            tokens = random.integers(1, VOCAB, length)
            with torch.no_grad():
                logprobs_RT, _ = token_logprobs(
                    model, torch.as_tensor(tokens[None]), torch.tensor([length]), torch.tensor([temperature])
                )
            sampled = logprobs_RT[0, 4:].numpy() + noise * random.normal(size=length - 4)
            segments = (
                prompt_segment(tokens[:4]),
                response_segment(tokens[4:], np.minimum(sampled, 0), np.zeros(length - 4)),
            )
            members.append(
                Rollout(g * size + k, 0, g, k, task, segments, reward=float((g + k) % 3 == 0), temperature=temperature)
            )
        groups.append(Group(g, task, tuple(members)))
    return groups


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
