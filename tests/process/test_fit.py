"A fit recovers the stated times of a run on the virtual clock, and predicts another one."

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from patience import until
from scripted import WITHOUT_MODEL

import rlbench.planning.fit_simulation
import rlbench.planning.predict
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.bench.planner_drawn import NEAR
from rlbench.loop.config import make_config
from rlbench.loop.config_files import to_toml
from rlbench.loop.world import DecodeCurve, KnownRollout, Spread, World
from rlbench.planning.fit import fit_run, replay_figures
from rlbench.planning.fit_decode import curve_of, stated_curve
from rlbench.planning.fit_reading import known_rollout
from rlbench.planning.fit_rollouts import cut_mean, group_correlation, solve_of, whole_lengths
from rlbench.planning.fit_turns import Turns, writing_share
from rlbench.planning.predict import cycle_error, predict_run
from rlbench.planning.queueing import group_shares
from rlbench.planning.simulation import Simulation, task_luck
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.forecasts import FILE, filling_versions, forecast_errors, measured_figures, read_forecasts
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.handle import attach, ending, run

TIMES = {
    "decode": 0.01,
    "sequence": 0.0002,
    "prefill": 0.0,
    "train": 0.0004,
    "publish": 0.02,
    "score": 0.001,
    "scripted_length": 60.0,
    "scripted_tail": 0.4,
}
TABLE = {
    "clock": "virtual",
    "generator": "scripted",
    "placement": "split",
    "steps": 50,
    "group": 4,
    "batch": 32,
    "concurrency": 16,
    "staleness": 4,
    "decode_steps": 2,
    "max_tokens": 1000,
    "filter": "none",
    "sampler": "uniform",
    "preflight": 48,
    "preflight_k": 4,
    "eval": [],
    "alerts": False,
    "checkpoint_every": 0,
    "virtual": TIMES,
}


def run_virtually(room, name, **knobs):
    folder, config = create_run_folder(room, name), make_config({**TABLE, **knobs})
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    drive(Driver(folder, config, make_pools(config)))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return run_virtually(tmp_path_factory.mktemp("fit"), "base")


@pytest.fixture(scope="module")
def fitted(base):
    return fit_run(base)


@pytest.fixture
def brief(monkeypatch):
    "For tests in which a prediction need not be near: its simulations train twelve versions instead of up to sixty."
    for module in (rlbench.planning.fit_simulation, rlbench.planning.predict):
        monkeypatch.setattr(module, "MOST_VERSIONS", 12)


def test_the_stated_times_are_found(fitted):
    found, world = fitted.estimates, fitted.world
    assert found["base"].value == pytest.approx(0.01, rel=1e-6) and found["each"].value == pytest.approx(
        0.0002, rel=1e-6
    )
    assert world.prefill_token_s == pytest.approx(0.0, abs=1e-9) and fitted.unsure == 0.0
    assert (
        found["train_token"].value == pytest.approx(0.0004, rel=1e-3)
        and found["sync"].value == pytest.approx(0.01, rel=0.01)
        and found["score"].value == pytest.approx(0.001, rel=0.02)
    )
    assert cut_mean(world.response_tokens) == pytest.approx(
        60, rel=0.05
    ) and world.response_tokens.sigma == pytest.approx(0.4, abs=0.05)
    assert found["tool"].source == "assumed" and found["shared"].value == pytest.approx(1.0, abs=0.02)
    assert found["fails"].value == 0 and found["passed"].value == 1


@pytest.mark.parametrize("knobs", [{}, {"concurrency": 8}, {"staleness": 1}, {"batch": 16}], ids=str)
def test_another_run_does_what_was_predicted(base, fitted, tmp_path, knobs):
    "Without a change the other run is the same one: on the virtual clock runs repeat."
    predicted = predict_run(fitted, **knobs)
    folder = run_virtually(tmp_path, "moved", **knobs) if knobs else base
    steps = read_table(folder, "steps")
    measured = measured_figures(steps.filter(pl.col("version") > filling_versions(knobs.get("staleness", 4))))
    found = forecast_errors(predicted.simulated, measured)
    assert found.inside, (predicted, measured)
    assert predicted.low.rate <= predicted.simulated.rate <= predicted.high.rate and not predicted.words
    assert predicted.formula.rate == pytest.approx(predicted.simulated.rate, rel=0.3)


