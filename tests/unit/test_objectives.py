"""Every formula of the dictionaries: gradients, enumeration on tabular policies, and what must not matter (padding,
row order, the split). A new member is tested by being there."""

import inspect
import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlbench.advantage import ADVANTAGES, MIN_GROUP, gae, is_informative
from rlbench.knobs import call_with_ingredients, ingredients_of, knobs_of, resolve_named
from rlbench.objective.correction import (
    CORRECTIONS,
    chi_square,
    effective_sample_size,
    kl_k3,
    log_linear_logprobs,
    proximal_share,
)
from rlbench.objective.kl import KLS, SCHEDULES
from rlbench.objective.loss import AGGREGATIONS, LOSSES, mean_over_sequence, totals_of, value_loss
from rlbench.objective.rare_objectives import ZOO_ADVANTAGES, ZOO_CORRECTIONS, ZOO_LOSSES

ALL_LOSSES, ALL_CORRECTIONS, ALL_ADVANTAGES = (
    LOSSES | ZOO_LOSSES,
    CORRECTIONS | ZOO_CORRECTIONS,
    ADVANTAGES | ZOO_ADVANTAGES,
)
TABLES = {
    "advantage": ALL_ADVANTAGES,
    "loss": ALL_LOSSES,
    "correction": ALL_CORRECTIONS,
    "aggregation": AGGREGATIONS,
    "kl": KLS,
    "schedule": SCHEDULES,
}
GIVEN = {"advantage": 1, "loss": 3, "correction": 2, "aggregation": 2, "kl": 2, "schedule": 2}
INGREDIENTS = {
    "advantage": {
        "batch_R",
        "lengths_R",
        "correct_R",
        "parts_RK",
        "names_K",
        "groups_R",
        "mask_RT",
        "sets_R",
        "sampler_RT",
        "reference_RT",
        "teacher_RT",
        "values_RT",
        "kl_RT",
        "steps_RT",
        "memory",
    },
    "loss": {"mask_RT", "sampler_RT", "start_RT"},
    "correction": {"mask_RT", "advantages_RT", "whole_RT"},
    "aggregation": set(),
    "kl": {"sampler_RT", "old_RT"},
    "schedule": {"last", "measured", "rollouts"},
}
DETACHED = {  # losses with a weight that carries no gradient: what that weight is, from ratio and advantage
    "cispo": lambda d: d.ratio_RT.clamp(0, 1.28),
    "cispo_cap": lambda d: d.ratio_RT.clamp(max=5),
    "pipeline": lambda d: d.ratio_RT.clamp(max=5),
    "vespo": lambda d: _phi((d.ratio_RT.log() * d.mask_RT).sum(1, keepdim=True).exp(), d.advantages_RT),
}


def every(table):
    return pytest.mark.parametrize("name", table)


def _phi(whole_R1, advantages_RT):
    good, bad = (math.e**decay * whole_R1**k * (-decay * whole_R1).exp() for k, decay in ((2, 3), (3, 2)))
    return good.where(advantages_RT >= 0, bad)


