"What the planner's bench counts, what it leaves out, and that each change is taken back."

from dataclasses import asdict, replace
from types import SimpleNamespace

import polars as pl
import pytest

from rlbench.bench.planner import (
    HEAD,
    REGIMES,
    bench_planner,
    make_move,
    measure_stretch,
    planner_result,
    row_of_turns,
)
from rlbench.bench.planner_drawn import DrawnRow, bench_virtual, draw_run, drawn_result, is_valid
from rlbench.runtime.forecasts import Figures, Prediction


class Live:
    """A run that makes a version of 32 rollouts in half a second, and for half of that its trainer waits;
    each look finds it 25 versions on."""

    name = "made up"

    def __init__(self, versions):
        rows = range(1, versions + 1)
        self.steps = pl.DataFrame(
            {
                "version": list(rows),
                "at": [v / 2 for v in rows],
                "seconds": [0.5] * versions,
                "trained_rollouts": [32] * versions,
                "trainer_wait": [0.25] * versions,
                "lag_in_flight": [1.0 + v % 2 for v in rows],
                "lag_in_queue": [0.5] * versions,
            }
        )
        self.told, self.version = [], -20

    def set(self, **knobs):
        self.told.append(knobs)

    @property
    def status(self):
        self.version += 25
        return SimpleNamespace(version=self.version)


def said(wait, rate, staleness):
    return Prediction({}, 0, (1, 2), *[Figures(wait, rate, staleness)] * 4)


def test_what_a_run_did_has_an_error_of_its_own():
    came = measure_stretch(Live(40), 8, 38)
    value, wrong = came.figures, came.errors
    assert (value.wait, value.rate, value.staleness, came.versions) == (0.5, 3840.0, 2.0, 30)
    assert wrong.wait == wrong.rate == pytest.approx(0.0, abs=1e-9) and 0 < wrong.staleness < 0.2
    with pytest.raises(RuntimeError, match="1 versions after 39; give more seconds"):
        measure_stretch(Live(40), 39)


@pytest.mark.parametrize(
    ("regime", "move"),
    [(regime, move) for regime in REGIMES for move in ("as it is", *regime.moves)],
    ids=lambda part: getattr(part, "name", part),
)
def test_a_change_is_made_looked_at_and_taken_back(regime, move):
    live, base, knobs = Live(40), regime.knobs, regime.moves.get(move, {})
    came = make_move(live, base, knobs, 0.0)
    assert live.told == ([knobs, {knob: base[knob] for knob in knobs}] if knobs else [])
    assert came.versions == 30 - (5 + 1 + knobs.get("staleness", base["staleness"]) + 2)
    assert came.figures.rate == 3840.0


def test_five_changes_of_each_run_change_something():
    for regime in REGIMES:
        assert len(regime.moves) == 5 and all(
            regime.knobs[knob] != value for knobs in regime.moves.values() for knob, value in knobs.items()
        )


def test_only_changes_are_counted():
    came = measure_stretch(Live(40), 8)

    def row(name, *figures, kind="move", regime="tools"):
        return row_of_turns(regime, name, {}, [(said(*figures), came)], kind)

    rows = [row("as it is", 0.9, 99.0, 0.0, kind="unchanged")]
    rows += [row(name, 0.54, 3840.0 * 1.09, 2.29) for name in ("one", "two", "three")]
    rows += [
        row("too much wait", 0.56, 3840.0, 2.0),
        row("too slow", 0.5, 3840.0 * 0.89, 2.0),
        row("too old", 0.5, 3840.0, 2.31),
    ]

    def part(rows):
        return {"rows": [asdict(row) for row in rows], "fitted": {}, "seconds": {"simulated": 1.25, "formula": 0.002}}

    other = [
        row("one", 0.5, 3840.0, 2.0, regime="processor"),
        row("as it is", 0.5, 3840.0, 2.0, kind="unchanged", regime="processor"),
    ]
    found = planner_result(
        [part(rows), part(other)], row("learning", 0.5, 3840.0, 2.0, kind="drifting", regime="processor"), {}
    )
    assert (
        found.inside == {"tools": 3, "processor": 1}
        and found.moves == {"tools": 6, "processor": 1}
        and [row.inside for row in found.rows[:7]] == [False, True, True, True, False, False, False]
    )
    told = str(found).splitlines()
    assert (
        "\n".join(told[:2]) == HEAD
        and told[3] == "tools: 3 of 6 inside; an answer took 1.25 s, by formula 2 ms"
        and told[12].startswith("processor: 1 of 1 inside")
        and told[-1].endswith("inside, not counted")
    )


