"""The closed forms: published values, edges, refusals, inverses, and a few of them against drawn numbers and the
simulator."""

import random
from math import exp, inf

import pytest

from rlbench.planning.queueing import (
    barrier_seconds,
    beta_moment,
    count_waves,
    cut_off,
    dispatch_rate,
    drop_oldest_form,
    drop_share,
    dropped_latency_of,
    first_batch_seconds,
    fit_beta,
    fit_sync_s,
    group_shares,
    hit_share,
    hold_form,
    last_ready_seconds,
    latency_quantile,
    mean_latency_s,
    mean_staleness_form,
    oldest_of,
    paused_rate,
    rollouts_in_flight,
    rollouts_per_second,
    tail_factor,
    trainer_shares,
    unfinished_at_fill,
)


def lognormal(chance: random.Random, mean: float, sigma: float) -> float:
    return mean * exp(sigma * chance.gauss(0, 1) - sigma * sigma / 2)


def test_little_in_three_directions():
    assert rollouts_in_flight(1.95, 604) == pytest.approx(1178, abs=1) and rollouts_in_flight(
        1.95, 576
    ) == pytest.approx(1123, abs=1)
    assert mean_latency_s(rollouts_in_flight(2, 300), 2) == 300 and rollouts_per_second(600, 300) == 2


@pytest.mark.parametrize(
    "rate,compute,sync,step,wait,ratio",
    [
        (1.95, 512 / 2.75, 0, 262.6, 0.291, 1.41),  # the first published run
        (0.598, 171.3, 50, 856, 0.74, 5.0),  # the second
        (0.598, 171.3, 0, 856, 0.80, 5.0),  # without sync: the wait takes its place, the ratio stays
        (10, 100, 20, 120, 0.0, 1.2),  # the trainer binds
    ],
)
def test_shares_of_a_step(rate, compute, sync, step, wait, ratio):
    told = trainer_shares(512, rate, compute, sync)
    assert (
        told.step == pytest.approx(step, abs=0.5)
        and told.wait == pytest.approx(wait, abs=0.002)
        and told.ratio == pytest.approx(ratio, abs=0.01)
    )
    assert told.compute + told.sync + told.wait == pytest.approx(1) and (told.bound == "trainer") == (told.wait == 0)
    assert 512 / told.step == pytest.approx(min(rate, 512 / (compute + sync)))


def test_fits_undo_their_forms():
    told = trainer_shares(512, 0.6, 171.3, 50)
    assert fit_sync_s(told.wait, told.ratio, 171.3) == pytest.approx(50)
    for mean in (0.3, 0.8):
        shape = fit_beta(mean, 0.25, 8)
        assert shape[0] / sum(shape) == pytest.approx(mean) and group_shares(shape, 8).all_pass == pytest.approx(0.25)
    lives = dropped_latency_of(1536, 1.95, 604, 0.6)
    assert lives == pytest.approx(122, abs=1)
    assert 1.95 * 604 + 0.6 * dispatch_rate(1.95, 0.6) * lives == pytest.approx(1536)
    assert dispatch_rate(1.95, 0.6) == pytest.approx(4.88, abs=0.01)


@pytest.mark.parametrize(
    "size,sigma,factor",
    [
        (8, 0.3, 1.49),
        (16, 0.3, 1.65),
        (8, 0.5, 1.89),
        (16, 0.5, 2.22),
        (8, 0.7, 2.33),
        (16, 0.7, 2.91),
        (8, 1.0, 3.05),
        (16, 1.0, 4.1),
        (1, 2.0, 1.0),
        (9, 0.0, 1.0),
    ],
)
def test_tail_factor_is_the_published_one(size, sigma, factor):
    assert tail_factor(size, sigma) == pytest.approx(factor, rel=0.025)


