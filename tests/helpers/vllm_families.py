"Small random models of several families through vLLM, against transformers; prints one JSON line."

import json
from functools import partial

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from rlbench.engines.torch import settle_cpu
from rlbench.engines.vllm import VllmGenerator
from rlbench.generator import Request, drain
from rlbench.records import Sampling

SHAPE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
)
FAMILIES = {
    "llama": partial(LlamaConfig, tie_word_embeddings=True, attention_bias=True),  # heads of 16, without a norm
    "mistral": partial(MistralConfig, head_dim=32, sliding_window=16, tie_word_embeddings=False),
    "gemma2": partial(
        Gemma2Config, head_dim=16, sliding_window=16, attn_logit_softcapping=None
    ),  # heads that are spread, with a scale of their own
    "gemma3": partial(Gemma3TextConfig, head_dim=16, sliding_window=16),  # and with norms of 1 + w
    "qwen3_moe": partial(
        Qwen3MoeConfig, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
}


def model_of(family: str, seed: int):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**SHAPE)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms that do something
            weight.add_(0.3 * torch.rand_like(weight)) if "norm" in name else None
    return model


def worst(generator: VllmGenerator, model, serial: int) -> tuple[float, int]:
    "Largest distance between the log-probabilities that a generator reports and the model's; tokens compared."
    requests = {
        (i, serial): Request(
            (i, serial),
            [3, 4, 5 + i // 4, 6, 7 + i // 8],
            Sampling(max_tokens=60, temperature=1.3),
            stream=1000 + i,
            stop=(1,),
        )
        for i in range(16)
    }
    generator.submit(requests.values())
    distance, tokens = 0.0, 0
    for r in drain(generator):
        ids = torch.tensor([[*requests[r.key].prompt.tolist(), *r.segment.tokens.tolist()]])
        with torch.inference_mode():
            expected = (model(ids).logits[0, 4:-1] / 1.3).log_softmax(-1).gather(1, ids[0, 5:, None])[:, 0].numpy()
        distance, tokens = max(distance, float(np.abs(expected - r.segment.logprobs).max())), tokens + len(r.segment)
    return distance, tokens


settle_cpu()
found = {}
for family in FAMILIES:
    first, second = model_of(family, 0), model_of(family, 1)
    generator = VllmGenerator(first, max_length=96, slots=8)
    before, tokens = worst(generator, first, 0)
    generator.load(1, second.state_dict())
    found[family] = {"logprob_max_diff": before, "tokens": tokens, "after_swap": worst(generator, second, 1)[0]}
    generator.close()
print(json.dumps(found))