def data(seed=0, rows=6, width=7, per_token=False):
    """A batch: random log-probabilities, prompts, observations and padding masked, one row without any token,
    advantages of both signs, one per rollout or per token."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale, *shape):
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    logprobs_RT = (normal(1, rows, width) - 1.5).clamp(max=-0.01)
    old_RT, sampler_RT = logprobs_RT + normal(0.3, rows, width), logprobs_RT + normal(0.4, rows, width)
    mask_RT = torch.rand(rows, width, generator=g) < 0.6
    mask_RT[:, -2], mask_RT[2] = True, False
    advantages_RT = normal(1, rows, 1)
    advantages_RT[0], advantages_RT[1] = 1.0, -1.0
    if per_token:
        advantages_RT = advantages_RT + normal(1, rows, width)
    return SimpleNamespace(
        logprobs_RT=logprobs_RT,
        old_RT=old_RT,
        sampler_RT=sampler_RT,
        start_RT=old_RT,
        mask_RT=mask_RT,
        whole_RT=mask_RT,
        advantages_RT=advantages_RT,
        reference_RT=logprobs_RT + normal(0.3, rows, width),
        ratio_RT=(logprobs_RT - old_RT).exp(),
    )


def changed(d, change):
    "The batch with every array changed alike."
    return SimpleNamespace(**{name: change(name, value) for name, value in vars(d).items()})


def take(rows):
    return lambda name, value: value[rows]


def whatever(name):
    "A number for places without weight, another for every array."
    return 0 if name in ("mask_RT", "whole_RT") else -0.7 * (1 + sum(map(ord, name)) % 7)


def padded(name, value):
    "Three more columns: no weight, and whatever numbers."
    return (
        value
        if value.shape[1] == 1
        else torch.cat([value, torch.full((len(value), 3), whatever(name), dtype=value.dtype)], 1)
    )


def scrambled(d):
    "Other numbers at the prompts and observations."
    return changed(d, lambda name, value: value if value.shape[1] == 1 else value.where(d.mask_RT, whatever(name)))


def weigh(loss, aggregation, d, totals=None):
    "The number to minimise, and the gradient of it."
    leaf_RT = d.logprobs_RT.clone().requires_grad_()
    terms = call_with_ingredients(
        loss, leaf_RT, d.old_RT, d.advantages_RT, **{k: getattr(d, k) for k in ("mask_RT", "sampler_RT", "start_RT")}
    )
    total = (terms.loss_RT * aggregation(d.mask_RT, totals or totals_of(d.mask_RT))).sum()
    return float(total.detach()), torch.autograd.grad(total, leaf_RT)[0], terms


def correct(correction, d):
    return call_with_ingredients(
        correction, d.old_RT, d.sampler_RT, mask_RT=d.mask_RT, whole_RT=d.whole_RT, advantages_RT=d.advantages_RT
    )


# --- all of them


@pytest.mark.parametrize("kind", TABLES)
def test_signatures_keep_the_contract(kind):
    """Plain parameters are the given ones and known ingredients;
    knobs are keyword-only, have a help text or choices, and their defaults pass their own check."""
    for name, function in TABLES[kind].items():
        assert set(ingredients_of(function, GIVEN[kind])) <= INGREDIENTS[kind], name
        assert dict(resolve_named(kind, TABLES[kind], name).params) == {
            key: default for key, (_, default) in knobs_of(function).items()
        }
        for key, (knob, _) in knobs_of(function).items():
            assert knob.help and inspect.signature(function).parameters[key].kind is inspect.Parameter.KEYWORD_ONLY, (
                f"{name}.{key}"
            )
        assert function.__doc__ and function.__name__ == name


def test_no_name_stands_for_two_things():
    assert (
        not LOSSES.keys() & ZOO_LOSSES.keys()
        and not CORRECTIONS.keys() & ZOO_CORRECTIONS.keys()
        and not ADVANTAGES.keys() & ZOO_ADVANTAGES.keys()
    )
    assert MIN_GROUP.keys() == ADVANTAGES.keys()


# --- losses


@every(ALL_LOSSES)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_gradient_of_a_loss(name, seed, per_token):
    "Finite differences; where a weight is detached, minus that weight times the advantage."
    d = data(seed, 12, 7, per_token)
    for aggregation in AGGREGATIONS.values():
        _, gradient_RT, _ = weigh(ALL_LOSSES[name], aggregation, d)
        weight_RT = aggregation(d.mask_RT, totals_of(d.mask_RT))
        if name in DETACHED:
            assert torch.allclose(gradient_RT, -DETACHED[name](d) * d.advantages_RT * weight_RT, atol=1e-12)
        else:
            there = {k: getattr(d, k) for k in ("mask_RT", "sampler_RT", "start_RT")}

            def value(leaf_RT):
                return (
                    call_with_ingredients(ALL_LOSSES[name], leaf_RT, d.old_RT, d.advantages_RT, **there).loss_RT
                    * weight_RT
                ).sum()

            is_gradient = torch.autograd.gradcheck(
                value, d.logprobs_RT.clone().requires_grad_(), eps=1e-7, raise_exception=False
            )
            assert is_gradient, (
                f"{name}: not the gradient of its value; a loss with a detached weight goes into DETACHED"
            )
        assert gradient_RT.any() and not gradient_RT[~d.mask_RT].any()


@every(ALL_LOSSES)
def test_no_gradient_reaches_the_past(name):
    "Only the policy in training moves: not what it was, not the sampler, not the advantages."
    d = data()
    past = [x.clone().requires_grad_() for x in (d.old_RT, d.advantages_RT)]
    terms = call_with_ingredients(
        ALL_LOSSES[name],
        d.logprobs_RT.clone().requires_grad_(),
        past[0],
        d.advantages_RT,
        mask_RT=d.mask_RT,
        sampler_RT=d.sampler_RT,
        start_RT=past[0],
    )
    found = torch.autograd.grad(terms.loss_RT.sum(), past[:1], allow_unused=True)
    assert all(g is None or not g.any() for g in found)


@every(ALL_LOSSES)
def test_expected_gradient_on_a_tabular_policy(name):
    """All sequences of two tokens of four: at the policy that sampled, the expected gradient is minus that of the
    expected reward; for imitation it is 0."""
    g = torch.Generator().manual_seed(5)
    first_A = torch.randn(4, generator=g, dtype=torch.float64).requires_grad_()
    second_AA = torch.randn(4, 4, generator=g, dtype=torch.float64).requires_grad_()
    reward_AA = torch.rand(4, 4, generator=g, dtype=torch.float64)
    pairs = torch.tensor(list(product(range(4), repeat=2)))
    logprobs_RT = torch.stack(
        [first_A.log_softmax(0)[pairs[:, 0]], second_AA.log_softmax(1)[pairs[:, 0], pairs[:, 1]]], 1
    )
    chance_R = logprobs_RT.sum(1).exp()
    rewards_R = reward_AA[pairs[:, 0], pairs[:, 1]]
    true = torch.autograd.grad((chance_R * rewards_R).sum(), (first_A, second_AA), retain_graph=True)
    there = {
        "mask_RT": torch.ones_like(logprobs_RT).detach(),
        "sampler_RT": logprobs_RT.detach(),
        "start_RT": logprobs_RT.detach(),
    }
    terms = call_with_ingredients(
        ALL_LOSSES[name], logprobs_RT, logprobs_RT.detach(), rewards_R[:, None] - 0.3, **there
    )
    found = torch.autograd.grad((chance_R.detach() * terms.loss_RT.sum(1)).sum(), (first_A, second_AA))
    times = {"supervised": 0.0, "luspo": 2.0}.get(name, 1.0)  # luspo: times the number of tokens
    assert all(torch.allclose(f, -times * t, atol=1e-12) for f, t in zip(found, true))


@every(ALL_LOSSES)
@pytest.mark.parametrize("per_token", [False, True])
def test_what_must_not_matter_to_a_loss(name, per_token):
    "Padding, the order of rows, and the split into micro-batches, for each way of adding up."
    d, loss = data(1, per_token=per_token), ALL_LOSSES[name]
    for aggregation in AGGREGATIONS.values():
        value, gradient_RT, terms = weigh(loss, aggregation, d)
        wide_value, wide_RT, wide_terms = weigh(loss, aggregation, changed(d, padded))
        assert (
            math.isclose(value, wide_value, abs_tol=1e-12)
            and torch.allclose(wide_RT[:, :-3], gradient_RT, atol=1e-14)
            and not wide_RT[:, -3:].any()
        )
        for flags in ("clipped_low_RT", "clipped_high_RT"):
            assert torch.equal(
                (getattr(wide_terms, flags) & padded("mask_RT", d.mask_RT))[:, :-3], getattr(terms, flags) & d.mask_RT
            )
        other_value, other_RT, _ = weigh(loss, aggregation, scrambled(d))
        assert math.isclose(value, other_value, abs_tol=1e-12) and torch.allclose(other_RT, gradient_RT, atol=1e-14)
        order = torch.tensor([4, 0, 5, 2, 1, 3])
        turned, turned_RT, _ = weigh(loss, aggregation, changed(d, take(order)))
        assert math.isclose(value, turned, abs_tol=1e-12) and torch.allclose(turned_RT, gradient_RT[order], atol=1e-14)
        halves = [
            (rows, weigh(loss, aggregation, changed(d, take(rows)), totals_of(d.mask_RT)))
            for rows in ([0, 3], [1], [2, 4, 5])
        ]
        assert math.isclose(value, sum(v for _, (v, _, _) in halves), abs_tol=1e-12)
        assert all(torch.allclose(part_RT, gradient_RT[rows], atol=1e-14) for rows, (_, part_RT, _) in halves)


@every(ALL_LOSSES)
def test_flags_say_where_the_gradient_went(name):
    """A clipped objective has no gradient where it is flagged and only there; a clipped weight has that of its bound;
    a spring stays."""
    d = data(2, rows=60)
    _, gradient_RT, terms = weigh(ALL_LOSSES[name], AGGREGATIONS["sequence_sum"], d)
    flagged_RT = (terms.clipped_low_RT | terms.clipped_high_RT) & d.mask_RT
    assert not (terms.clipped_low_RT & terms.clipped_high_RT).any()
    if name not in DETACHED and name != "ipo_mask":  # these look at no sign
        assert not (
            terms.clipped_low_RT & (d.advantages_RT > 0)
        ).any()  # a good token may fall as far as it likes: it is pulled back
    if name in DETACHED or "spring" in knobs_of(ALL_LOSSES[name]):
        bare_RT = -d.ratio_RT * d.advantages_RT / totals_of(d.mask_RT).sequences
        high_RT = terms.clipped_high_RT & d.mask_RT & (d.ratio_RT > 1)
        assert (gradient_RT.abs() < bare_RT.abs())[high_RT].all()
    else:
        assert torch.equal(flagged_RT, (gradient_RT == 0) & d.mask_RT & (d.advantages_RT != 0).expand_as(d.mask_RT))
        clips = any(knob in knobs_of(ALL_LOSSES[name]) for knob in ("low", "high"))
        assert flagged_RT.any() == clips, f"{name}: a loss flags tokens if, and only if, it has a knob `low` or `high`"


@every(ALL_LOSSES)
def test_a_batch_without_a_token_is_nothing(name):
    d = changed(data(), lambda key, value: torch.zeros_like(value) if key in ("mask_RT", "whole_RT") else value)
    for aggregation in AGGREGATIONS.values():
        value, gradient_RT, _ = weigh(ALL_LOSSES[name], aggregation, d)
        assert value == 0 and not gradient_RT.any() and torch.isfinite(gradient_RT).all()


def test_value_loss():
    "Finite differences, and nothing flows into old values or returns."
    g = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(5, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))
    for clip in (0, 0.2, 10.0):
        assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip=clip).sum(), values)
        assert all(
            x is None
            for x in torch.autograd.grad(
                value_loss(values, old, returns, clip=clip).sum(), (old, returns), allow_unused=True
            )
        )


@every(AGGREGATIONS)
def test_aggregations(name):
    "Weights are 0 outside the mask, at least 0 inside, indifferent to padding, and add up over a split."
    d, aggregation = data(), AGGREGATIONS[name]
    totals = totals_of(d.mask_RT)
    weight_RT = aggregation(d.mask_RT, totals)
    assert (weight_RT[d.mask_RT] > 0).all() and not weight_RT[~d.mask_RT].any()
    assert torch.equal(aggregation(padded("mask_RT", d.mask_RT), totals)[:, :-3], weight_RT)
    assert torch.equal(torch.cat([aggregation(d.mask_RT[:2], totals), aggregation(d.mask_RT[2:], totals)]), weight_RT)
    assert not aggregation(0 * weight_RT, totals_of(0 * weight_RT)).any()
    at = weight_RT.clone().requires_grad_()  # linear: the gradient of the sum is the weight
    assert torch.equal(torch.autograd.grad((at * weight_RT).sum(), at)[0], weight_RT)


# --- corrections


@every(ALL_CORRECTIONS)
def test_a_correction_is_a_weight_without_gradient(name):
    """At least 0, finite, 1 where sampler and trainer agree;
    the gradient of a weighted loss is the weight times that of the loss,
    also when the policy in training is the numerator."""
    d = data(3)
    live_RT = d.logprobs_RT.clone().requires_grad_()
    d.old_RT = live_RT
    weight_RT = correct(ALL_CORRECTIONS[name], d)
    assert (
        weight_RT.shape == d.mask_RT.shape
        and not weight_RT.requires_grad
        and torch.isfinite(weight_RT[d.mask_RT]).all()
        and (weight_RT >= 0).all()
    )

    def loss(leaf_RT):
        return call_with_ingredients(LOSSES["ppo"], leaf_RT, d.start_RT, d.advantages_RT).loss_RT

    (plain,) = torch.autograd.grad(loss(live_RT).sum(), live_RT)
    (weighted,) = torch.autograd.grad((loss(live_RT) * correct(ALL_CORRECTIONS[name], d)).sum(), live_RT)
    assert torch.allclose(weighted, plain * weight_RT, atol=1e-14)
    d.sampler_RT = d.old_RT.detach()
    assert torch.equal(correct(ALL_CORRECTIONS[name], d), torch.ones_like(weight_RT))


@every(ALL_CORRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_what_must_not_matter_to_a_correction(name, seed):
    "Padding, row order, and the split: but one that asks for the whole batch is computed before the cut."
    d = data(seed, per_token=seed == 2)
    correction = partial(
        ALL_CORRECTIONS[name],
        **{
            "geometric": {"low": 0.8, "high": 1.2},
            "k3_mask": {"bound": 0.08},
            "opsm": {"delta": 0.05},
            "veto": {"low": 0.3},
            "sequence_tis": {"cap": 100.0},
        }.get(name, {}),
    )
    weight_RT = correct(correction, d)

    def inside(found_RT, mask_RT):
        return found_RT.where(mask_RT, 0)

    assert torch.allclose(
        inside(correct(correction, changed(d, padded)), padded("mask_RT", d.mask_RT))[:, :-3],
        inside(weight_RT, d.mask_RT),
        atol=1e-14,
    )
    assert torch.allclose(
        inside(correct(correction, scrambled(d)), d.mask_RT), inside(weight_RT, d.mask_RT), atol=1e-14
    )
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.allclose(
        inside(correct(correction, changed(d, take(order))), d.mask_RT[order]),
        inside(weight_RT, d.mask_RT)[order],
        atol=1e-14,
    )
    if "whole_RT" not in ingredients_of(ALL_CORRECTIONS[name], 2):
        for rows in ([0, 3], [1], [2, 4, 5]):
            assert torch.allclose(correct(correction, changed(d, take(rows))), weight_RT[rows], atol=1e-14)


def test_what_asks_for_the_whole_batch_needs_it():
    "M2PO on the parts is not M2PO on the whole: which token goes depends on all the others."
    d = data(1)
    needing = [name for name, f in ALL_CORRECTIONS.items() if "whole_RT" in ingredients_of(f, 2)]
    assert needing == ["m2po"]
    whole = correct(CORRECTIONS["m2po"], d)
    parts = torch.cat([correct(CORRECTIONS["m2po"], changed(d, take([row]))) for row in range(6)])
    assert not torch.equal(whole.where(d.mask_RT, 0) > 0, parts.where(d.mask_RT, 0) > 0)
    kept = (whole > 0) & d.mask_RT
    square = (d.old_RT - d.sampler_RT) ** 2
    assert (
        square[kept].mean() <= 0.04 < (square[kept].sum() + square[d.mask_RT & ~kept].min()) / (kept.sum() + 1)
    )  # and not one token more


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "decoupled", "sequence_tis", "sequence_mis", "m2po"])
def test_wide_bounds_are_importance_sampling(name):
    """One decision, enumerated: with bounds out of the way the weighted mean under the sampler is the mean under the
    trainer."""
    g = torch.Generator().manual_seed(1)
    policy_A, sampler_A = (torch.randn(8, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    reward_A = torch.rand(8, generator=g, dtype=torch.float64)
    wide = {"cap": 100.0, "low": 0.0, "high": 100.0, "tau": 100.0}
    correction = partial(CORRECTIONS[name], **{key: wide[key] for key in knobs_of(CORRECTIONS[name])})
    weight_A = call_with_ingredients(
        correction, policy_A[:, None], sampler_A[:, None], mask_RT=torch.ones(8, 1), whole_RT=torch.ones(8, 1)
    )[:, 0]
    assert torch.isclose((sampler_A.exp() * weight_A * reward_A).sum(), (policy_A.exp() * reward_A).sum())


def test_measures_of_nothing_and_of_agreement():
    d = data()
    nothing = torch.zeros_like(d.mask_RT)
    assert (
        effective_sample_size(d.ratio_RT, nothing) == 1.0
        and kl_k3(d.old_RT, d.sampler_RT, nothing) == chi_square(d.old_RT, d.sampler_RT, nothing) == 0.0
    )
    assert kl_k3(d.old_RT, d.old_RT, d.mask_RT) == chi_square(d.old_RT, d.old_RT, d.mask_RT) == 0.0
    wide = changed(d, padded)
    assert math.isclose(
        chi_square(wide.old_RT, wide.sampler_RT, wide.mask_RT), chi_square(d.old_RT, d.sampler_RT, d.mask_RT)
    )
    assert chi_square(d.old_RT + 60, d.sampler_RT, d.mask_RT) > 1e40  # no overflow on the way


def test_log_linear_splits_the_ratio():
    "Clip and correction share the ratio to the sampler as alpha says, and no gradient passes."
    d, a = data(), torch.tensor(proximal_share(3, 5, 6))
    live_RT = d.logprobs_RT.clone().requires_grad_()
    proximal_RT = log_linear_logprobs(live_RT, d.sampler_RT, a)
    assert not proximal_RT.requires_grad
    assert torch.allclose(d.logprobs_RT - proximal_RT, (1 - a) * (d.logprobs_RT - d.sampler_RT)) and torch.allclose(
        proximal_RT - d.sampler_RT, a * (d.logprobs_RT - d.sampler_RT)
    )
    behave_RT = torch.tensor([[1, 2, 3, 3]])
    assert proximal_share(behave_RT, 3, 4).tolist() == [[pytest.approx(2 / 3), 0.5, 0, 0]] and proximal_share(
        np.array([3, 0]), 3, 3
    ).tolist() == [0, 1]


# --- KL


@every(KLS)
def test_gradient_of_a_kl(name):
    """Finite differences; one value per token, so neither padding nor the split can matter;
    large log-ratios stay finite."""
    d = data(4)

    def value(leaf_RT, e=d):
        return call_with_ingredients(KLS[name], leaf_RT, e.reference_RT, sampler_RT=e.sampler_RT, old_RT=e.old_RT)

    assert torch.autograd.gradcheck(value, d.logprobs_RT.clone().requires_grad_())
    for rows in ([0, 3], [1]):
        part = changed(d, take(rows))
        assert torch.equal(value(part.logprobs_RT, part), value(d.logprobs_RT)[rows])
    wide = changed(d, padded)
    assert torch.equal(value(wide.logprobs_RT, wide)[:, :-3], value(d.logprobs_RT))
    assert not call_with_ingredients(KLS[name], d.old_RT, d.old_RT, sampler_RT=d.old_RT, old_RT=d.old_RT).any()
    far = torch.tensor([[-800.0, -0.1]], dtype=torch.float64)
    assert torch.isfinite(call_with_ingredients(KLS[name], far, far.flip(1), sampler_RT=far, old_RT=far)).all()


@every(KLS)
def test_expected_gradient_of_a_kl(name):
    """By enumeration: what each does as a loss on its own samples.

    A new estimate has to say which divergence it descends."""
    g = torch.Generator().manual_seed(2)
    logits_A = torch.randn(10, generator=g, dtype=torch.float64).requires_grad_()
    reference_A = torch.randn(10, generator=g, dtype=torch.float64).log_softmax(0)
    policy_A = logits_A.log_softmax(0)

    def slope(value):
        return torch.autograd.grad(value, logits_A, retain_graph=True)[0]

    reverse, forward = (
        slope((policy_A.exp() * (policy_A - reference_A)).sum()),
        slope((reference_A.exp() * (reference_A - policy_A)).sum()),
    )
    expected = {"k1": 0 * reverse, "k2": reverse, "k3": forward, "weighted_k3": reverse}[name]
    found = slope(
        (
            policy_A.exp().detach()
            * call_with_ingredients(
                KLS[name], policy_A, reference_A, old_RT=policy_A.detach(), sampler_RT=policy_A.detach()
            )
        ).sum()
    )
    assert (found - expected).abs().max() < 1e-11


@every(SCHEDULES)
def test_schedules_start_at_the_configured_weight(name):
    """At version 0 and before anything is measured the weight is the configured one;
    whatever is measured, it stays a finite number of at least 0."""
    assert call_with_ingredients(SCHEDULES[name], 0.05, 0) == 0.05
    for measured in (0.0, -1.0, 1e9, float("nan"), float("inf")):
        weight = call_with_ingredients(SCHEDULES[name], 0.05, 10**9, last=0.04, measured=measured, rollouts=10**9)
        assert math.isfinite(weight) and weight >= 0


# --- advantages


def batch_there(rewards_R, groups_R, lengths_R=None, width=4, memory=None):
    "All ingredients for a batch: a prompt token, then as many tokens as the rollout is long, then padding."
    n = len(rewards_R)
    lengths_R = np.full(n, 2) if lengths_R is None else np.asarray(lengths_R)
    mask_RT = (np.arange(width) >= 1) & (np.arange(width) < 1 + lengths_R[:, None])
    random = np.random.default_rng(7)
    return {
        "groups_R": np.asarray(groups_R),
        "mask_RT": mask_RT,
        "lengths_R": lengths_R,
        "batch_R": np.asarray(rewards_R, float),
        "parts_RK": np.stack([rewards_R, -np.arange(n) / 9.0], 1),
        "names_K": ("correct", "short"),
        "sets_R": np.array(["one", "two"] * n)[:n],
        "sampler_RT": random.normal(-1, 0.3, (n, width)),
        "teacher_RT": random.normal(-1, 0.3, (n, width)),
        "reference_RT": random.normal(-1, 0.3, (n, width)),
        "values_RT": random.uniform(0, 1, (n, width)),
        "kl_RT": random.normal(0, 0.1, (n, width)),
        "steps_RT": np.where(random.uniform(size=(n, width)) < 0.5, random.normal(0, 1, (n, width)), np.nan),
        "correct_R": np.asarray(rewards_R) > 0.5,
        "memory": {} if memory is None else memory,
    }


def advantages(name, rewards_R, there, per_token=True):
    """Advantages [R, T] of a batch, group-wise functions group by group, 0 outside the mask; `per_token` False:
    as returned."""
    function, rewards_R = ALL_ADVANTAGES[name], np.asarray(rewards_R, float)
    if {"groups_R", "mask_RT"} & set(ingredients_of(function, 1)):
        found = call_with_ingredients(function, rewards_R, **there)
        found = found[0] if isinstance(found, tuple) else found  # beside it, the returns for a critic
    else:
        found = np.full(len(rewards_R), np.nan)
        for group in np.unique(there["groups_R"]):
            rows = there["groups_R"] == group
            mine = {k: v if k in ("batch_R", "names_K", "memory") else v[rows] for k, v in there.items()}
            found[rows] = call_with_ingredients(function, rewards_R[rows], **mine)
    if not per_token:
        return found
    return np.where(there["mask_RT"], found[:, None] if found.ndim == 1 else found, 0)


REWARDS, GROUPS, LENGTHS = (
    np.array([1.0, 0, 0.5, 0, 1, 1, 0, 0.25]),
    np.array([3, 3, 3, 3, 9, 9, 9, 9]),
    np.array([2, 3, 1, 2, 3, 3, 1, 2]),
)


@every(ALL_ADVANTAGES)
def test_advantages_of_a_batch(name):
    "float64, as long as the batch, finite on its tokens, and not all 0."
    found = advantages(name, REWARDS, batch_there(REWARDS, GROUPS, LENGTHS), per_token=False)
    assert (
        isinstance(found, np.ndarray)
        and found.dtype == np.float64
        and found.shape in ((8,), (8, 4))
        and np.isfinite(found).all()
        and found.any()
    )
    if found.ndim == 2:
        assert not found[~batch_there(REWARDS, GROUPS, LENGTHS)["mask_RT"]].any()


@every(ALL_ADVANTAGES)
def test_what_must_not_matter_to_an_advantage(name):
    """The order of rollouts, padding with any numbers in it, the names of the groups, observation tokens in between;
    and the arguments come back as they were."""
    there = batch_there(REWARDS, GROUPS, LENGTHS)
    before = {k: np.array(v, copy=True) for k, v in there.items() if k != "memory"}
    found = advantages(name, REWARDS, there | {"memory": {}})
    assert all(np.array_equal(before[k], there[k], equal_nan=before[k].dtype.kind == "f") for k in before)
    order = np.array([5, 0, 7, 2, 1, 3, 6, 4])
    turned = {k: v if k in ("names_K", "memory", "batch_R") else v[order] for k, v in there.items()} | {"memory": {}}
    assert np.allclose(advantages(name, REWARDS[order], turned), found[order], atol=1e-12)
    assert np.allclose(advantages(name, REWARDS, there | {"groups_R": -GROUPS, "memory": {}}), found, atol=1e-12)

    def wide(k, v):
        return np.insert(
            np.pad(v, ((0, 0), (0, 2)), constant_values=0 if k == "mask_RT" else 99),
            2,
            0 if k == "mask_RT" else -99,
            axis=1,
        )  # an observation as third column

    stretched = {k: wide(k, v) if k.endswith("_RT") else v for k, v in there.items()} | {"memory": {}}
    again = advantages(name, REWARDS, stretched)
    assert (
        np.allclose(np.delete(again, 2, axis=1)[:, :4], found, atol=1e-12)
        and not again[:, 2].any()
        and not again[:, 5:].any()
    )


@every(ALL_ADVANTAGES)
def test_other_groups_matter_only_where_the_batch_is_whitened(name):
    there, other = batch_there(REWARDS, GROUPS, LENGTHS), REWARDS.copy()
    other[4:] = [0.5, 0.25, 1, 0.75]
    found = advantages(name, REWARDS, there | {"memory": {}})[:4]
    steps_RT = there["steps_RT"].copy()
    steps_RT[4:] += 3
    again = advantages(name, other, there | {"memory": {}, "steps_RT": steps_RT})[:4]
    assert np.allclose(found, again, atol=1e-12) == (name not in ("reinforce_pp", "reinforce_pp_baseline"))


@every(ALL_ADVANTAGES)
def test_no_reward_no_advantage(name):
    "A rollout that could not be judged gets NaN and is nobody's baseline: the others get what they get without it."
    rewards = REWARDS.copy()
    rewards[[1, 6]] = np.nan
    there = batch_there(rewards, GROUPS, LENGTHS)
    found, judged = advantages(name, rewards, there | {"memory": {}}), ~np.isnan(rewards)
    assert np.isnan(found[~judged][there["mask_RT"][~judged]]).all() and np.isfinite(found[judged]).all()
    without = {k: v if k in ("names_K", "memory") else v[judged] for k, v in there.items()} | {"memory": {}}
    assert np.allclose(advantages(name, rewards[judged], without), found[judged], atol=1e-12)


@every(ALL_ADVANTAGES)
def test_degenerate_batches(name):
    """Nobody judged, nobody there, a row without a token, equal rewards, a group of one:
    numbers or NaN, never an error, never dust blown up."""
    with np.errstate(all="raise"):
        nobody = np.full(4, np.nan)
        assert np.isnan(advantages(name, nobody, batch_there(nobody, [1, 1, 2, 2]), per_token=True)[:, 1:3]).all()
        assert advantages(name, [], batch_there([], []), per_token=False).size == 0
        alone = advantages(name, [1.0], batch_there([1.0], [1]))[0, 1:3]
        assert not np.nan_to_num(alone).any() if MIN_GROUP.get(name, 1) > 1 else np.isfinite(alone).all()
        assert np.isfinite(alone).all() == (
            "mask_RT" in ingredients_of(ALL_ADVANTAGES[name], 1) or MIN_GROUP.get(name, 1) == 1
        )  # of a whole batch: a number wherever there is a reward
        masked = advantages(name, REWARDS, batch_there(REWARDS, GROUPS, LENGTHS * (np.arange(8) != 2)))
        assert not masked[2].any() and np.isfinite(masked).all()
        equal = np.full(8, 0.1)
        there = batch_there(equal, GROUPS) | {
            "kl_RT": np.zeros((8, 4)),
            "steps_RT": np.full((8, 4), np.nan),
            "parts_RK": equal[:, None],
            "names_K": ("all",),
        }
        if name not in ("reinforce", "gae", "distill", "rae"):  # no baseline of the batch in these
            assert np.abs(advantages(name, equal, there)).max() < 1e-6


EXACT = {  # the signal in a group of three, as a multiple of the true gradient
    "reinforce": lambda p: 1,
    "rloo": lambda p: 1,
    "gae": lambda p: 1,
    "rae": lambda p: 1,
    "dr_grpo": lambda p: 2 / 3,
    "opo": lambda p: 2 / 3,
    "maxrl": lambda p: (1 - (1 - p) ** 2) / p,
    "pass_k": lambda p: (1 - p) ** 2,
}


@every(ALL_ADVANTAGES)
@pytest.mark.parametrize("p", [0.2, 0.5, 0.7])
def test_expected_gradient_of_an_advantage(name, p):
    """A policy with one parameter, the logit of being right:
    over all outcomes of a group of three the estimate points up, and is the multiple of the true gradient that it
    claims to be. For distillation it is minus the gradient of the KL to the teacher."""
    outcomes = np.array(list(product([0.0, 1.0], repeat=3)))
    chance = (p**outcomes * (1 - p) ** (1 - outcomes)).prod(1)
    teacher, true = 0.6, p * (1 - p)
    estimates = []
    for rewards in outcomes:

        def said(q):
            return np.log(np.where(rewards == 1, q, 1 - q))[:, None]

        there = batch_there(rewards, [0, 0, 0], [1, 1, 1], 1) | {
            "mask_RT": np.ones((3, 1)),
            "values_RT": np.full((3, 1), 0.4),
            "kl_RT": np.zeros((3, 1)),
            "steps_RT": np.full((3, 1), np.nan),
            "parts_RK": rewards[:, None],
            "names_K": ("right",),
            "sampler_RT": said(p),
            "teacher_RT": said(teacher),
        }
        estimates.append((advantages(name, rewards, there)[:, 0] * (rewards - p)).mean())
    signal = chance @ estimates
    if name == "distill":
        assert np.isclose(signal, -true * (np.log(p / (1 - p)) - np.log(teacher / (1 - teacher))))
    elif name in EXACT:
        assert np.isclose(signal, EXACT[name](p) * true)
    else:
        assert signal > 0.2 * true


def test_returns_are_what_the_critic_should_have_said():
    """With lambda 1 the returns are the rewards that follow, whatever the critic said;
    a critic that says them has no advantage left."""
    there = batch_there(REWARDS, GROUPS, LENGTHS)
    advantages_RT, returns_RT = call_with_ingredients(partial(gae, lam=1.0), REWARDS, **there)
    right, nothing = (
        returns_RT.copy(),
        call_with_ingredients(partial(gae, lam=0.5), REWARDS, **there | {"values_RT": returns_RT})[0],
    )
    assert np.allclose(nothing, 0, atol=1e-12)
    assert np.allclose(
        call_with_ingredients(partial(gae, lam=1.0), REWARDS, **there | {"values_RT": 5 - right})[1], right
    )
    assert np.allclose(advantages_RT, np.where(there["mask_RT"], returns_RT - there["values_RT"], 0))


@every(ALL_ADVANTAGES)
def test_the_filter_can_ask_about_every_advantage(name):
    """From the rewards of one group alone, bound or not: a mixed group is informative;
    an equal one is only to those that need no group."""
    for advantage in (
        ALL_ADVANTAGES[name],
        partial(ALL_ADVANTAGES[name], **{k: default for k, (_, default) in knobs_of(ALL_ADVANTAGES[name]).items()}),
    ):
        assert is_informative([1.0, 0, 0], advantage)
        assert is_informative([1.0, 1.0, 1.0], advantage) == (MIN_GROUP.get(name, 1) == 1)


def test_over_sequence_ignores_what_is_outside():
    values_RT = torch.tensor(
        [[1.0, float("nan"), 3.0], [float("inf"), 2.0, 2.0]], dtype=torch.float64, requires_grad=True
    )
    found = mean_over_sequence(values_RT, torch.tensor([[1, 0, 1], [0, 0, 0]]))
    assert found.tolist() == [[2.0], [0.0]]
    assert torch.equal(
        torch.autograd.grad(found.sum(), values_RT)[0], torch.tensor([[0.5, 0, 0.5], [0, 0, 0]], dtype=torch.float64)
    )