def test_tail_factor_of_many_and_of_wide_ones():
    chance = random.Random(0)
    drawn = sum(max(lognormal(chance, 1, 1.3) for _ in range(32)) for _ in range(20_000)) / 20_000
    assert tail_factor(32, 1.3) == pytest.approx(drawn, rel=0.04)
    assert 1 < tail_factor(100_000, 0.3) < exp(0.3 * 5)
    assert barrier_seconds(960, 400, 0.3) == pytest.approx(400 * tail_factor(960, 0.3))


def test_staleness_by_discipline():
    assert mean_staleness_form(0.5, 120, 120) == mean_staleness_form(0.5, 120, 120, 2, "drop_oldest") == 1.5, (
        "below 1 nothing is held and nothing is pushed out"
    )
    assert mean_staleness_form(1.5, 120, 120, 2) == hold_form(120, 120, 2) == 3
    assert (
        mean_staleness_form(1.5, 120, 120, 2, "drop_oldest")
        == drop_oldest_form(1.5, 120, 120, 2)
        == pytest.approx(120 / 180 + 4.5 / 3)
    )
    assert mean_staleness_form(0.709, 1178, 512, group=16, sigma=0.3) == pytest.approx(4.5, abs=0.05)
    assert mean_staleness_form(0.2, 1536, 512, group=16, sigma=0.4, acceptance=0.45) == pytest.approx(2.79, abs=0.02)
    assert mean_staleness_form(1.5, 240, 120, 1, acceptance=0.5) == mean_staleness_form(1.5, 120, 120, 1), (
        "held: half of what is in flight never reaches the trainer"
    )


def test_how_old_and_how_many_too_old():
    assert oldest_of(1178, 512, 604 * 3, 604) == 7
    chance, limit = random.Random(1), 2 * 300.0
    drawn = sum(max(lognormal(chance, 400, 0.5) for _ in range(8)) > limit for _ in range(20_000)) / 20_000
    assert drop_share(2, 300, 400, 0.5, 8) == pytest.approx(drawn, abs=0.01)
    assert drop_share(1000, 300, 400, 0.5, 8) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("sigma,tokens", [(0.3, 0.65), (0.5, 0.67), (0.7, 0.70), (1.0, 0.73)])
def test_cut_off_oversampling(sigma, tokens):
    told = cut_off(2.5, 604, sigma)
    assert (
        told.rollouts == 0.6
        and told.tokens == pytest.approx(tokens, abs=0.01)
        and told.seconds == pytest.approx(latency_quantile(0.4, 604, sigma))
    )
    assert cut_off(2.5, 604, sigma, 16).seconds > told.seconds, "a whole group takes longer"


def test_three_meters_of_loss():
    assert unfinished_at_fill(1280, 512) == 0.6 and unfinished_at_fill(512, 512) == unfinished_at_fill(96, 512) == 0


def test_groups_of_one_kind():
    told = group_shares((1.08, 0.19), 16)
    assert (told.all_pass, told.all_fail, told.accepted) == (
        pytest.approx(0.55, abs=0.01),
        pytest.approx(0.01, abs=0.005),
        pytest.approx(0.44, abs=0.01),
    )
    assert beta_moment(1, 1, 16) == pytest.approx(1 / 17) and beta_moment(3, 2, 1) == pytest.approx(0.6)
    assert [group_shares(p, 4).accepted for p in (0, 1)] == [0, 0] and group_shares(0.5, 4).accepted == 0.875
    chance = random.Random(2)
    rates = [chance.betavariate(0.6, 0.3) for _ in range(100_000)]
    assert group_shares((0.6, 0.3), 8).accepted == pytest.approx(
        sum(1 - p**8 - (1 - p) ** 8 for p in rates) / len(rates), abs=0.005
    )


