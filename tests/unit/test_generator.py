"""Generators at length: independence over 200 rollouts, the protocol for several model shapes,
rebuilds against a fresh forward pass."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rlbench.engines.conformance import Subject, failed_checks
from rlbench.engines.decoder import fuse_weights, load_weights
from rlbench.engines.torch import TorchGenerator
from rlbench.generator import ReplayGenerator, Request, ScriptedGenerator, drain, record_results
from rlbench.models.hardware import kv_bytes_per_token
from rlbench.records import Sampling, stream_key

SMALL = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3 wide heads": lambda: Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama 3 rope": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama one head each": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "mistral": lambda: MistralConfig(**SMALL, head_dim=16, sliding_window=None),
}


def build(shape: str = "qwen3", seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]()).float().eval()
    with torch.no_grad():  # norms and biases start at one and zero, which would hide a mistake in them
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.2 * torch.randn_like(p))
    return model


def requests(n: int, limit: int = 24, group: int = 4, **sampling) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 32, rng.integers(1, 12)) for _ in range(n)]
    return [
        Request(
            (i, 0),
            prompts[i // group],
            Sampling(max_tokens=limit, **sampling),
            stream_key(0, f"t{i // group}", i),
            stop=(1, 2),
        )
        for i in range(n)
    ]


def logprobs(model, request: Request, tokens: np.ndarray) -> np.ndarray:
    "Log-probabilities of a response by a fresh forward pass at temperature 1."
    ids = torch.tensor([request.prompt.tolist() + tokens.tolist()])
    n = len(request.prompt)
    with torch.inference_mode():
        return model(ids).logits[0, n - 1 : -1].double().log_softmax(-1).gather(1, ids[0, n:, None])[:, 0].numpy()


def by_key(results):
    return {r.key: r for r in results}


@pytest.mark.parametrize("shape", SHAPES)
def test_same_distribution_as_the_model(shape):
    model = build(shape)
    generator = TorchGenerator(model, max_length=64, slots=8)
    asked = requests(24)
    generator.submit(asked)
    results = by_key(drain(generator))
    for request in asked:
        segment = results[request.key].segment
        assert np.abs(logprobs(model, request, segment.tokens) - segment.logprobs).max() < 1e-4


@pytest.mark.parametrize("shape", ["qwen3", "qwen2", "llama", "mistral"])
def test_conformance_torch(shape):
    model, other = build(shape), build(shape, seed=1)
    subject = Subject(
        lambda slots: TorchGenerator(model, max_length=64, slots=slots),
        tuple(requests(12)),
        lambda version: other.state_dict(),
    )
    assert failed_checks(subject) == []


@pytest.mark.slow
def test_conformance_with_every_sampling():
    model, other = build(), build(seed=1)
    for sampling in (dict(temperature=0.7), dict(top_p=0.8), dict(top_k=5), dict(temperature=1.3, top_p=0.9, top_k=20)):
        subject = Subject(
            lambda slots: TorchGenerator(model, max_length=64, slots=slots),
            tuple(requests(12, **sampling)),
            lambda version: other.state_dict(),
        )
        assert failed_checks(subject) == [], sampling


def test_conformance_scripted_and_replayed(tmp_path):
    asked = tuple(requests(12))
    scripts = Subject(lambda slots: ScriptedGenerator(mean=14, slots=slots), asked)
    assert failed_checks(scripts) == []
    model = build()
    live = TorchGenerator(model, max_length=64, slots=4)
    live.submit(asked)
    record_results(tmp_path / "recorded.jsonl", asked, drain(live))
    assert failed_checks(Subject(lambda slots: ReplayGenerator(tmp_path / "recorded.jsonl", slots=slots), asked)) == []


@pytest.mark.slow
def test_two_hundred_rollouts_alone_and_among_63_others():
    model = build()
    asked = requests(200, limit=48, group=8)
    together = TorchGenerator(model, max_length=64, slots=64)
    together.submit(asked)
    crowd = by_key(drain(together))
    alone = TorchGenerator(model, max_length=64, slots=1)
    worst = 0.0
    for request in asked:
        alone.submit([request])
        (single,) = drain(alone)
        assert single.segment.tokens.tolist() == crowd[request.key].segment.tokens.tolist(), request.key
        worst = max(worst, float(np.abs(single.segment.logprobs - crowd[request.key].segment.logprobs).max()))
    assert worst < 1e-5
    assert sum(r.decode_tokens for r in crowd.values()) == together.stats().decode_tokens > 2000


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
def test_rebuild_is_exact_and_keep_is_labelled(shape):
    model, other = build(shape), build(shape, seed=1)
    asked = [Request(r.key, r.prompt, r.sampling, r.stream) for r in requests(40, limit=30)]
    for cache in ("keep", "rebuild"):
        generator = TorchGenerator(model, max_length=64, slots=16)
        generator.submit(asked)
        results = generator.step(11)
        old = TorchGenerator(model, max_length=64, slots=16)
        old.submit(asked)
        before = by_key(drain(old))
        generator.load(3, other.state_dict(), cache=cache)
        results = by_key(results + drain(generator))
        errors = []
        for request in asked:
            segment = results[request.key].segment
            first = int((segment.versions == 0).sum())
            np.testing.assert_array_equal(segment.logprobs[:first], before[request.key].segment.logprobs[:first])
            errors.append(
                float(np.abs(logprobs(other, request, segment.tokens) - segment.logprobs)[first:].max(initial=0))
            )
            if 0 < first < len(segment):
                assert segment.cache == cache
        assert (max(errors) < 1e-4) == (cache == "rebuild")


@pytest.mark.slow
def test_many_slots_with_a_long_tail_stay_in_order():
    model = build()
    rng = np.random.default_rng(0)
    asked = [
        Request((i, 0), [3 + i % 20, 4, 5], Sampling(max_tokens=int(n)), i)
        for i, n in enumerate(rng.lognormal(3, 1, 400).clip(1, 240))
    ]
    wide, narrow = (TorchGenerator(model, max_length=256, slots=s) for s in (128, 8))
    wide.submit(asked)
    narrow.submit(asked)
    a, b = by_key(drain(wide)), by_key(drain(narrow))
    assert all(
        a[r.key].segment.tokens.tolist() == b[r.key].segment.tokens.tolist()
        and len(a[r.key].segment) == r.sampling.max_tokens
        for r in asked
    )


def test_a_shared_budget_preempts_and_changes_no_token():
    model, other = build(), build(seed=1)
    asked = [Request(r.key, r.prompt, r.sampling, r.stream) for r in requests(48, limit=40)]
    roomy = TorchGenerator(model, max_length=64, slots=16)
    per_token = kv_bytes_per_token(roomy.weights.shape, 4)
    tight = TorchGenerator(model, max_length=64, slots=16, kv_bytes=200 * per_token)
    roomy.submit(asked)
    tight.submit(asked)
    results, most = [], 0
    while not tight.idle:
        results += tight.step()
        most = max(most, tight.stats().running)
        assert tight.stats().kv_used <= 1
    want = by_key(drain(roomy))
    assert tight.preempted > 0 and most > 200 // 50
    assert all(r.segment.tokens.tolist() == want[r.key].segment.tokens.tolist() for r in results)
    assert (
        sum(r.decode_tokens for r in results) == tight.decoded
        and sum(r.prefill_tokens for r in results) == tight.prefilled
    )
    tight.submit(asked[:20])
    tight.step(25)
    tight.load(1, other.state_dict())
    late = drain(tight)
    assert all((np.diff(r.segment.versions) >= 0).all() for r in late)


@pytest.mark.slow
def test_random_traffic_keeps_the_books():
    """Submits, aborts, resumes, loads and concurrency changes at random:
    every request answered once per attempt, all tokens counted."""
    model, other = build(), build(seed=1)
    weights = [model.state_dict(), {n: t.clone() for n, t in other.state_dict().items()}]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        generator = TorchGenerator(model, max_length=64, slots=12, kv_bytes=None if seed % 2 else 300 * 768)
        pending = {r.key: r for r in requests(150)}
        queue, answered, counted = list(pending.values()), set(), 0
        while queue or not generator.idle:
            if queue and rng.random() < 0.5:
                batch, queue = queue[:5], queue[5:]
                generator.submit(batch)
            results = generator.step(int(rng.integers(1, 4)))
            if rng.random() < 0.1:
                generator.load(
                    generator.version + 1,
                    weights[generator.version % 2],
                    cache=("keep", "rebuild")[int(rng.integers(2))],
                )
            if rng.random() < 0.1:
                generator.concurrency = int(rng.integers(1, 13))
            if rng.random() < 0.15:
                keys = [k for k in pending if k not in answered]
                aborted = generator.abort([keys[i] for i in rng.permutation(len(keys))[:6]])
                results += aborted
                for r in aborted:
                    again = Request(
                        (r.key[0], r.key[1] + 1),
                        pending[r.key].prompt,
                        pending[r.key].sampling,
                        pending[r.key].stream,
                        (1, 2),
                        r.segment if len(r.segment) else None,
                    )
                    pending[again.key] = again
                    queue.append(again)
            for r in results:
                assert r.key not in answered
                answered.add(r.key)
                counted += r.decode_tokens
                assert (np.diff(r.segment.versions) >= 0).all() and len(r.segment) <= 24
        assert answered == set(pending) and counted == generator.decoded
        assert generator.stats().running == generator.stats().waiting == 0


def test_loading_takes_names_with_and_without_a_tied_head():
    model = build("qwen3")
    fused = fuse_weights(model, 32)
    names = model.state_dict()
    load_weights(fused, names)
    load_weights(fused, {n: t for n, t in names.items() if n != "lm_head.weight"})
    untied = fuse_weights(build("llama"), 32)
    with pytest.raises(ValueError, match="1 missing, first lm_head.weight"):
        load_weights(untied, {n: t for n, t in build("llama").state_dict().items() if n != "lm_head.weight"})


def test_half_precision_runs():
    generator = TorchGenerator(build(), max_length=64, slots=8, dtype=torch.bfloat16)
    generator.submit(requests(12))
    assert len(drain(generator)) == 12


def test_truncated_log_probabilities_are_those_sampled_from():
    model = build()
    asked = requests(30, temperature=0.8, top_k=6, top_p=0.9)
    generator = TorchGenerator(model, max_length=64, slots=8)
    generator.submit(asked)
    results = by_key(drain(generator))
    for request in asked:
        tokens, n = results[request.key].segment.tokens, len(request.prompt)
        ids = torch.tensor([request.prompt.tolist() + tokens.tolist()])
        with torch.inference_mode():
            p = (model(ids).logits[0, n - 1 : -1].double() / 0.8).softmax(-1).numpy()
        for row, token, logprob in zip(p, tokens, results[request.key].segment.logprobs):
            order = np.argsort(-row, kind="stable")[:6]
            top = row[order] / row[order].sum()
            kept = order[: int(np.searchsorted(np.cumsum(top), 0.9 - 1e-9)) + 1]
            assert token in kept
            assert abs(np.log(row[token] / row[kept].sum()) - logprob) < 1e-4
