"""The simulator: its books, its determinism, every strategy of the loop, and the same answer as a driven run."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from properties import RANDOMS, examples

from rlbench.bench.staleness import point_config, run_point
from rlbench.loop.config import make_config
from rlbench.loop.world import DecodeCurve, Spread, World, stated_world
from rlbench.planning.engines import Engine
from rlbench.planning.queueing import group_shares
from rlbench.planning.simulation import beta_quantiles
from rlbench.planning.simulator import books_since, new_simulation, simulate, simulate_together, summarize_steps
from rlbench.records import Fate

PLAIN = {
    "clock": "virtual",
    "generator": "scripted",
    "placement": "split",
    "filter": "none",
    "sampler": "uniform",
    "advantage": "dr_grpo",
    "preflight": 0,
    "eval": [],
    "alerts": False,
    "checkpoint_every": 0,
    "max_tokens": 100_000,
    "group": 4,
    "batch": 16,
    "concurrency": 32,
    "staleness": 4,
    "steps": 30,
}
ENGINES = World(
    prompt_tokens=50.0,
    response_tokens=Spread(200, 0.6),
    decode=DecodeCurve(0.01, 0.001),
    engines=2,
    train_s=1.0,
    publish_s=0.2,
    score_s=Spread(0.1),
)


def a_world(r: random.Random) -> World:
    "A world drawn by chance: with and without a decode curve, turns, sandboxes, failures."
    world = World(
        latency=Spread(r.choice((1, 10)), r.choice((0, 0.8))),
        prompt_tokens=r.choice((0, 100)),
        response_tokens=Spread(r.choice((10, 300)), r.choice((0, 1.0)), r.choice((0, 900))),
        prefill_s=r.choice((0, 0.5)),
        engines=r.choice((1, 3)),
        turns=Spread(r.choice((1, 1, 3)), r.choice((0, 0.5))),
        tool_s=Spread(r.choice((0, 2)), 0.5, rare_share=r.choice((0, 0.05)), rare_value=60),
        score_s=Spread(r.choice((0, 1)), 0.5),
        solve_rate=r.choice((0.5, (1.08, 0.19), (0.8, 0.8))),
        failure_rate=r.choice((0, 0, 0.1)),
        train_s=r.choice((0.1, 5)),
        train_token_s=r.choice((0, 1e-4)),
        publish_s=r.choice((0, 0.5)),
        sandboxes=r.choice((0, 0, 10)),
        sandbox_start_s=Spread(r.choice((0, 3)), 0.5),
    )
    world = replace(
        world,
        travel_s=r.choice((0, 0, 0.3)),
        load_s=r.choice((None, 0.0, 0.2)),
        decode_steps=r.choice((0, 0, 8)),
        decode_slowdown=r.choice((1.0, 1.0, 1.5)),
    )
    return (
        replace(world, decode=DecodeCurve(0.01, 0.001, r.choice((0, 1e-6))), cache_tokens=r.choice((0, 3000)))
        if r.random() < 0.6
        else world
    )


def a_run(r: random.Random) -> dict:
    "Knobs drawn by chance."
    bound, group = r.choice((0, 1, 2, 8)), r.choice((2, 4, 8))
    stragglers = r.choice(("in_flight", "wait", "oversample", "requeue", "partial"))
    return {
        "staleness": bound,
        "group": group,
        "batch": group * r.randint(1, 5),
        "concurrency": r.choice((3, 16, 64)),
        "generators": r.choice((1, 1, 3)),
        "stragglers": stragglers,
        "straggler_unit": r.choice(("group", "rollout")),
        "old_tokens": "mask" if stragglers == "partial" and not bound else r.choice(("train", "mask", "correct")),
        "oversample": r.choice((0.0, 0.5, 1.5)) if stragglers != "in_flight" else 0.0,
        "backlog": r.choice(("hold", "drop_oldest")) if bound else "hold",
        "queue_batches": r.choice((0, 1, 2)),
        "overdue": r.choice(("drop", "wait")),
        "publish_every": r.choice((1, bound + 1)),
        "filter": r.choice(("none", "zero_advantage", "band")),
        "sampler": r.choice(("uniform", "band")),
        "max_turns": r.choice((1, 2, 6)),
        "steps": r.randint(1, 12),
        "infra_stop": 1.0,
        "on_resume": r.choice(("continue", "rewind", "restart")),
        "preflight": r.choice((0, 4)),
        "eval": [{"name": "held-out", "count": 3, "k": 1, "every": r.choice((0, 2))}] if r.random() < 0.3 else [],
    }


@pytest.mark.slow
@examples(60)
@given(RANDOMS)
def test_any_run_in_any_world(r):
    "It ends, its books close (`check` is in `simulate`), and it is the same twice."
    config, world, seed = make_config({**PLAIN, **a_run(r)}), a_world(r), r.randrange(10**9)

    def again():
        try:
            return simulate(config, world, seed, most=60_000, tasks=50)
        # a run may fail for a reason of the loop's own;
        # a wave may be larger than the sandboxes that it holds to its end
        except RuntimeError as error:
            assert (
                "in a row" in str(error)
                or "sandboxes are held" in str(error)
                and not config.staleness
                and (world.turns.mean > 1 or world.turns.sigma)
            ), error
            return str(error)

    first = again()
    assert first == again()
    if not isinstance(first, str) and first.heard < 60_000:
        assert first.reason and not first.running and sum(entry[0] for entry in first.books.values())
        assert len(first.steps) == config.steps


def test_shares_and_tokens_add_up():
    rows = {}
    seen = simulate(make_config(PLAIN), ENGINES, rows=rows)
    whole = summarize_steps(seen.steps)
    assert abs(whole.compute + whole.sync + whole.wait - 1) < 1e-9
    assert whole.rate * whole.step == pytest.approx(16)
    assert sum(row.fate is Fate.TRAINED for row in rows["rollouts"]) == seen.books["trained"][0] == 30 * 16
    assert sum(row.tokens for row in rows["rollouts"]) == sum(entry[1] for entry in seen.books.values())
    assert books_since(seen.steps)["trained"][0] == 30 * 16 and books_since(seen.steps, 10)["trained"][0] == 20 * 16


def test_who_is_bound_by_the_trainer_does_not_wait():
    whole = summarize_steps(simulate(make_config(PLAIN), replace(ENGINES, train_s=60.0)).steps, 5)
    assert whole.wait == 0.0 and whole.compute == pytest.approx(60 / 60.2) and whole.step == pytest.approx(60.2)


def test_nobody_is_older_than_the_bound():
    for bound in (0, 1, 3):
        whole = summarize_steps(simulate(make_config({**PLAIN, "staleness": bound, "concurrency": 200}), ENGINES).steps)
        assert whole.max_staleness <= bound and (bound or whole.staleness == 0)


@pytest.mark.slow
@pytest.mark.parametrize("rho, backlog", [(0.7, "drop_oldest"), (1.3, "drop_oldest"), (1.3, "hold")])
def test_the_same_answer_as_a_driven_run(tmp_path, rho, backlog):
    "The driver with scripted actors, whose generator decodes step by step, against the simulator at the same times."
    driven = run_point(tmp_path / "run", rho, backlog, 1, batch=40, running=40, steps=60)
    config = make_config(point_config(rho, backlog, 1, batch=40, running=40, steps=60))
    whole = summarize_steps(simulate(config, stated_world(config)).steps, 20)
    assert whole.staleness == pytest.approx(driven.measured, rel=0.06)
    assert 1 - whole.accepted == pytest.approx(driven.dropped, abs=0.03)


def test_weights_that_travel_and_generators_that_look_now_and_then():
    """Travelling makes rollouts older and nobody wait; a look every eight steps makes the loop hear of a response four
    steps later in the mean."""
    config = make_config(
        {**PLAIN, "group": 1, "batch": 16, "concurrency": 16, "steps": 60, "staleness": 16, "advantage": "reinforce"}
    )
    plain = World(response_tokens=Spread(100, 0.3), decode=DecodeCurve(0.01), train_s=0.5)
    here, travels, looks, beside = (
        summarize_steps(simulate(config, replace(plain, **more)).steps, 10)
        for more in ({}, {"travel_s": 0.5}, {"decode_steps": 8.0}, {"decode_slowdown": 1.5})
    )
    assert travels.rate == pytest.approx(here.rate, rel=0.02) and travels.staleness == pytest.approx(
        here.staleness + 0.5 / here.step, abs=0.15
    )
    assert looks.latency == pytest.approx(here.latency + 0.04, abs=0.01)
    assert beside.latency == pytest.approx(here.latency * (1 + 0.5 * beside.compute), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [{}, {"stragglers": "partial"}, {"generators": 2, "publish_every": 2}, {"decode_steps": 1, "concurrency": 6}],
    ids=str,
)
def test_a_generator_goes_from_look_to_look_as_a_driven_one_does(tmp_path, knobs):
    """Eight steps between two looks, responses of twelve tokens, weights that take their time:
    rate, waiting and staleness are those of the driver with the same costs."""
    from rlbench.base.ledger_reading import read_table
    from rlbench.base.run_files import create_run_folder
    from rlbench.planning.fit_simulation import bare_config
    from rlbench.runtime.driver import Driver, drive
    from rlbench.runtime.forecasts import measured_figures
    from rlbench.runtime.prompts import make_pools

    costs = {
        "decode": 0.01,
        "sequence": 0.0003,
        "prefill": 0.0,
        "train": 0.0015,
        "publish": 0.1,
        "score": 0.002,
        "scripted_length": 12.0,
        "scripted_tail": 0.5,
    }
    config = make_config(
        {
            **PLAIN,
            "batch": 32,
            "concurrency": 24,
            "decode_steps": 8,
            "steps": 60,
            "tasks": {"name": "arithmetic"},
            "max_tokens": 1000,
            **knobs,
            "virtual": costs,
        }
    )
    folder = create_run_folder(tmp_path, "driven")
    drive(Driver(folder, config, make_pools(config)))
    steps = read_table(folder, "steps")
    driven = measured_figures(steps.filter((steps["version"] > 6) & (steps["version"] <= 52)))
    told = summarize_steps(simulate(bare_config(config), stated_world(config), until=52).steps, 6)
    assert (
        60 * told.rate == pytest.approx(driven.rate, rel=0.06)
        and told.wait == pytest.approx(driven.wait, abs=0.06)
        and told.staleness == pytest.approx(driven.staleness, abs=0.2)
    )


def test_few_sandboxes_come_in_waves():
    "Quota 4 of 16, 10 seconds each: the last four begin after 30 seconds."
    config = make_config({**PLAIN, "group": 16, "batch": 16, "concurrency": 16, "steps": 1})
    one = summarize_steps(simulate(config, World(latency=Spread(10.0), sandboxes=4)).steps)
    assert one.step == pytest.approx(41.0) and one.latency == pytest.approx((10 + 20 + 30 + 40) / 4)


def test_turns_and_tools_take_their_time():
    config = make_config({**PLAIN, "concurrency": 16, "steps": 1, "max_turns": 9})
    world = World(
        latency=Spread(12.0), response_tokens=Spread(300), turns=Spread(3), tool_s=Spread(5.0), score_s=Spread(1.0)
    )
    one = summarize_steps(simulate(config, world).steps)
    assert one.latency == pytest.approx(12 + 2 * 5 + 1) and one.tokens == 300
    cut = summarize_steps(simulate(make_config({**PLAIN, "concurrency": 16, "steps": 1, "max_turns": 2}), world).steps)
    assert cut.latency == pytest.approx(8 + 5 + 1) and cut.tokens == 200  # the loop lets no third turn begin


def test_a_full_cache_makes_others_wait():
    config = make_config({**PLAIN, "steps": 20, "concurrency": 64})
    wide, narrow = (
        summarize_steps(simulate(config, replace(ENGINES, cache_tokens=room)).steps, 5) for room in (0, 700)
    )
    assert narrow.rate < 0.8 * wide.rate
    engine = Engine(DecodeCurve(0.01, 0.0, 1e-3))
    engine.start((0,), 10, 0.0, cached_tokens=10)
    assert engine.next_end()[0] == pytest.approx(10 * 0.02)


def test_tasks_keep_their_solve_rates():
    "So a band sampler finds those worth serving."
    config = {**PLAIN, "group": 16, "batch": 64, "concurrency": 128, "filter": "zero_advantage", "steps": 40}
    world = World(latency=Spread(20, 0.3), solve_rate=(0.4, 0.4), train_s=1.0)
    shares = [
        summarize_steps(simulate(make_config({**config, "sampler": sampler}), world, tasks=40).steps, 20).accepted
        for sampler in ("uniform", "band")
    ]
    assert shares[1] > shares[0] + 0.1


def test_a_world_may_change():
    seen = simulate(
        make_config({**PLAIN, "steps": 20}), lambda version: replace(ENGINES, train_s=1.0 if version < 10 else 9.0)
    ).steps
    assert [each.compute for each in seen] == pytest.approx([1.0] * 10 + [9.0] * 10)


def test_tenants_have_books_of_their_own():
    config = make_config({**PLAIN, "staleness": 0})
    one, other = simulate_together(
        [(config, ENGINES), (make_config({**PLAIN, "staleness": 2}), replace(ENGINES, train_s=3.0))], until=10
    )
    assert len(one.steps) >= 10 and len(other.steps) >= 10
    alone = summarize_steps(simulate(config, ENGINES, until=10).steps[:10])
    assert summarize_steps(one.steps[:10]).rate < alone.rate  # the other one's sequences are in its engines, too


@pytest.mark.parametrize("bounds", [(0, 0), (4, 4), (0, 4), (0, 4, 4), (4, 0, 0, 4)])
def test_no_tenant_starves_where_the_cache_is_full(bounds):
    "Who was refused a place holds back all that come later, so all get on at a like pace."
    world = World(response_tokens=Spread(1000, 0.5), decode=DecodeCurve(0.01), cache_tokens=8000, train_s=5.0)
    runs = simulate_together(
        [
            (make_config({**PLAIN, "group": 8, "concurrency": 16, "steps": 10_000, "staleness": bound}), world)
            for bound in bounds
        ],
        until=10,
    )
    made = [len(run.steps) for run in runs]
    assert min(made) >= 10 and max(made) < 10 * min(made), made


@pytest.mark.parametrize(("a", "b"), [(200.0, 10.0), (900.0, 100.0), (1e5, 1e5), (1e7, 1e3)])
def test_solve_rates_that_hardly_differ_are_those_of_the_distribution(a, b):
    "Of groups of which nearly all are mixed, and of many rollouts of one task."
    rates = beta_quantiles(a, b)
    mean = a / (a + b)
    spread = math.sqrt(mean * (1 - mean) / (a + b + 1))
    assert statistics.fmean(rates) == pytest.approx(mean, rel=1e-5)
    assert statistics.pstdev(rates) == pytest.approx(spread, rel=1e-3)


def test_solve_rates_are_those_of_the_distribution():
    for (a, b), solved, failed in (
        ((1.08, 0.19), 0.5509, 0.0092),
        ((2.55, 0.28), 0.5540, 0.0001),
        ((0.57, 0.14), 0.5562, 0.0398),
    ):
        rates = beta_quantiles(a, b)
        assert sum(rates) / len(rates) == pytest.approx(a / (a + b), abs=1e-3)
        shares = group_shares((a, b), 16)
        assert (
            sum(p**16 for p in rates) / len(rates)
            == pytest.approx(shares.all_pass, abs=1e-3)
            == pytest.approx(solved, abs=2e-3)
        )
        assert (
            sum((1 - p) ** 16 for p in rates) / len(rates)
            == pytest.approx(shares.all_fail, abs=1e-3)
            == pytest.approx(failed, abs=2e-3)
        )


def test_a_run_that_cannot_go_on_says_why():
    with pytest.raises(RuntimeError, match="modelled failure"):
        simulate(make_config(PLAIN), replace(ENGINES, failure_rate=1.0))
    with pytest.raises(RuntimeError, match="nothing to learn"):
        simulate(
            make_config({**PLAIN, "filter": "zero_advantage", "advantage": "grpo"}), replace(ENGINES, solve_rate=1.0)
        )
    with pytest.raises(ValueError, match="skip: 0 versions"):
        summarize_steps(())


def test_a_late_message_hurts_nobody():
    "A sequence that was stopped is not heard of again when its engine would have been done."
    simulation = new_simulation(
        make_config({**PLAIN, "stragglers": "requeue", "staleness": 1, "concurrency": 64}), ENGINES
    )
    while simulation.state.version < 10:
        assert simulation.clock.advance()
        assert all(len(each.places) <= each.slots for each in simulation.generators.by_name.values())
    assert simulation.state.books["aborted"][0] > 0