def test_a_cold_start_by_drawing():
    """The first batch of groups of 8 with 240 slots that are used again, against the form:
    smaller, equal and larger batches."""
    import heapq

    for batch, sigma in ((80, 0.4), (104, 0.2), (160, 0.3), (240, 0.3), (960, 0.5)):
        seen = []
        for seed in range(30):
            chance = random.Random(seed)
            free, done = [0.0] * 240, []
            for _ in range(4 * 240 // 8 + 60):
                ends = []
                for _ in range(8):
                    end = heapq.heappop(free) + lognormal(chance, 100, sigma)
                    ends.append(end)
                    heapq.heappush(free, end)
                done.append(max(ends))
            seen.append(sorted(done)[batch // 8 - 1])
        assert first_batch_seconds(240, batch, 100, sigma, 8) == pytest.approx(sum(seen) / 30, rel=0.10), batch


def test_quota_and_stragglers():
    assert (
        last_ready_seconds(960, 96, 400) == 3600
        and last_ready_seconds(96, 96, 400) == 0
        and last_ready_seconds(960, 96, 400, 10) == 9 * 410 + 10
    )
    assert last_ready_seconds(960, 0, 400) == 0 and (
        count_waves(960, 96),
        count_waves(961, 96),
        count_waves(5, 0),
        count_waves(0, 0),
    ) == (10, 11, 1, 0)
    assert hit_share(0.001, 96) == pytest.approx(0.09, abs=0.01) and hit_share(0.001, 960) == pytest.approx(
        0.62, abs=0.01
    )
    assert barrier_seconds(960, 400, 0.3, 0.001, 3600) == pytest.approx(
        0.383 * 400 * tail_factor(960, 0.3) + 0.617 * 3600, rel=0.01
    )


def test_paused_generators():
    assert paused_rate(0.6, 512, 0) == pytest.approx(0.6) and paused_rate(0.6, 512, 50) == pytest.approx(
        512 / (512 / 0.6 + 50)
    )
    assert paused_rate(0.6, 512, 50, 5) == pytest.approx(512 / (512 / 0.6 + 10))


@pytest.mark.parametrize(
    "call,told",
    [
        (lambda: rollouts_per_second(-1, 604), "running: -1; give a number above 0"),
        (lambda: rollouts_in_flight(1.95, 0), "latency: 0; give a number above 0"),
        (lambda: rollouts_in_flight(inf, 1), "rate: inf; give a number above 0"),
        (lambda: trainer_shares(512, 0, 186), "rate: 0; give a number above 0"),
        (lambda: trainer_shares(512, 1, 186, -3), "sync: -3; give a number from 0 up"),
        (lambda: tail_factor(0, 0.3), "group: 0; give at least one"),
        (lambda: tail_factor(8, -0.3), "sigma: -0.3; give a number from 0 up"),
        (lambda: latency_quantile(1, 604, 0.3), "part: 1; give a share between 0 and 1"),
        (lambda: mean_staleness_form(1, 100, 100, backlog="drop"), "backlog: unknown name 'drop'"),
        (lambda: mean_staleness_form(1, 100, 100, acceptance=0), "acceptance: 0; give a number above 0"),
        (lambda: mean_staleness_form(1, 100, 100, acceptance=1.2), "acceptance: 1.2; give a share from 0 to 1"),
        (lambda: cut_off(0.9, 604, 0.3), "over: 0.9; start at least as many"),
        (lambda: dispatch_rate(1, 1), "dropped: 1; give a share from 0 to below 1"),
        (lambda: dropped_latency_of(1000, 1.95, 604, 0.6), "running: 1000; what arrives alone keeps 1178"),
        (lambda: group_shares(-0.1, 8), "solve: -0.1; give a share from 0 to 1"),
        (lambda: group_shares((0, 1), 8), "a: 0; give a number above 0"),
        (lambda: fit_beta(0.5, 0.9, 8), "all_pass: 0.9; with a mean of 0.5 it lies between"),
        (lambda: fit_sync_s(0.9, 5, 100), "wait: 0.9; with a ratio of 5 computing takes 20.0%"),
        (lambda: hit_share(2, 8), "chance: 2; give a share from 0 to 1"),
        (lambda: count_waves(8, -1), "quota: -1; give a number from 0 up"),
        (lambda: paused_rate(1, 8, 1, 0), "published: 0; give a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call, told):
    with pytest.raises(ValueError) as refusal:
        call()
    assert told in str(refusal.value)