OTHERS = {
    "two generators": ({"generators": 2}, {"concurrency": 8}),
    "filtered": ({"filter": "zero_advantage"}, {"group": 8}),
    "several turns": (
        {
            "environment": {"name": "scripted", "low": 2, "high": 4},
            "tasks": {"name": "chains", "low": 2},
            "max_turns": 4,
            "observation_tokens": 32,
            "batch": 16,
            "decode_steps": 4,
            "virtual": {**TIMES, "scripted_length": 30.0},
        },
        {"concurrency": 8},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_runs_of_other_kinds_are_predicted(kind, tmp_path):
    "With several generators, with groups that teach nothing filtered out, and with episodes of several turns."
    base, knobs = OTHERS[kind]
    found = fit_run(run_virtually(tmp_path, "base", **base, steps=36))
    steps = read_table(run_virtually(tmp_path, "moved", **{**base, **knobs}, steps=36), "steps")
    off = forecast_errors(
        predict_run(found, **knobs).simulated, measured_figures(steps.filter(pl.col("version") > filling_versions(4)))
    )
    assert off.inside, (found, off)
    assert (found.estimates["passed"].value < 0.95) == (kind == "filtered") and (
        found.estimates["turns"].value > 2
    ) == (kind == "several turns")


def test_a_prediction_repeats(fitted, brief):
    assert replace(predict_run(fitted, group=8), at=0.0) == replace(predict_run(fitted, group=8), at=0.0)


def test_a_price_makes_dollars(fitted):
    found = predict_run(fitted, dollars_per_hour=4.0, simulated=False)
    assert (
        found.formula.dollars == pytest.approx(4.0 * 1000 / (60 * found.formula.rate))
        and predict_run(fitted, simulated=False).formula.dollars is None
    )


def test_what_comes_with_every_batch_goes_with_its_rollouts(fitted):
    "A run with batches of one size cannot tell the two apart, so twice the batch takes twice as long."
    slow = replace(fitted, world=replace(fitted.world, train_s=1.0, train_token_s=0.0))
    one, two = predict_run(slow, simulated=False), predict_run(slow, batch=64, simulated=False)
    assert two.formula.wait == pytest.approx(one.formula.wait, abs=0.02) and two.formula.rate == pytest.approx(
        one.formula.rate, rel=0.02
    )


def test_what_is_not_known_of_the_trainer_makes_the_range_wider(fitted, brief):
    slow = replace(fitted, world=replace(fitted.world, train_s=4.0, train_token_s=0.0))
    unsure = replace(
        slow, estimates={**slow.estimates, "train": replace(slow.estimates["train"], value=4.0, low=3.2, high=4.8)}
    )
    sure, wide = (found.high.rate - found.low.rate for found in map(predict_run, (slow, unsure)))
    assert wide > 3 * sure > 0


def test_what_the_ledger_cannot_know_is_said(fitted):
    assert "not in the ledger" in predict_run(fitted, learning_rate=0.01, simulated=False).words[0]
    assert "loss" in predict_run(fitted, {"loss.high": 0.3}, simulated=False).words[0]
    assert "left out" in predict_run(fitted, checkpoint_every=5, simulated=False).words[0]


@pytest.mark.parametrize(
    "knobs, told",
    [
        ({"concurency": 8}, "concurency.*did you mean.*concurrency"),
        ({"concurrency": 0}, "concurrency"),
        ({"placement": "colocated"}, "placement"),
        ({"batch": 30}, "batch"),
    ],
    ids=str,
)
def test_a_knob_that_a_run_would_refuse_is_refused(fitted, knobs, told):
    with pytest.raises(ValueError, match=told):
        predict_run(fitted, **knobs)


def test_a_run_with_too_few_versions_is_refused(base):
    with pytest.raises(ValueError, match="has 4 versions after version 6 .*12 are needed; let it make 8 more"):
        fit_run(base, until=10)


def test_a_run_whose_actors_take_turns_is_refused(tmp_path):
    with pytest.raises(ValueError, match="placement"):
        fit_run(run_virtually(tmp_path, "turns", placement="colocated", steps=3))


def test_predictions_are_kept_and_held_against_what_happened(base, brief):
    run = attach(base)
    run.predict()
    made = run.predict(concurrency=8)
    assert read_forecasts(base)[-1] == made and made.version == 50
    with open(base / FILE, "a", encoding="utf-8") as torn:
        torn.write('{"knobs": {"conc')
    assert read_forecasts(base)[-1] == made
    assert all(each.measured is None for each in run.predictions)  # no version was made since


def test_what_came_of_a_prediction_is_looked_up_from_where_its_knobs_were_set(base):
    (base / FILE).unlink(missing_ok=True)
    from rlbench.runtime.forecasts import keep_forecast

    made = predict_run(fit_run(base, until=30))
    keep_forecast(base, replace(made, version=30))
    (came,) = attach(base).predictions
    assert came.versions == (31, 50) and came.errors.inside, came


def test_a_trainer_that_always_trains_is_no_sign_that_it_slows_the_generator_down():
    """Training covers nearly all of every turn: what a token would take without it cannot be told,
    and its pace is what was seen."""
    chance = np.random.default_rng(0)
    tokens = chance.integers(5, 30, 300).astype(float)
    seconds = tokens * 0.01 * chance.lognormal(0, 0.3, 300)
    found = curve_of(
        Turns(
            np.zeros(300), seconds, tokens, np.full(300, 32.0), seconds * np.clip(chance.normal(0.97, 0.1, 300), 0, 1)
        )
    )
    assert found.shared.value == 1.0 and found.shared.source == "assumed"
    assert found.base.value + 32 * found.each.value == pytest.approx(0.0105, rel=0.15)


ISSUE = {
    **TABLE,
    "steps": 24,
    "group": 8,
    "batch": 128,
    "concurrency": 96,
    "decode_steps": 8,
    "preflight": 0,
    "virtual": {**TIMES, "sequence": 0.0, "scripted_length": 12.0, "train": 0.0006},
}


@pytest.fixture(scope="module")
def looking(tmp_path_factory):
    """A run whose responses are little longer than the eight steps between two looks of its generator,
    and whose trainer never waits."""
    return run_virtually(
        tmp_path_factory.mktemp("looks"),
        "looking",
        **{key: value for key, value in ISSUE.items() if TABLE.get(key) != value},
    )


@pytest.fixture(scope="module")
def looking_fit(looking):
    return fit_run(looking)


@pytest.fixture(scope="module")
def looking_forecast(looking_fit):
    return predict_run(looking_fit).simulated


def test_a_run_on_the_virtual_clock_is_met_as_it_is(looking_fit, looking_forecast):
    "A look of eight steps is longer than some responses, training goes on all the time, and nothing shares a machine."
    forecast, seen = looking_forecast, looking_fit.seen
    assert (
        looking_fit.world.decode_slowdown == 1.0
        and abs(forecast.rate / seen.rate - 1) < 0.03
        and abs(forecast.wait - seen.wait) < 0.03
        and abs(forecast.staleness - seen.staleness) < 0.2
    )


def test_what_a_finished_run_only_uses_up_is_not_looked_at(looking_fit, looking_forecast):
    assert looking_fit.versions[1] < 24
    assert looking_fit.seen.staleness == pytest.approx(looking_forecast.staleness, abs=0.2)


def without_decode_steps(folder):
    "The folder as an older rlbench wrote it."
    for segment in (folder / "ledger" / "steps").glob("*.parquet"):
        pl.read_parquet(segment).drop("decode_steps", "verdicts").write_parquet(segment)
    return folder


def test_an_older_run_that_was_always_full_cannot_tell_what_a_sequence_costs(tmp_path):
    "So another concurrency is predicted with a wide range, and it is said."
    costs = {**TIMES, "sequence": 0.0, "train": 0.00001, "scripted_length": 30.0}
    knobs = {"staleness": 8, "batch": 16, "virtual": costs}
    full = without_decode_steps(run_virtually(tmp_path, "full", concurrency=8, **knobs))
    found = fit_run(full, until=40)  # before its end, where the load falls
    more, same = predict_run(found, concurrency=16), predict_run(found)
    assert found.unsure == 0.4 and found.estimates["each"].source == "assumed" and "always had about" in more.words[0]
    assert (more.high.rate - more.low.rate) / more.simulated.rate > 3 * (
        same.high.rate - same.low.rate
    ) / same.simulated.rate
    real = measured_figures(
        read_table(run_virtually(tmp_path, "more", concurrency=16, **knobs), "steps").filter(
            (pl.col("version") > 10) & (pl.col("version") < 40)
        )
    )
    assert more.low.rate < real.rate < more.high.rate


def worked(tokens_a_step: list[int]) -> pl.DataFrame:
    """Versions of 100 decode steps each, two generators together, with so many sequences at work,
    and prompts of 6 tokens."""
    steps = np.full(len(tokens_a_step), 100)
    prompts = 6 * np.arange(20, 20 + len(steps))
    tokens = steps * np.array(tokens_a_step)
    seconds = (0.01 * steps + 0.0002 * tokens + 0.001 * prompts) / 2  # of a generator
    return pl.DataFrame(
        {"decode_steps": steps, "decode_tokens": tokens, "prefill_tokens": prompts, "generator_compute": seconds}
    )


def test_stated_costs_are_told_apart_where_the_work_differs():
    varied = stated_curve(worked([8, 9, 8, 7, 8, 6]), 2)
    assert (varied.base.value, varied.each.value, varied.prefill) == pytest.approx(
        (0.01, 0.0002, 0.001)
    ) and varied.error == 0.0
    full = stated_curve(worked([8] * 6), 2)
    assert full.base.value == pytest.approx(0.01 + 8 * 0.0002) and full.prefill == pytest.approx(0.001)
    assert full.each.source == "assumed" and full.error == 0.4 and full.sequences_at_work == 8
    noisy = worked([8, 9, 8, 7, 8, 6]).with_columns(
        pl.col("generator_compute") * pl.Series([1.0, 1.01, 0.99, 1.0, 1.02, 1.0])
    )
    assert stated_curve(noisy, 2) is None and stated_curve(worked([8] * 4), 2) is None


def test_solve_rates_let_as_many_groups_through_as_were_seen():
    chance = np.random.default_rng(5)
    for a, b in ((0.4, 0.6), (2.0, 3.0), (20.0, 10.0)):
        solved = chance.binomial(8, chance.beta(a, b, 400)).astype(float)
        found = solve_of(solved, np.full(400, 8.0))
        mixed = ((solved > 0) & (solved < 8)).mean()
        assert group_shares(found, 8).accepted == pytest.approx(mixed, abs=1e-6)
        assert found[0] / sum(found) == pytest.approx(solved.mean() / 8)
    assert solve_of(np.array([4.0, 4.0, 4.0]), np.full(3, 8.0)) == 0.5


MADE_AGAIN = [
    {"decode_steps": 8, "filter": "zero_advantage"},
    {"stragglers": "wait", "generators": 2},
    {"stragglers": "partial", "decode_steps": 5, "publish_every": 2},
    {"stragglers": "oversample", "oversample": 0.6, "straggler_unit": "rollout", "concurrency": 12},
    {"stragglers": "oversample", "oversample": 0.9, "generators": 2, "backlog": "drop_oldest"},
]


@pytest.mark.parametrize("knobs", MADE_AGAIN, ids=str)
def test_the_fitted_world_makes_the_run_again(tmp_path, knobs):
    "With the lengths and verdicts that the run had; prompts cost time, and those of partial rollouts are read again."
    virtual = {**TIMES, "prefill": 0.001, "scripted_length": 20.0}
    found = fit_run(run_virtually(tmp_path, "again", **knobs, preflight=0, virtual=virtual), until=40)
    again = replay_figures(found)
    waits = knobs.get("stragglers") == "wait"  # two generators that wait: see the limits of the simulator
    rate, wait, staleness = (NEAR[0], 0.02, 0.1) if waits else (0.01, 0.01, 0.05)
    assert again.rate == pytest.approx(found.seen.rate, rel=rate)
    assert again.wait == pytest.approx(found.seen.wait, abs=wait)
    assert again.staleness == pytest.approx(found.seen.staleness, abs=staleness)


def test_a_run_that_began_with_a_preflight_is_made_again(tmp_path):
    "Its groups come before those of training, and the simulation has none."
    found = fit_run(run_virtually(tmp_path, "after", decode_steps=8, filter="zero_advantage"), until=40)
    again = replay_figures(found)
    assert again.rate == pytest.approx(found.seen.rate, rel=0.02)
    assert again.staleness == pytest.approx(found.seen.staleness, abs=0.1)


def test_a_stopped_rollout_is_simulated_longer_than_it_was_when_it_was_stopped():
    config = make_config({"clock": "virtual", "generator": "scripted", "placement": "split", "steps": 9})
    world = World(
        response_tokens=Spread(20.0, 0.6, 90.0),
        group_correlation=0.3,
        known_rollouts={
            (0, 0): KnownRollout(17.0),
            (0, 1): KnownRollout(60.0, stopped=True),
            (0, 2): KnownRollout(89.5, stopped=True),
        },
    )
    s = Simulation(config, world)
    drawn = [s.draw_tokens(3, 60.0) for _ in range(200)]
    assert min(drawn) > 60.0 and max(drawn) <= 90.0 and len(set(drawn)) > 100
    assert s.draw_tokens(3, 400.0) == 401.0  # no length of this world is longer
    assert known_rollout(40, 1.0, True, "stop") == KnownRollout(40.0, 1.0) and known_rollout(
        40, None, None, "aborted"
    ) == KnownRollout(40.0, None, True)
    assert known_rollout(0, None, None, None).stopped


def test_a_task_that_is_served_again_is_as_long_as_before():
    alike = [task_luck(task) for task in range(1000)]
    assert np.mean(alike) == pytest.approx(0.0, abs=0.01) and np.std(alike) == pytest.approx(1.0, abs=0.02)
    s = Simulation(
        make_config({"clock": "virtual", "generator": "scripted", "placement": "split"}), World(group_correlation=0.5)
    )
    found = np.array([[s.draw_luck(task) for task in range(400)] for _ in range(2)])
    assert np.corrcoef(found)[0, 1] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("publish_every", "versions", "wider"), [(1, 15, 0.0), (2, 15, 1 / 30), (3, 10, 0.1)])
def test_the_range_of_staleness_holds_any_part_of_a_cycle_of_publications(publish_every, versions, wider):
    assert cycle_error(publish_every, versions) == pytest.approx(wider)
    ages = np.arange(10 * versions) % publish_every
    means = [ages[first : first + versions].mean() for first in range(publish_every)]
    assert np.abs(np.array(means) - (publish_every - 1) / 2).max() <= wider + 1e-12


def test_stopped_responses_count_as_longer_than_what_was_written():
    chance = np.random.default_rng(3)
    whole, limit = chance.lognormal(4, 0.6, 4000), chance.lognormal(4.5, 0.5, 4000)
    found = whole_lengths(np.minimum(whole, limit), whole > limit)
    assert found.mean() == pytest.approx(whole.mean(), rel=0.03) and whole[whole <= limit].mean() < 0.85 * whole.mean()


def test_lengths_that_go_with_the_group_are_seen():
    chance = np.random.default_rng(4)
    groups = np.repeat(np.arange(400), 8)
    together = np.repeat(chance.normal(size=400), 8) * 0.6 + chance.normal(size=3200) * 0.8
    assert (
        group_correlation(np.exp(together), groups) == pytest.approx(0.36, abs=0.06)
        and group_correlation(np.exp(chance.normal(size=3200)), groups) == 0.0
    )


def test_a_token_that_costs_nothing_alone_can_be_simulated(fitted, brief):
    "A noisy run can leave nothing for the base of its decode curve."
    world = replace(fitted.world, decode=DecodeCurve(0.0, 0.0008))
    found = predict_run(replace(fitted, world=world), concurrency=8)
    assert found.simulated.rate > 0 and found.formula.rate == pytest.approx(found.simulated.rate, rel=0.3)


def test_a_live_run_is_predicted_turned_and_held_against_it(tmp_path):
    "In real processes: what is said of a knob stands beside what came, once it was set and the run has filled up."
    with ending(
        run(
            "tiny",
            runs=tmp_path,
            name="live",
            placement="split",
            steps=1_000_000,
            batch=32,
            group=8,
            learning_rate=0.0,
            staleness=2,
            filter="none",
            preflight=0,
            eval=[],
            checkpoint_every=0,
            **WITHOUT_MODEL,
        )
    ) as live:
        until(lambda: live.status and live.status.version >= filling_versions(2) + 16, 120)
        made = live.predict(concurrency=8)
        assert live.predictions[-1].measured is None
        live.set(concurrency=8)
        until(lambda: live.predictions[-1].measured, 120, every=0.25)
        (came,) = live.predictions
    assert came.prediction == made and made.version >= 20 and came.versions[0] >= made.version + filling_versions(2)
    assert came.measured.rate > 0 < came.measured.staleness <= 2 and 0 <= came.measured.wait < 1
    assert came.errors.rate == pytest.approx(
        made.simulated.rate / came.measured.rate - 1, abs=1e-3
    ) and "off by" in str(came)


def test_the_panel_draws_the_newest_prediction(base, brief):
    from rlbench.runtime.live_view import LiveView
    from rlbench.views.card_charts import queue_charts, time_charts

    (base / FILE).unlink(missing_ok=True)
    view = LiveView(base)
    assert view.poll().prediction is None
    attach(base).predict(concurrency=8)
    snapshot = view.poll()
    names = [
        series.name
        for chart in (*queue_charts(snapshot), *time_charts(snapshot))
        for series in chart.series
        if hasattr(series, "name")
    ]
    assert names.count("predicted (concurrency 8)") == 2  # staleness, and the trainer's time


def test_sliders_answer_by_formula_and_say_what_does_not_go_together(fitted):
    from rlbench.views.what_if import WhatIf

    sliders = WhatIf(fitted)
    before = sliders.answer.value
    sliders.sliders["concurrency"].value = 8
    assert sliders.answer.value != before and "simulated" not in sliders.answer.value
    sliders.timer.cancel()
    sliders.sliders["group"].value = 5
    sliders.timer.cancel()
    assert "batch" in sliders.answer.value


def test_what_is_written_beside_a_batch_makes_it_longer(fitted, brief):
    "On a machine that both use, more rollouts alive mean longer batches; on two machines they do not."
    idle = replace(fitted.world, decode=DecodeCurve(0.001), train_token_s=0.0002, tool_s=Spread(2.0), turns=Spread(2.0))
    ends = [
        predict_run(
            replace(fitted, world=replace(idle, decode_slowdown=times, train_slowdown=times)), staleness=bound
        ).simulated
        for times in (1.0, 2.0)
        for bound in (1, 8)
    ]
    batch = [(1 - each.wait) * 60 * 32 / each.rate for each in ends]  # seconds of the trainer
    assert batch[1] == pytest.approx(batch[0], rel=0.05) and batch[3] > 1.1 * batch[2]


def test_how_much_was_written_is_read_from_the_log():
    loads = [[(0.0, 2), (1.0, 1), (3.0, 0), (4.0, 5)], [(0.0, 0), (4.0, 1)]]
    turns = Turns(*[np.zeros(1)] * 5, loads)
    assert writing_share(turns, 0.0, 4.0) == pytest.approx(0.375) and writing_share(turns, 2.0, 4.0) == pytest.approx(
        0.25
    )
    assert writing_share(replace(turns, loads=()), 0.0, 4.0) == 1.0
