"""The trainer: what must not change an update, what must, and that it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trainers import flat, made_groups, small_model

from rlbench.engines.torch import TorchGenerator
from rlbench.generator import Request
from rlbench.models import layer_parts, products
from rlbench.models.hardware import mkl_lacks_avx512
from rlbench.models.model import token_logprobs
from rlbench.objective.objective import make_objective
from rlbench.records import Group, Outcome, Rollout, Sampling, Task, prompt_segment, response_segment
from rlbench.training.trainer import Trainer, TrainerConfig, padding_share, prepare_batch, split_rows
from rlbench.training.weight_transport import hand_over

pytestmark = pytest.mark.usefixtures("one_thread")


def train(groups, batches: int = 1, goal=make_objective(), **settings_):
    trainer = Trainer(small_model(), TrainerConfig(**settings_), goal)
    results = [trainer.train(groups, v + 1) for v in range(batches)]
    return flat(trainer.model), results[-1]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", {"name": "constant", "length": 32}])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_split_does_not_change_the_update(aggregation, steps):
    groups, goal = made_groups(noise=0.3), make_objective("grpo", "ppo", "tis", aggregation)
    whole, one = train(groups, goal=goal, micro_tokens=10**6, optimizer_steps=steps, learning_rate=1e-4)
    for micro_tokens in (1, 60, 400):
        cut, other = train(groups, goal=goal, micro_tokens=micro_tokens, optimizer_steps=steps, learning_rate=1e-4)
        assert torch.allclose(cut, whole, rtol=0, atol=1e-6)
        assert other.metrics.grad_norm == pytest.approx(one.metrics.grad_norm, rel=1e-4)
        assert other.metrics.loss == pytest.approx(one.metrics.loss, abs=1e-6)
        assert other.metrics.ess == pytest.approx(one.metrics.ess, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_order_of_arrival_does_not_change_a_bit(steps):
    groups, random = made_groups(noise=0.3), np.random.default_rng(1)
    whole, result = train(groups, optimizer_steps=steps)
    mixed = [
        replace(groups[i], rollouts=tuple(groups[i].rollouts[j] for j in random.permutation(6)))
        for i in random.permutation(6)
    ]
    again, other = train(mixed, optimizer_steps=steps)
    assert torch.equal(whole, again)
    assert result.metrics == other.metrics and result.advantages == other.advantages


def test_rollouts_without_reward_or_weight_leave_no_trace():
    groups = made_groups()
    extra = replace(groups[2].rollouts[1], id=900, reward=None, outcome=Outcome.TIMEOUT)
    response = groups[2].rollouts[2].segments[1]
    masked = replace(
        groups[3].rollouts[0],
        id=901,
        reward=None,
        segments=(groups[3].rollouts[0].segments[0], replace(response, mask=np.zeros(len(response), np.uint8))),
    )
    with_them = [
        replace(g, rollouts=(*g.rollouts, extra))
        if g.id == 2
        else replace(g, rollouts=(*g.rollouts, masked))
        if g.id == 3
        else g
        for g in groups
    ]
    plain, result = train(groups)
    crowded, other = train(with_them)
    assert torch.equal(plain, crowded) and result.metrics == other.metrics
    assert result.advantages == other.advantages and 900 not in other.advantages


def test_masked_tokens_inside_a_response_carry_no_weight():
    groups, other = made_groups(), []
    for g in groups:
        half = [
            replace(r.segments[1], mask=(np.arange(len(r.segments[1])) >= len(r.segments[1]) // 2).astype(np.uint8))
            for r in g.rollouts
        ]
        spoilt = [replace(s, logprobs=np.where(s.mask, s.logprobs, -50).astype(np.float32)) for s in half]
        other.append(
            [
                replace(g, rollouts=tuple(replace(r, segments=(r.segments[0], s)) for r, s in zip(g.rollouts, which)))
                for which in (half, spoilt)
            ]
        )
    (one, a), (two, b) = train([o[0] for o in other]), train([o[1] for o in other])
    assert torch.equal(one, two) and a.metrics == b.metrics
    assert not torch.equal(one, train(groups)[0])


def test_ratio_one_is_on_policy_at_any_temperature():
    for temperature in (0.6, 1.0, 1.5):
        metrics = train(made_groups(temperature=temperature))[1].metrics
        assert (
            metrics.kl_sampler < 1e-8
            and metrics.ess == pytest.approx(1, abs=1e-5)
            and metrics.clip_low == metrics.clip_high == 0
        )
    mixed = made_groups(temperature=0.6)[:3] + made_groups(temperature=1.5)[3:]
    assert train(mixed)[1].metrics.kl_sampler < 1e-8
    assert (
        train([replace(g, rollouts=tuple(replace(r, temperature=1.0) for r in g.rollouts)) for g in mixed])[
            1
        ].metrics.kl_sampler
        > 1e-4
    )


def test_the_torch_generator_and_the_trainer_agree():
    "Real samples, and after a hand-over of new weights again: the trainer recomputes what the generator wrote down."
    generator = TorchGenerator(small_model(), max_length=48, slots=8)
    trainer = Trainer(small_model(), TrainerConfig(learning_rate=0.02))
    for version in (0, 1):
        requests = [
            Request((i, 0), np.array([1, 2, 3]), Sampling(temperature=0.8, max_tokens=8 + i), stream=i + 100 * version)
            for i in range(16)
        ]
        generator.submit(requests)
        results = []
        while not generator.idle:
            results += generator.step(4)
        task = Task("t", "", "")
        members = [
            Rollout(
                r.key[0],
                0,
                0,
                r.key[0],
                task,
                (prompt_segment([1, 2, 3]), r.segment),
                reward=float(r.key[0] % 2),
                temperature=0.8,
            )
            for r in results
        ]
        metrics = trainer.train([Group(0, task, tuple(members))], version + 1).metrics
        assert metrics.kl_sampler < 1e-9 and abs(metrics.ess - 1) < 1e-5 and metrics.update_norm > 0
        hand_over(trainer.model, generator, version + 1)


@pytest.mark.slow
def test_a_correction_sees_the_mismatch_and_changes_the_update():
    groups = made_groups(noise=0.8)
    plain, result = train(groups)
    corrected, other = train(groups, goal=make_objective(correction="tis"))
    assert result.metrics.ess < 0.9 and result.metrics.kl_sampler > 0.05 and result.metrics.ess == other.metrics.ess
    assert not torch.equal(plain, corrected)
    assert torch.allclose(
        train(made_groups())[0], train(made_groups(), goal=make_objective(correction="tis"))[0], rtol=0, atol=1e-6
    )


def test_more_optimizer_steps_use_the_log_probs_of_the_batchs_start():
    groups = made_groups()
    one, two = (train(groups, optimizer_steps=k, learning_rate=0.02)[1].metrics for k in (1, 3))
    assert one.clip_low + one.clip_high == 0 < two.clip_low + two.clip_high
    assert (one.optimizer_steps, two.optimizer_steps) == (1, 3) and two.kl_sampler < 1e-8
    assert train(groups, optimizer_steps=100)[1].metrics.optimizer_steps == 6  # never more than groups


@pytest.mark.slow
def test_state_is_enough_to_go_on(tmp_path):
    groups = made_groups()
    straight, _ = train(groups, batches=4, warmup_steps=3)
    first = Trainer(small_model(), TrainerConfig(warmup_steps=3))
    for version in (1, 2):
        first.train(groups, version)
    torch.save({"model": first.model.state_dict(), "trainer": first.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = Trainer(small_model(9), TrainerConfig(warmup_steps=3))
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["trainer"])
    for version in (3, 4):
        second.train(groups, version)
    assert torch.equal(flat(second.model), straight) and second.steps == 4


@pytest.mark.slow
def test_it_learns_from_rewards_alone():
    "Reward: the share of token 3 in what the policy writes. Sampled on-policy, a few updates must raise it."
    model = small_model()
    trainer = Trainer(model, TrainerConfig(learning_rate=5e-3), make_objective("rloo", "ppo"))
    shares, draws = [], torch.Generator().manual_seed(0)
    for version in range(1, 26):
        tokens = torch.tensor([[1, 2]]).repeat(32, 1)
        for _ in range(8):
            with torch.no_grad():
                chances = model(input_ids=tokens, use_cache=False).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draws)], 1)
        with torch.no_grad():
            logprobs_RT, _ = token_logprobs(model, tokens, torch.full((32,), 10), torch.ones(32))
        rewards = (tokens[:, 2:] == 3).float().mean(1)
        shares.append(float(rewards.mean()))
        task = Task("t", "", "")
        members = tuple(
            Rollout(
                i, 0, 0, i, task, (prompt_segment(t[:2]), response_segment(t[2:], lp[2:], np.zeros(8))), reward=float(r)
            )
            for i, (t, lp, r) in enumerate(zip(tokens.numpy(), logprobs_RT.numpy(), rewards))
        )
        assert trainer.train([Group(0, task, members)], version).metrics.kl_sampler < 1e-8
    assert shares[0] < 0.15 and shares[-1] > 0.5, shares


@pytest.mark.parametrize("optimizer_steps", [1, 3])
def test_every_processor_finds_the_same_update(monkeypatch, optimizer_steps):
    "Halves of layers and products of oneDNN, as an AMD processor with AVX-512 has them, or modules and MKL."
    found = {}
    for lacks in (True, False):
        for module in (products, layer_parts):
            monkeypatch.setattr(module, "mkl_lacks_avx512", lambda: lacks)
        monkeypatch.setattr(products, "ONEDNN_FROM", 0)
        found[lacks], _ = train(made_groups(noise=0.3), optimizer_steps=optimizer_steps, learning_rate=1e-4)
    assert not torch.equal(found[True], found[False]), "the two ways were one"
    assert torch.allclose(found[True], found[False], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "vendor, flags, lacks",
    [
        ("AuthenticAMD", "sse avx2 avx512f", True),
        ("AuthenticAMD", "sse avx2", False),
        ("GenuineIntel", "sse avx2 avx512f", False),
        ("", "", False),
    ],
    ids=["AMD with AVX-512", "AMD without", "Intel", "not told"],
)
def test_the_processor_decides_for_onednn(tmp_path, vendor, flags, lacks):
    "By what the system tells of it, so that every start decides alike."
    told = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n" if vendor else ""
    (tmp_path / "cpuinfo").write_text(told)
    assert mkl_lacks_avx512(tmp_path / "cpuinfo") == lacks


@pytest.mark.slow
def test_bfloat16_passes_over_float32_weights():
    "One trainer in bfloat16 between two in float32, in one process: it rounds, and they do not."
    groups = made_groups()
    whole, _ = train(groups)
    rounded, result = train(groups, precision="bf16")
    again, _ = train(groups)
    several, _ = train(groups, precision="bf16", optimizer_steps=3)
    assert torch.equal(whole, again) and not torch.equal(whole, rounded)
    assert rounded.dtype == torch.float32 and torch.isfinite(several).all()
    metrics = result.metrics
    assert metrics.clip_low == metrics.clip_high == 0 and 0 < metrics.kl_sampler < 1e-2, metrics


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 400), max_size=80), micro_tokens=st.integers(1, 2000))
def test_split_keeps_its_bounds_for_any_lengths(lengths, micro_tokens):
    lengths_R = np.array(lengths, int)
    micros = split_rows(lengths_R, micro_tokens)
    assert sorted(np.concatenate(micros).tolist() if micros else []) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * lengths_R[rows].max() <= micro_tokens for rows in micros)
    assert all(padding_share(lengths_R, [rows]) <= 0.15 + 1e-12 for rows in micros)


def test_prepare_lays_out_turns_and_observations():
    task = Task("t", "", "")
    observation = replace(prompt_segment([7, 8]), kind="observation")
    turns = (
        prompt_segment([1, 2]),
        response_segment([3, 4], [-1, -2], [0, 0]),
        observation,
        response_segment([5], [-3], [1], turn=1),
        observation,
    )
    group = Group(
        0, task, (Rollout(0, 0, 0, 0, task, turns, reward=1.0), Rollout(1, 0, 0, 1, task, turns[:2], reward=0.0))
    )
    arrays = prepare_batch([group], make_objective("dr_grpo"), pad=9)
    assert arrays.tokens_RT.tolist() == [
        [1, 2, 3, 4, 9, 9, 9],
        [1, 2, 3, 4, 7, 8, 5],
    ]  # nothing after the last token with weight
    assert arrays.mask_RT.astype(int).tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 1]]
    assert arrays.sampler_RT.tolist() == [[0, 0, -1, -2, 0, 0, 0], [0, 0, -1, -2, 0, 0, -3]]
    assert (
        arrays.advantages_RT.max(1).tolist() == [0, 0.5]
        and arrays.advantages_RT.min(1).tolist() == [-0.5, 0]
        and arrays.rollouts_R.tolist() == [1, 0]
    )


def test_a_loaded_policy_owns_its_weights(tmp_path):
    "Overwriting the file a policy was loaded from must not change the policy that trains."
    import shutil
    from importlib.resources import files

    from rlbench.models.model import load_policy

    shutil.copytree(str(files("rlbench.data") / "tiny"), tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    before = [p.detach().clone() for p in policy.model.parameters()]
    blob = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    blob[-4096:] = bytes(4096)
    with open(tmp_path / "model" / "model.safetensors", "r+b") as file:
        file.write(blob)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