def test_a_move_is_judged_by_the_mean_of_its_turns():
    "Each turn alone is off by more than is allowed, the mean is not; and both are told."
    came = measure_stretch(Live(40), 8)
    row = row_of_turns(
        "tools",
        "twice",
        {},
        [
            (said(0.58, 3840.0 * 1.2, 2.0), came),
            (said(0.42, 3840.0 * 0.8, 2.0), came),
        ],
    )
    assert row.inside and (row.wait_error, row.rate_error, row.versions) == (0.0, 0.0, 64)
    assert row.turns == (
        (pytest.approx(0.08), pytest.approx(0.2), 0.0),
        (pytest.approx(-0.08), pytest.approx(-0.2), 0.0),
    )
    assert row.error.staleness == pytest.approx(came.errors.staleness / 2**0.5)


def test_too_short_a_look_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seconds: 5; a run needs 10 or more"):
        bench_planner(tmp_path / "none", seconds=5)
    assert not (tmp_path / "none").exists()


def test_drawn_runs_are_valid_and_always_the_same():
    for index in range(12):
        table, moves = draw_run(index, 4)
        assert (table, moves) == draw_run(index, 4) and is_valid(table) and len(moves) == 4
        assert all(
            is_valid({**table, **move}) and any(table[knob] != value for knob, value in move.items()) for move in moves
        )


def test_what_came_is_counted_against_the_range():
    def at(wait, rate, staleness):
        return Figures(wait, rate, staleness)

    def row(knobs, came):
        return DrawnRow(
            0, knobs, at(0.5, 100.0, 2.0), at(0.45, 95.0, 1.9), at(0.55, 105.0, 2.1), at(0.6, 110.0, 2.5), came
        )

    found = drawn_result(
        [
            row({}, at(0.52, 102.0, 2.1)),
            row({}, at(0.54, 100.0, 2.0)),
            row({"batch": 8}, at(0.5, 100.0, 2.0)),
            row({"batch": 4}, at(0.6, 100.0, 2.0)),
        ],
        {},
    )
    assert (
        found.as_it_is == 0.5
        and found.coverage == pytest.approx(5 / 6, abs=1e-4)
        and found.width == {"wait": 0.1, "rate": 0.1, "staleness": 0.2}
    )
    assert found.as_predicted == found.as_it_is  # what was not made again counts as predicted
    again = drawn_result(
        [replace(row({}, at(0.52, 102.0, 2.1)), replayed=at(0.6, 102.0, 2.1)), row({"batch": 8}, at(0.5, 100.0, 2.0))],
        {},
    )
    assert again.as_it_is == 0.0 and again.as_predicted == 1.0
    assert (
        found.runs == found.changes == 2
        and found.covered == {"wait": 0.5, "rate": 1.0, "staleness": 1.0}
        and "as it is: 50.0% of 2 runs" in str(found)
    )


@pytest.mark.slow
def test_a_drawn_run_is_predicted_made_and_kept(tmp_path):
    first = bench_virtual(tmp_path, runs=1, changes=1, processes=1)
    again = bench_virtual(tmp_path, runs=1, changes=1, processes=1)
    assert first.rows == again.rows and len(first.rows) == 2 and first.runs == first.changes == 1
    with pytest.raises(ValueError, match="runs: 0 is too little"):
        bench_virtual(tmp_path, runs=0, changes=1)
