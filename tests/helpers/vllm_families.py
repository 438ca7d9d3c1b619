"Small random models of several families through vLLM, against transformers; prints one JSON line."

import json
import sys
from collections import deque
from dataclasses import dataclass
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

from rlbench.base.hidden_package import ADDRESS_GRAMMAR
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
    results = drain(generator)
    return distance_of(results, requests, {generator.version: model}), sum(len(r.segment) for r in results)


def distance_of(results, requests, models) -> float:
    "Largest distance of the log-probabilities in results from those of the models, by version."
    distance = 0.0
    for r in results:
        sampling, start = requests[r.key].sampling, len(requests[r.key].prompt)
        ids = torch.tensor([[*requests[r.key].prompt.tolist(), *r.segment.tokens.tolist()]])
        for version in set(r.segment.versions.tolist()):
            with torch.inference_mode():
                p_TV = (models[version](ids).logits[0, start - 1 : -1].double() / sampling.temperature).softmax(-1)
            sorted_TV, order_TV = p_TV.sort(-1, descending=True)
            is_left = sorted_TV.cumsum(-1) - sorted_TV < sampling.top_p
            p_TV = torch.zeros_like(p_TV).scatter_(1, order_TV, sorted_TV * is_left)
            expected_T = (p_TV / p_TV.sum(-1, keepdim=True)).gather(1, ids[0, start:, None])[:, 0].log().numpy()
            apart_T = np.abs(expected_T - r.segment.logprobs)[r.segment.versions == version]
            distance = max(distance, float(apart_T.max()))
    return distance


def surprise_of(results, requests, model) -> float:
    """How much likelier or less likely sampled tokens are than tokens drawn from the model would be on average, in
    standard errors."""
    excess = []
    for r in results:
        start = len(requests[r.key].prompt)
        ids = torch.tensor([[*requests[r.key].prompt.tolist(), *r.segment.tokens.tolist()]])
        with torch.inference_mode():
            logp_TV = (
                model(ids).logits[0, start - 1 : -1].double() / requests[r.key].sampling.temperature
            ).log_softmax(-1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        excess += (logp_TV.gather(1, ids[0, start:, None])[:, 0] + entropy_T).tolist()
    return float(np.mean(excess) / (np.std(excess) / len(excess) ** 0.5))


def some_requests(serial: int, **sampling) -> dict:
    "Requests by key. `serial`: of their attempts."
    found = [
        Request((i, serial), [3, 4, 5, 6, 7 + i], Sampling(max_tokens=50, **sampling), stream=2000 + i, stop=(1,))
        for i in range(8)
    ]
    return {request.key: request for request in found}


def let_schedule_ahead(core) -> None:
    "Have an engine start a second batch before the first one's tokens are there, as it does on a GPU."
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue


def sample_with_vllm(first, second) -> dict:
    "What vLLM's own sampler does under draw = engine."
    generator = VllmGenerator(first, max_length=96, slots=8, draw="engine")
    told = {}
    requests = some_requests(0, temperature=1.3, top_p=0.8)
    generator.submit(requests.values())
    once = drain(generator)
    told["truncated"] = distance_of(once, requests, {0: first})
    generator.submit(some_requests(1, temperature=1.3, top_p=0.8).values())
    texts = [{r.key[0]: r.segment.tokens.tolist() for r in results} for results in (once, drain(generator))]
    told["repeats"] = texts[0] == texts[1]
    told["streams differ"] = len({tuple(text) for text in texts[0].values()}) == len(texts[0])
    generator.submit(some_requests(2, temperature=0.0).values())
    greedy = drain(generator)
    told["greedy"] = max(float(np.abs(r.segment.logprobs).max()) for r in greedy)
    let_schedule_ahead(generator.core.engine.engine_core.engine_core)
    requests = some_requests(3, temperature=0.9)
    halves = list(requests.values())[:4], list(requests.values())[4:]
    generator.submit(halves[0])
    results = generator.step(6)
    generator.submit(halves[1])
    results += generator.step(5)
    told["ahead"] = generator.core.has_started_steps
    generator.load(1, second.state_dict(), cache="rebuild")
    results += drain(generator)
    told["swapped"] = distance_of(results, requests, {0: first, 1: second})
    told["all came"] = len(results) == len(requests)
    told["both versions"] = sum(len({*r.segment.versions.tolist()}) == 2 for r in results)
    generator.close()
    return told


def serve_quantized(first, second) -> dict:
    "Log-probabilities of one set of weights, swapped into a quantized engine and served by it from its start."
    settings = {"max_length": 96, "slots": 8, "dtype": torch.bfloat16}
    settings["options"] = {"quantization": "int8_per_channel_weight_only"}

    def answers(generator, serial: int) -> dict:
        generator.submit(some_requests(serial).values())
        return {r.key[0]: r.segment for r in drain(generator)}

    generator = VllmGenerator(first, **settings)
    before = answers(generator, 0)
    generator.load(1, second.state_dict())
    swapped = answers(generator, 1)
    generator.close()
    generator = VllmGenerator(second, **settings)
    fresh = answers(generator, 0)
    generator.close()

    def is_same(one, other) -> bool:
        return all(
            np.array_equal(one[i].tokens, s.tokens) and np.array_equal(one[i].logprobs, s.logprobs)
            for i, s in other.items()
        )

    exact = distance_of([Answer((i, 0), s) for i, s in fresh.items()], some_requests(0), {0: second})
    return {"swapped as fresh": is_same(swapped, fresh), "as before": is_same(swapped, before), "rounding": exact}


@dataclass
class Answer:
    "A key with its segment, as in a result."

    key: tuple[int, int]
    segment: object


def sample_with_drafts(first, second) -> dict:
    "vLLM's own sampler, checking drafts that repeat what was written."
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    generator = VllmGenerator(first, max_length=96, slots=8, draw="engine", options={"speculative_config": drafts})
    requests = some_requests(0, temperature=1.3)
    generator.submit(requests.values())
    results = []
    several = 0
    while not generator.idle:
        before = generator.decoded
        running = len(generator.handed) or len(requests)
        results += generator.step()
        several += generator.decoded - before > running
        if generator.version == 0 and generator.decoded > 100:
            generator.load(1, second.state_dict(), cache="rebuild")
    apart = distance_of(results, requests, {0: first, 1: second})
    requests = some_requests(1, temperature=0.8)
    generator.submit(requests.values())
    surprise = surprise_of(drain(generator), requests, second)
    generator.close()
    return {"logprob_max_diff": apart, "steps of several tokens": several, "surprise": surprise}


settle_cpu()
found = {}
for family in FAMILIES:
    first, second = model_of(family, 0), model_of(family, 1)
    generator = VllmGenerator(first, max_length=96, slots=8)
    before, tokens = worst(generator, first, 0)
    generator.load(1, second.state_dict())
    found[family] = {"logprob_max_diff": before, "tokens": tokens, "after_swap": worst(generator, second, 1)[0]}
    generator.close()
    if family == "llama":
        drawn_by_vllm = sample_with_vllm(first, second)
quantized = serve_quantized(model_of("llama", 0), model_of("llama", 1))
with_drafts = sample_with_drafts(model_of("llama", 0), model_of("llama", 1))  # last: vLLM starts no engine after numba
told = {"families": found, "drawn by vllm": drawn_by_vllm, "with drafts": with_drafts, "quantized": quantized}
print(json.dumps(told | {"imported the grammar": ADDRESS_GRAMMAR in sys.modules}))
