"""Intervals of paired differences hold the truth as often as they say, and several comparisons are counted."""

import math

import numpy as np
import pytest

from rlbench.studies.study import arms_chart, differences_table
from rlbench.workbench.ablation_result import Ablation, Arm
from rlbench.workbench.paired_statistics import (
    adjust_differences,
    comparisons_in_words,
    holm,
    interval_widening,
    mean_interval,
    p_value,
    paired_difference,
    t_quantile,
)
from rlbench.workbench.trials import Trial

KINDS = {
    "normal": (lambda random, shape: random.normal(size=shape), 0.0),
    "lognormal(.5)": (lambda random, shape: random.lognormal(0, 0.5, shape), math.exp(0.125)),
    "difference of two lognormal(.5)": (
        lambda random, shape: random.lognormal(0, 0.5, shape) - random.lognormal(0, 0.5, shape),
        0.0,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_intervals_cover_at_least_94_percent(kind, seeds):
    "2,000 draws, the same ones always; then 200,000 of them, whose standard error is 0.0005, through the same width."
    draw, truth = KINDS[kind]
    held = [low <= truth <= high for low, high in map(mean_interval, draw(np.random.default_rng(seeds), (2000, seeds)))]
    assert np.mean(held) >= 0.94, np.mean(held)
    drawn = draw(np.random.default_rng(100 + seeds), (200_000, seeds))
    half = interval_widening(seeds) * t_quantile(0.975, seeds - 1) * drawn.std(1, ddof=1) / math.sqrt(seeds)
    share = np.mean(abs(drawn.mean(1) - truth) <= half)
    assert 0.945 <= share <= 0.99, share
    low, high = mean_interval(drawn[0])
    assert high - low == pytest.approx(2 * half[0])


def test_two_seeds_cover_too_and_are_wide():
    drawn = np.random.default_rng(2).normal(size=(2000, 2))
    assert np.mean([low <= 0 <= high for low, high in map(mean_interval, drawn)]) >= 0.94
    low, high = mean_interval([0.0, 1.0])
    assert high - low > 15  # fifteen times the range of the two numbers
    assert math.isnan(mean_interval([1.0])[0]) and math.isnan(p_value([1.0]))


@pytest.mark.parametrize("pairs", [2, 3, 5, 8, 20, 80])
def test_p_and_interval_agree(pairs):
    "The interval of share 1 - p ends at 0."
    points = np.random.default_rng(pairs).normal(0.4, 1.0, pairs)
    p = p_value(points)
    assert min(map(abs, mean_interval(points, 1 - p))) == pytest.approx(0, abs=1e-6)
    low, high = mean_interval(points)
    assert (p < 0.05) == (low > 0 or high < 0)


def test_holm_by_hand_and_in_simulation():
    "Known values; and ten arms that do nothing have a significant one in at most one ablation of twenty."
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []
    assert holm([0.5, math.nan, 0.6])[0] == 1.0 and math.isnan(holm([0.5, math.nan, 0.6])[1])
    random, wrong, alone = np.random.default_rng(7), 0, 0
    for _ in range(300):
        ps = [p_value(row) for row in random.normal(size=(10, 5))]
        wrong += min(holm(ps)) < 0.05
        alone += min(ps) < 0.05
    assert wrong / 300 <= 0.05 < 0.15 < alone / 300


def made_arm(points, name):
    return paired_difference(name, "base", dict(enumerate(points)), dict.fromkeys(range(len(points)), 0.0))


def test_marks_survive_only_holm():
    "An interval that leaves out 0 is light among several arms, dark alone; null arms and equal pairs are not counted."
    strong, weak, nothing, again = (
        [1.0, 1.1, 0.9, 1.0, 1.05],
        [0.1, 0.2, 0.3, 0.1, 0.4],
        [0.1, -0.1, 0.2, 0.0, -0.1],
        [0.0] * 5,
    )
    found = adjust_differences(
        [
            made_arm(p, n)
            for p, n in ((strong, "strong"), (weak, "weak"), (nothing, "nothing"), (again, "again"), (nothing, "null"))
        ],
        nulls=("null",),
    )
    assert [d.comparisons for d in found] == [3, 3, 3, 1, 1]
    assert [d.clear for d in found[:3]] == [True, True, False] and [d.significant for d in found[:3]] == [
        True,
        False,
        False,
    ]
    assert made_arm(weak, "weak").significant  # taken alone it does
    chart = arms_chart("t", found, "x", ("null",))
    assert (
        chart.series[0].roles == ("blue", "sky", "sky", "grey", "grey")
        and "after Holm's adjustment for 3 comparisons" in chart.subtitle
    )
    table = differences_table(found)
    assert table["Holm's p"][1] == pytest.approx(found[1].adjusted, rel=0.05) and table["Holm's p"][1] > 0.05
    words = comparisons_in_words(found)
    assert (
        words
        == "3 comparisons, Holm-adjusted: strong differs from 0; the interval of weak leaves out 0 only taken alone."
    )


def made_ablation(gains: dict[str, list[float]]) -> Ablation:
    "An ablation whose arms have these held-out rates over a base of 0.5, with a null arm."
    scatter = [0.01, -0.01, 0.0, 0.02, -0.02]

    def trial(name, seed, rate, again=False):
        return Trial(
            name,
            seed,
            again,
            "r",
            "finished",
            "",
            f"{name}{seed}",
            (0, 10),
            (0.2, rate),
            (0.0, 1e4),
            (0.0, 5.0),
            30_000,
            10.0,
            {},
            {},
        )

    trials = [trial("base", s, 0.5 + x, again) for again in (False, True) for s, x in enumerate(scatter)]
    trials += [
        trial(name, s, 0.5 + x + g)
        for name, each in gains.items()
        for s, (x, g) in enumerate(zip(scatter, each, strict=True))
    ]
    return Ablation(
        tuple(Arm(name, {}, name) for name in ("base", *gains)), tuple(trials), {"name": "held_out"}, exact=True
    )


def test_an_ablation_says_how_many_comparisons_and_marks_by_holm():
    "In the chart, the table, the words and the page; the null arm is not counted."
    gains = {
        "strong": [0.2, 0.21, 0.19, 0.2, 0.2],
        "weak": [0.01, 0.02, 0.03, 0.01, 0.04],
        "idle": [0.02, -0.02, 0.0, 0.01, -0.01],
    }
    ablation = made_ablation(gains)
    assert [d.clear for d in ablation.differences] == [True, True, False] and [
        d.significant for d in ablation.differences
    ] == [True, False, False]
    chart = ablation.chart()
    assert (
        chart.series[0].roles == ("grey", "blue", "sky", "sky")
        and "Holm's adjustment for 3 comparisons" in chart.subtitle
    )
    assert ablation.table()["p_holm"].to_list() == [
        None,
        None,
        *(pytest.approx(d.adjusted) for d in ablation.differences),
    ]
    assert (
        "3 comparisons, Holm-adjusted: strong differs from 0; the interval of weak" in repr(ablation)
        and "3 comparisons" in ablation._repr_html_()
    )
    alone = made_ablation({"weak": gains["weak"]})
    assert (
        alone.differences[0].significant
        and "1 comparison: it differs from 0." in repr(alone)
        and "dark: it leaves out 0" in alone.chart().subtitle
    )
