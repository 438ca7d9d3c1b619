"""The expected share of groups without any advantage, from the counts of a preflight:
close to the truth, inside its interval."""

import numpy as np
import polars as pl
import pytest
from inline import inline_run

import rlbench as rl
from rlbench.advantage import expected_zero_advantage, fit_solve_beta, zero_advantage_of_beta
from rlbench.views.report_tables import preflight_in_words

GROUP = 16


def drawn_counts(a: float, b: float, tasks: int, tries: int, draws: int):
    "Made-up preflights: tasks with solve rates from Beta(a, b), each seen right so many times."
    random = np.random.default_rng([tasks, tries, round(100 * a), round(100 * b)])
    return random.binomial(tries, random.beta(a, b, (draws, tasks)))


@pytest.mark.slow
@pytest.mark.parametrize("a, b", [(0.2, 0.2), (0.1, 0.15), (0.3, 3.0), (1.0, 1.0), (2.0, 2.0), (2.0, 8.0), (5.0, 5.0)])
def test_the_share_is_right_and_its_interval_covers(a, b):
    """48 tasks with 8 tries, from U-shaped to narrow: 95 % intervals cover in 200 draws as often as chance allows,
    and the mean estimate is near the truth."""
    found = np.array([expected_zero_advantage(right, [8] * 48, GROUP) for right in drawn_counts(a, b, 48, 8, 200)])
    truth = float(zero_advantage_of_beta(a, b, GROUP))
    covered = np.mean((found[:, 1] <= truth) & (truth <= found[:, 2]))
    assert covered >= 0.91, covered  # 95 % less 2.6 standard errors of 200 draws
    assert abs(found[:, 0].mean() - truth) < 0.02, (found[:, 0].mean(), truth)
    assert (found[:, 1] <= found[:, 0]).all() and (found[:, 0] <= found[:, 2]).all()


@pytest.mark.slow
def test_what_a_prior_for_each_task_got_wrong():
    "Middling tasks: 3.5 % and not 12 %. U-shaped ones: 56 % and not 41 %."
    for shape, prior_said, truth in (((2, 2), 0.117, 0.035), ((0.2, 0.2), 0.41, 0.556)):
        shares = [expected_zero_advantage(right, [8] * 48, GROUP)[0] for right in drawn_counts(*shape, 48, 8, 60)]
        assert abs(np.mean(shares) - truth) < 0.3 * abs(prior_said - truth), (shape, np.mean(shares))


# of the embedded policy at temperature 1: right of 8 responses to each of the first 48 tasks of the preset `tiny`,
# seed 0
TINY_RIGHT = [
    1,
    5,
    8,
    4,
    5,
    0,
    3,
    3,
    4,
    1,
    6,
    0,
    0,
    1,
    2,
    4,
    3,
    5,
    2,
    5,
    4,
    0,
    1,
    4,
    4,
    3,
    4,
    3,
    3,
    2,
    3,
    3,
    1,
    2,
    2,
    2,
    4,
    0,
    7,
    0,
    2,
    4,
    1,
    6,
    4,
    4,
    5,
    1,
]
TINY_GROUPS = [
    4,
    18,
    36,
    39,
    37,
    34,
    24,
    21,
    11,
    16,
    11,
    4,
    1,
    0,
    0,
    0,
    0,
]  # of 256 groups of 16: how many had 0, 1, ... 16 right


def test_the_tiny_policy_s_share_is_a_few_percent():
    """A prior for each task said 13.6 % on such counts.

    Groups of 16 that were really drawn, and a fit to all of them, lie inside the interval."""
    share, low, high = expected_zero_advantage(TINY_RIGHT, [8] * 48, GROUP)
    assert share == pytest.approx(0.03, abs=0.015) and high < 0.136, (share, low, high)
    drawn = (TINY_GROUPS[0] + TINY_GROUPS[-1]) / sum(TINY_GROUPS)
    right = np.repeat(np.arange(17), TINY_GROUPS)
    fitted, *_ = expected_zero_advantage(right, [16] * len(right), GROUP)
    assert (
        low < drawn < high and low < fitted < high and abs(fitted - drawn) < 2.6 * (drawn / sum(TINY_GROUPS)) ** 0.5
    ), (drawn, fitted)


@pytest.mark.slow
@pytest.mark.parametrize("a, b", [(0.2, 0.2), (2.0, 2.0)])
def test_few_tasks_give_a_wide_interval_that_covers(a, b):
    found = np.array([expected_zero_advantage(right, [4] * 8, GROUP) for right in drawn_counts(a, b, 8, 4, 150)])
    truth = float(zero_advantage_of_beta(a, b, GROUP))
    assert np.mean((found[:, 1] <= truth) & (truth <= found[:, 2])) >= 0.91
    assert np.mean(found[:, 2] - found[:, 1]) > 0.25


def test_edges_have_an_answer():
    "All wrong, all right, all alike, all or nothing, one task, other numbers of tries, no task."
    share, low, high = expected_zero_advantage([0] * 48, [8] * 48, GROUP)
    assert share > 0.99 and 0.9 < low < 0.97 and high == pytest.approx(1.0, abs=1e-3)
    assert expected_zero_advantage([8] * 48, [8] * 48, GROUP) == pytest.approx((share, low, high), abs=1e-6)
    alike = expected_zero_advantage([4] * 48, [8] * 48, GROUP)
    assert alike[0] < 0.001 and alike[2] < 0.01
    split = expected_zero_advantage([0, 8] * 24, [8] * 48, GROUP)
    assert split[0] > 0.98 and split[1] > 0.85
    one = expected_zero_advantage([2], [4], GROUP)
    assert one[2] - one[1] > 0.5
    mixed = expected_zero_advantage([1, 3, 8, 0], [2, 8, 8, 0], GROUP)
    assert 0 <= mixed[1] <= mixed[0] <= mixed[2] <= 1
    assert (
        np.isnan(expected_zero_advantage([], [], GROUP)).all()
        and np.isnan(expected_zero_advantage([0], [0], GROUP)).all()
    )
    with pytest.raises(ValueError, match="tries: no task was tried"):
        fit_solve_beta([], [])


def test_the_fit_finds_the_distribution():
    counts = drawn_counts(0.5, 1.5, 2000, 16, 1)[0]
    a, b = fit_solve_beta(counts, [16] * 2000)
    assert a == pytest.approx(0.5, rel=0.1) and b == pytest.approx(1.5, rel=0.1)


def test_a_run_says_the_interval(tmp_path):
    "The preflight's row holds the interval, its words say it, and other evaluations have neither."
    table = {
        "steps": 1,
        "group": 4,
        "batch": 16,
        "preflight": 12,
        "preflight_k": 4,
        "eval": [{"count": 6, "every": 1}],
    }
    run = rl.Run(inline_run(tmp_path, "a", table).folder)
    row = run.evals.filter(pl.col("eval") == "preflight").row(0, named=True)
    assert 0 <= row["zero_advantage_low"] <= row["zero_advantage"] <= row["zero_advantage_high"] <= 1
    words = preflight_in_words(row, run.config.band, run.config.group)
    assert f"({row['zero_advantage_low']:.1%} to {row['zero_advantage_high']:.1%}) at group 4" in words
    rest = run.evals.filter(pl.col("eval") != "preflight")
    assert len(rest) and rest["zero_advantage"].null_count() == rest["zero_advantage_low"].null_count() == len(rest)
