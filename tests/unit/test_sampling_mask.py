"""Sampling masks: the tokens that top_p and top_k left travel with the token drawn,
and training divides by the same set."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlbench.engines.drawing import draw_tokens
from rlbench.engines.openai_client import cut_response
from rlbench.engines.torch import TorchGenerator
from rlbench.engines.vllm_draw import Drawing, draw_rows, moved_rows
from rlbench.environments.rollout_turns import segments_of, token_columns
from rlbench.generator import Request, drain
from rlbench.loop.config import supplies_sampling_masks
from rlbench.loop.config_files import load_config
from rlbench.loop.packing import PackedArrays, pack_record, unpack_record
from rlbench.models.model import flat_logprobs, head_logits, kept_tokens, token_logprobs
from rlbench.objective.objective import Objective
from rlbench.records import (
    MOST_KEPT,
    Group,
    Rollout,
    Sampling,
    SamplingMask,
    Segment,
    Task,
    join_masks,
    prompt_segment,
    uniform_numbers,
)
from rlbench.training.batch import demonstration_row, join_arrays, lay_out_rows, make_row, prepare_batch
from rlbench.training.logprobs import packed_logprobs, shared_logprobs
from rlbench.training.scoring_models import trace_rollouts
from rlbench.training.trainer import Trainer, TrainerConfig

VOCABULARY, PROMPT = 64, [3, 4, 5, 6]
SAMPLINGS = {
    "top_p 0.9": dict(top_p=0.9),
    "top_p 0.5": dict(top_p=0.5),
    "top_k 5": dict(top_k=5),
    "both, warm": dict(top_p=0.8, top_k=12, temperature=1.4),
    "both, cold": dict(top_p=0.9, top_k=20, temperature=0.7),
}


def small(seed: int = 0):
    "A random model that hesitates: its logits have a standard deviation of about one."
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=False, initializer_range=0.2, **shape)
    ).eval()


def responses(model, sampling: dict, count: int = 12, tokens: int = 16) -> list[Segment]:
    "What the torch generator writes."
    generator = TorchGenerator(model, max_length=32, slots=5)
    generator.submit(
        Request((i, 0), PROMPT, Sampling(max_tokens=tokens, **sampling), stream=100 + i) for i in range(count)
    )
    return [r.segment for r in sorted(drain(generator), key=lambda r: r.key)]


def rollouts(segments: list[Segment], temperature: float = 1.0) -> list[Rollout]:
    "Rollouts of two groups, half of them right."
    half = len(segments) // 2
    return [
        Rollout(
            i,
            0,
            i // half,
            i % half,
            Task(f"t{i // half}", "", ""),
            (prompt_segment(PROMPT), s),
            correct=i % 2 == 0,
            reward=float(i % 2 == 0),
            temperature=temperature,
        )
        for i, s in enumerate(segments)
    ]


def laid_out(segments: list[Segment]):
    "(tokens [R, T], lengths [R], log-probabilities of the sampler [R, T], masks)."
    lengths, width = [len(PROMPT) + len(s) for s in segments], len(PROMPT) + max(map(len, segments))
    tokens_RT, sampler_RT = np.zeros((len(segments), width), np.int64), np.zeros((len(segments), width), np.float32)
    for row, s in enumerate(segments):
        tokens_RT[row, : lengths[row]], sampler_RT[row, len(PROMPT) : lengths[row]] = [*PROMPT, *s.tokens], s.logprobs
    masks = [join_masks([None, s.sampling_mask], [len(PROMPT), len(s)]) for s in segments]
    return torch.as_tensor(tokens_RT), torch.tensor(lengths), torch.as_tensor(sampler_RT), masks


def test_sampler_and_trainer_agree_over_the_tokens_that_were_kept():
    "Whichever way the passes go and however the head is cut; without the masks they are far apart."
    model, apart = small(), {}
    for name, sampling in SAMPLINGS.items():
        segments = responses(model, sampling)
        tokens_RT, lengths_R, sampler_RT, masks = laid_out(segments)
        temperature_R, prefix_R = (
            torch.full((len(segments),), sampling.get("temperature", 1.0)),
            torch.full((len(segments),), len(PROMPT)),
        )
        kept, said_RT = kept_tokens(masks, tokens_RT.shape[1]), sampler_RT != 0
        ways = {
            "padded": lambda kept: token_logprobs(model, tokens_RT, lengths_R, temperature_R, kept=kept),  # noqa: B023
            "cut": lambda kept: token_logprobs(
                model, tokens_RT, lengths_R, temperature_R, elements=7 * VOCABULARY, kept=kept
            ),  # noqa: B023
            "shared": lambda kept: shared_logprobs(model, tokens_RT, lengths_R, temperature_R, prefix_R, kept),  # noqa: B023
            "packed": lambda kept: packed_logprobs(model, tokens_RT, lengths_R, temperature_R, prefix_R, kept),  # noqa: B023
        }
        for way, logprobs in ways.items():
            with torch.no_grad():
                mine_RT, entropy_RT = logprobs(kept)
                whole_RT, _ = logprobs(None)
            assert float((mine_RT - sampler_RT)[said_RT].abs().max()) < 2e-5, (name, way)
            assert torch.isfinite(entropy_RT).all() and (entropy_RT >= -1e-6).all()
            apart[name, way] = float((whole_RT - sampler_RT)[said_RT].abs().mean())
    assert all(
        0.05 < apart["top_p 0.9", way] < 0.2 and apart["top_p 0.5", way] > 0.4 and apart["top_k 5", way] > 0.4
        for way in ways
    )


def test_gradients_are_those_of_the_distribution_over_the_kept_tokens():
    """Of log-probability and entropy, against a reference that takes the kept logits out one token at a time;
    tokens without a mask among them."""
    model, segments = small(), responses(small(), dict(top_p=0.7), count=4)
    segments[1] = replace(segments[1], sampling_mask=None)
    tokens_RT, lengths_R, _, masks = laid_out(segments)
    hidden_NH = torch.randn(int((lengths_R - len(PROMPT)).sum()), 32)
    rows_N, columns_N = zip(*((r, c) for r, n in enumerate(lengths_R.tolist()) for c in range(len(PROMPT), n)))
    order = np.random.default_rng(0).permutation(len(rows_N))  # places in any order find their masks
    rows_N, columns_N = torch.tensor(rows_N)[order], torch.tensor(columns_N)[order]
    weight_N, turn_N, temperature = torch.randn(len(order)), torch.randn(len(order)), 0.8

    def slopes(logprobs_N, entropy_N, leaf_NH):
        return torch.autograd.grad((weight_N * logprobs_N + turn_N * entropy_N).sum(), [leaf_NH, model.lm_head.weight])

    leaf_NH = hidden_NH.clone().requires_grad_()
    mine = flat_logprobs(
        model,
        leaf_NH,
        tokens_RT,
        rows_N,
        columns_N,
        torch.full((4,), temperature),
        5 * VOCABULARY,
        kept_tokens(masks, tokens_RT.shape[1]),
    )
    ours = slopes(mine[0][rows_N, columns_N], mine[1][rows_N, columns_N], leaf_NH)
    leaf_NH = hidden_NH.clone().requires_grad_()
    logits_NV, logprobs, entropies = head_logits(model, leaf_NH) / temperature, [], []
    for i, (row, column) in enumerate(zip(rows_N.tolist(), columns_N.tolist())):
        ids = torch.arange(VOCABULARY) if masks[row] is None else torch.as_tensor(masks[row].sets[column]).long()
        inside = logits_NV[i, ids].log_softmax(-1)
        logprobs.append(inside[(ids == tokens_RT[row, column]).nonzero()[0, 0]])
        entropies.append(-(inside.exp() * inside).sum())
    theirs = slopes(torch.stack(logprobs), torch.stack(entropies), leaf_NH)
    for one, other in zip(ours, theirs):
        assert torch.isfinite(one).all() and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_batch_is_trained_over_its_masks():
    """At the batch's start sampler and trainer agree, also in a share of the rows and after demonstrations joined;
    a reference equal to the policy is at no distance."""
    model = small()
    for temperature, sampling in ((1.0, dict(top_p=0.8)), (1.3, dict(top_k=4, temperature=1.3))):
        made = rollouts(responses(model, sampling), temperature)
        traces = trace_rollouts(model, made)
        made = [replace(r, traces=(("reference", t),)) for r, t in zip(made, traces)]
        groups = [Group(g, made[0].task, tuple(r for r in made if r.group == g)) for g in (0, 1)]
        trainer = Trainer(small(), TrainerConfig(learning_rate=1e-3, optimizer_steps=2, micro_tokens=60), Objective())
        metrics = trainer.train(groups, 1).metrics
        assert metrics.logprob_diff_max < 2e-5 and metrics.ess > 0.99999 and metrics.grad_norm > 0
        arrays = prepare_batch(groups, Objective())
        assert np.abs(arrays.sampler_RT - arrays.reference_RT)[arrays.mask_RT].max() < 2e-5
        both = pickle.loads(pickle.dumps(join_arrays(arrays, lay_out_rows([demonstration_row(0, PROMPT, [7, 8])]))))
        row = int((both.rollouts_R == -1).nonzero()[0][0])
        assert both.masks_R[row] is None and sum(m is not None for m in both.masks_R) == len(arrays)
    assert (
        prepare_batch(
            [
                Group(
                    0,
                    made[0].task,
                    tuple(
                        replace(r, segments=(r.segments[0], replace(r.segments[1], sampling_mask=None)))
                        for r in made[:4]
                    ),
                )
            ],
            Objective(),
        ).masks_R
        is None
    )


def test_a_partial_goes_on_with_its_mask():
    """Stopped, saved as in a checkpoint and taken up again by another generator,
    a response has the tokens and the masks of one that was never stopped."""
    model, sampling = small(), Sampling(1.0, 0.8, 0, 16)
    whole = dict(enumerate(responses(model, dict(top_p=0.8), 6)))
    first, second = (TorchGenerator(model, max_length=32, slots=4) for _ in range(2))
    first.submit(Request((i, 0), PROMPT, sampling, stream=100 + i) for i in range(6))
    first.step(5)
    arrays = PackedArrays()
    stopped = {
        r.key[0]: json.loads(json.dumps(pack_record(r.segment, arrays)))
        for r in first.abort([(i, 0) for i in range(6)])
        if len(r.segment)
    }
    assert len(stopped) == 4
    back = {i: unpack_record(Segment, told, arrays.joined()) for i, told in stopped.items()}
    second.submit(Request((i, 1), PROMPT, sampling, stream=100 + i, partial=s) for i, s in back.items())
    for r in drain(second):
        found, wanted = r.segment, whole[r.key[0]]
        assert found.tokens.tolist() == wanted.tokens.tolist() and len(found.sampling_mask) == len(found)
        assert [set(s) for s in found.sampling_mask.sets] == [set(s) for s in wanted.sampling_mask.sets]
    (plain,) = responses(model, {}, 1, 4)  # drawn from the whole vocabulary, then under top_k
    second.submit([Request((9, 0), PROMPT, Sampling(1.0, 1.0, 3, 8), stream=100, partial=plain)])
    assert plain.sampling_mask is None and drain(second)[0].segment.sampling_mask.counts.tolist() == [
        0,
        0,
        0,
        0,
        3,
        3,
        3,
        3,
    ]


def test_what_is_kept_is_bounded():
    """A flat distribution keeps as many tokens as may travel, is drawn from those alone,
    and a top_k beyond them is refused."""
    logits_RV, ones = torch.randn(3, 4000) * 1e-3, np.ones(3)
    token, logprob, kept = draw_tokens(
        logits_RV, uniform_numbers(np.arange(3, dtype=np.uint64), np.zeros(3, int)), ones, ones * 0.95, np.zeros(3, int)
    )
    for row, ids in enumerate(kept):
        assert len(ids) == MOST_KEPT and token[row] in ids
        assert set(ids) == set(logits_RV[row].topk(MOST_KEPT).indices.tolist())
        at = ids.tolist().index(token[row])
        assert abs(float(logits_RV[row].double()[ids].log_softmax(0)[at]) - logprob[row]) < 1e-9
    with pytest.raises(ValueError, match="top_k: 513 keeps more tokens than travel"):
        Request((0, 0), PROMPT, Sampling(top_k=513), 1)
    with pytest.raises(ValueError, match="top_k"):
        load_config("tiny", {"top_k": 513})
    assert [
        supplies_sampling_masks(load_config({"generator": name, **more}))
        for name, more in (("torch", {}), ("vllm", {}), ("scripted", {"clock": "virtual"}))
    ] == [True, True, False]


def test_a_mask_without_its_token_is_the_generators_fault():
    "It is said before anything is trained."
    (good,) = rollouts(responses(small(), dict(top_k=4), 2))[:1]
    mask = good.segments[1].sampling_mask
    wrong = replace(good.segments[1], sampling_mask=SamplingMask(mask.counts, (mask.ids + 1) % VOCABULARY))
    assert make_row(good, 1.0, 0.0).sampling_mask.counts.tolist()[: len(PROMPT)] == [0] * len(PROMPT)
    with pytest.raises(ValueError, match="rollout 0: a token is not in its sampling mask"):
        make_row(replace(good, segments=(good.segments[0], wrong)), 1.0, 0.0)


def test_tables_and_answers_keep_the_mask():
    "A row of the tokens table gives it back, turn by turn; a response cut at a stop text keeps the part that is left."
    first, second = responses(small(), dict(top_p=0.8), 2)
    (one,) = rollouts([first, second])[:1]
    read = segments_of(
        PROMPT,
        *(
            token_columns(one).get(name)
            for name in (
                "tokens",
                "logprobs",
                "versions",
                "mask",
                "turn",
                "observed",
                "observed_turn",
                "kept_counts",
                "kept_ids",
            )
        ),
    )
    assert (
        read[1].sampling_mask.counts.tolist() == first.sampling_mask.counts.tolist()
        and read[1].sampling_mask.ids.tolist() == first.sampling_mask.ids.tolist()
    )
    plain = replace(second, turn=1, sampling_mask=None)
    columns = token_columns(replace(one, segments=(*one.segments, plain)))
    assert columns["kept_counts"].tolist() == [*first.sampling_mask.counts, *[0] * len(plain)]
    again = segments_of(
        PROMPT,
        *(
            columns.get(name)
            for name in (
                "tokens",
                "logprobs",
                "versions",
                "mask",
                "turn",
                "observed",
                "observed_turn",
                "kept_counts",
                "kept_ids",
            )
        ),
    )
    assert again[1].sampling_mask is not None and again[2].sampling_mask is None
    short, _, _ = cut_response(first, lambda ids: " ".join(map(str, ids)), (str(first.tokens[2]),))
    assert (
        len(short.sampling_mask) == len(short) == 3
        and short.sampling_mask.ids.tolist() == first.sampling_mask[:3].ids.tolist()
    )


def test_the_draw_for_vllm_hands_its_masks_on():
    """Rows for vLLM: the drawn token's log-probability is that over the tokens kept, whose ids come with it;
    a request's name travels with its row."""
    torch.manual_seed(1)
    logits_RV = torch.randn(3, 200)
    asked = [(5, 2, 1.0, 0.9, 0, "a"), (6, 0, 0.7, 0.8, 9, "b"), (7, 0, 1.0, 1.0, 0, "c")]

    class Update:
        removed, moved = (), ()
        added = [
            (row, type("Params", (), {"extra_args": {"rlbench": each}})(), None, []) for row, each in enumerate(asked)
        ]

    rows = moved_rows({}, Update)
    assert [(d.name, d.position) for d in rows.values()] == [("a", 2), ("b", 0), ("c", 0)]
    said = logits_RV.clone()
    drawn = draw_rows(said, [rows[row] for row in range(3)])
    kept = drawn.read_kept()
    for row, (_, _, temperature, _, top_k, _) in enumerate(asked):
        token = int(said[row].argmax())
        assert token == drawn.token_R[row]
        ids = kept[row] if len(kept[row]) else np.arange(200)
        inside = (logits_RV[row, ids] / temperature).log_softmax(-1)
        assert abs(float(inside[ids.tolist().index(token)] - drawn.logprob_R[row])) < 1e-5
    assert len(kept[0]) < 200 and 0 < len(kept[1]) <= 9 and not len(kept[2])
    greedy = draw_rows(logits_RV.clone(), [Drawing(1, 0, 0.0, 0.5, 0, [])] * 3)
    assert greedy.read_kept() is None and greedy.token_R.tolist() == logits_RV.argmax(-1).tolist()
    alone = draw_rows(logits_RV[:1].clone(), [rows[0]])
    assert alone.token_R[0] == drawn.token_R[0] and alone.logprob_R[0] == drawn.logprob_R[0]
