"""The loop over random configurations: books that close, no deadlock, nothing trained over the bound,
and the same run twice."""

import random
import time
from collections import Counter

import pytest
from hosts_world import a_world_of_hosts
from hypothesis import given
from hypothesis import strategies as st
from inline import check_books, inline_run
from properties import RANDOMS, examples
from small_loops import a_command, a_config, a_world
from world import World

from rlbench.base.commands import send_command
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.base.status import read_status
from rlbench.environments.environment import EnvironmentActor
from rlbench.loop.config import RunConfig, make_config
from rlbench.loop.config_files import to_toml
from rlbench.loop.ending import FRUITLESS_BATCHES, abandon_run
from rlbench.loop.events import Commanded, Lost, Started, kind_of
from rlbench.loop.fates import are_books_closed
from rlbench.loop.loop import step
from rlbench.loop.state import start_state
from rlbench.records import Fate
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.messages import TrainRequest
from rlbench.runtime.prompts import make_pools
from rlbench.runtime.run_context import Workers


@pytest.mark.slow
@examples(150)
@given(RANDOMS, st.integers(0, 2))
def test_books_bound_and_repeat(r, trouble):
    """Whatever happens: the watch in `world` looks at every action, the run ends, and it ends the same way twice.

    `trouble`: none, commands, or faults, too."""
    seed, commands, faults = r.randrange(10**9), trouble > 0, trouble > 1
    world = a_world(seed, commands, faults).run()
    config = world.state.config
    if not commands and not faults:
        spent = config.tokens or config.minutes
        if (
            world.state.phase == "failed"
        ):  # a world in which no task tells right from wrong, for as long as a run is patient
            filtered = sum(fate is Fate.FILTERED for fate in world.watch.fates.values())
            assert "nothing to learn from" in world.state.reason
            assert filtered >= FRUITLESS_BATCHES * config.batch_groups * config.group
        else:
            assert world.state.phase == "done" and (world.state.version == config.steps or spent), world.state.reason
        if config.staleness == 0:
            assert set(world.watch.lags) <= {0}
        if config.stragglers in ("wait", "requeue") and world.turns == 1:
            assert all(oldest == newest for _, oldest, newest in world.watch.told.values()), (
                "a response of two versions"
            )
        waits = config.overdue == "wait" and config.backlog == "hold" and not config.oversample
        # if a whole batch stands at the edge of the bound, it is trained, and others may get too old
        if waits and not world.watch.full_edges:
            assert Fate.STALE not in world.watch.fates.values()
        assert {(row.eval, row.version) for row in world.watch.evals} >= {
            (e.name, v) for e in config.eval for v in (0, world.state.version)
        }
    assert a_world(seed, commands, faults).run().record() == world.record()


@pytest.mark.slow
@examples(120)
@given(RANDOMS)
def test_hosts_come_and_go(r):
    """Hosts are lost and join at random, between other losses and restarts:
    no actor is started twice or on a lost host, none is charged a restart, each loss is one alert, the books close,
    and the run ends the same way twice."""
    seed = r.randrange(10**9)
    world = a_world_of_hosts(seed).run()
    alerts = Counter(row.author for row in world.watch.commands if row.knob == "alert")
    assert alerts["guard: host lost"] == world.notified.count("host lost") == world.losses
    assert alerts["guard: host joined"] == world.notified.count("host joined") <= world.returns
    state = world.state
    if state.phase == "failed" and "no host joined" in state.reason:
        kind = kind_of(state.reason.partition(" ")[0])
        assert all(actor.given_up for actor in state.actors.values() if actor.kind == kind)
    assert a_world_of_hosts(seed).run().record() == world.record()


def a_driven_run(r: random.Random) -> tuple[dict, list[tuple]]:
    "A table, and commands at stated events."
    table = a_config(r) | {
        "virtual": {
            "scripted_errors": r.choice((0.0, 0.2)),
            "train": r.choice((0.0001, 0.002)),
            "publish": r.choice((0.01, 0.5)),
        }
    }
    told = [(r.randint(1, 300), *a_command(r, make_config(table))) for _ in range(r.choice((0, 4, 8)))]
    told += [(r.randint(1, 300), "stop", None, 0)] if told and r.random() < 0.3 else []
    return table, told


@pytest.mark.slow
@examples(36)
@given(r=RANDOMS)
def test_driver_tables_close_and_repeat(r, tmp_path_factory):
    "The same through the driver: the tables on disk agree with the books, and a second run writes the same ones."
    folder = tmp_path_factory.mktemp("twice")
    table, told = a_driven_run(r)
    first, second = (inline_run(folder, name, table, told) for name in ("a", "b"))
    check_books(first)
    steps, again = (read_table(d.folder, "steps") for d in (first, second))
    assert steps.equals(again) and first.state.digest == second.state.digest
    assert read_table(first.folder, "rollouts").equals(read_table(second.folder, "rollouts"))
    if not told:
        assert (steps["lag_max"] <= table["staleness"]).all()
        assert {*read_table(first.folder, "evals").select("eval", "version").rows()} >= {
            (e["name"], v) for e in table["eval"] for v in (0, first.state.version)
        }
    commands = read_table(first.folder, "commands")
    assert commands["command"].str.starts_with("told").sum() == first.said
    refused = commands.filter(commands["status"] == "refused")
    assert refused["reason"].str.len_chars().min() is None or refused["reason"].str.len_chars().min() > 10


SMALL = {
    "clock": "virtual",
    "generator": "scripted",
    "group": 4,
    "batch": 16,
    "steps": 4,
    "preflight": 6,
    "preflight_k": 2,
    "eval": [{"count": 6, "every": 2}],
}


def small(**changes) -> RunConfig:
    return make_config(SMALL | changes)


@pytest.mark.slow
def test_a_run_on_the_virtual_clock_does_not_notice_a_slow_machine(tmp_path, monkeypatch):
    "Scorings that fail are judged by what others had within the same minute: that is no minute of the machine."
    table, told = a_driven_run(random.Random(989))
    usual = inline_run(tmp_path, "usual", table, told)
    monkeypatch.setattr(EnvironmentActor, "moment", lambda actor: 300 * time.monotonic())
    slow = inline_run(tmp_path, "slow", table, told)
    assert slow.state.digest == usual.state.digest and read_table(slow.folder, "steps").equals(
        read_table(usual.folder, "steps")
    )


@examples(20)
@given(RANDOMS, st.integers(100, 300))
def test_a_failing_process_still_closes_the_books(r, event):
    "`abandon_run` at any moment: every dispatched attempt has its fate and every token its book."
    world = a_world(r.randrange(10**9), True, True)
    world.commands[event] = [("break", "test", "break")]

    def broken(event):
        if getattr(event, "knob", "") != "break":
            return type(world).step(world, event)
        for action in abandon_run(world.state, "broken"):
            world.watch.write(action.row, world)

    world.step = broken
    world.run(closing=False)
    assert (
        world.state.phase in ("failed", "done")
        and are_books_closed(world.state)
        and len(world.watch.fates) == world.state.dispatch.attempts
    )


def test_stop_during_preflight_leaves_no_result():
    "Cut short, an evaluation has no row: its figure would be wrong."
    world = World(small(), 1, commands={8: [("a", "test", "stop")]}).run()
    assert (world.state.phase, world.state.reason, world.state.version) == ("done", "stopped by test", 0)
    assert not world.watch.evals and set(world.watch.fates.values()) <= {Fate.LEFT_AT_STOP}


def test_a_pause_lets_evaluations_finish():
    "Paused during the preflight, the loop finishes it, and begins nothing else until it goes on."
    world = World(small(), 1, commands={5: [("a", "test", "pause")]})
    world.state.commands.allowed_version = -1
    seen = []
    watch = world.watch.generate
    world.watch.generate = lambda w, a: (
        seen.append((w.state.commands.is_paused, {bool(i.eval) for i in a.items})),
        watch(w, a),
    )
    world.run()
    assert {row.eval for row in world.watch.evals} == {"preflight", "held_out"}
    assert all(kinds == {True} for paused, kinds in seen if paused)


def test_a_budget_reached_during_an_evaluation_lets_it_finish():
    "Minutes over while the first evaluation runs: it gets its row, nothing is trained, the books close."
    world = World(small(minutes=0.05, eval=[{"count": 10, "k": 8}], concurrency=1), 1).run()
    assert (
        world.state.reason.startswith("minutes")
        and {row.eval for row in world.watch.evals} == {"preflight", "held_out"}
        and world.state.version == 0
    )


def test_a_generator_lost_at_the_end_comes_back_for_the_last_evaluation():
    "Lost again and again, within its restarts: the evaluation of the last version is there all the same."
    whole = World(small(), 3).run()
    for event in range(whole.events - 40, whole.events):
        world = World(small(), 3, faults={event: "generator"}).run()
        assert world.state.phase == "done" and ("held_out", 4) in {(row.eval, row.version) for row in world.watch.evals}


def test_knobs_changed_under_queued_groups():
    "Groups of the old size stay whole: batches count groups, and rows keep the sizes."
    changes = {60: [("a", "test", "group", 8)], 80: [("b", "test", "batch", 32)], 160: [("c", "test", "group", 2)]}
    world = World(small(steps=8, staleness=2, preflight=0, eval=[]), 5, (8, 8), changes).run()
    sizes = {
        len([key for key, item in world.watch.sent.items() if item.group == g])
        for row in world.watch.steps
        for g in row.groups
    }
    assert (
        {c.status for c in world.watch.commands if c.knob != "checkpoint"} == {"applied"}
        and sizes == {2, 4, 8}
        and world.state.version == 8
    )


def test_a_member_without_reward_leaves_its_group_trained():
    "The others are trained; it is an environment error, and no batch claims it."
    world = World(small(score_retries=0, filter="none", steps=6), 2, errors=0.15).run()
    trained = [key for key, fate in world.watch.fates.items() if fate is Fate.TRAINED]
    groups = {world.watch.sent[key].group for key in trained}
    lost = [key for key, item in world.watch.sent.items() if item.group in groups and world.watch.scores[key] is None]
    assert lost and {world.watch.fates[key] for key in lost} == {Fate.ENVIRONMENT_ERROR}


def test_a_slow_publish_does_not_put_an_evaluation_off():
    "Training three times as fast as publishing: every evaluation still happens, each at one version."
    world = World(small(steps=20, staleness=4, preflight=0, eval=[{"count": 3, "every": 5}]), 4, (16, 16), pace=0.0001)
    world.do_publish = lambda a: world.later(0.4, world.load, a.actor, a.version, world.machines[a.actor].life)
    world.run()
    assert len(world.watch.evals) == 5 and [row.version // 5 for row in world.watch.evals] == [0, 1, 2, 3, 4]


def test_lost_before_it_ever_started():
    "A worker that cannot start ends the run as failed, in its words, and nothing after that changes it."
    state = start_state(small(), [1] * 10, {"held_out": 6})
    step(state, Started("environment", "environment"))
    step(state, Lost("trainer", "the model is not there"))
    assert (state.phase, state.reason) == ("failed", "trainer lost: the model is not there") and are_books_closed(state)
    assert (
        step(state, Lost("generator", "the model is not there")) == []
        and step(state, Started("generator", "generator", 4)) == []
        and state.phase == "failed"
    )
    (write,) = step(state, Commanded("late", "somebody", "temperature", 0.5))
    assert write.row.status == "refused" and "already failed" in write.row.reason and state.config.temperature == 1.0


def test_a_loop_that_gets_nothing_is_stuck(tmp_path):
    """An actor that loses its work without a word: an error that shows the state, not a quiet wait;
    and the books close even then."""

    class Forgetful(Workers):
        def submit(self, actor, message):
            if not isinstance(message, TrainRequest):
                super().submit(actor, message)

    folder, config = create_run_folder(tmp_path, "a"), small(preflight=0, eval=[])
    (folder / "config.toml").write_text(to_toml(config))
    driver = Driver(folder, config, make_pools(config))
    driver.workers.__class__ = Forgetful
    with pytest.raises(
        RuntimeError, match=r"stuck at version 0: phase running, .* training \[\d.*'generator', True, 0, 0"
    ):
        drive(driver)
    status = read_status(folder)
    assert (
        status.state == "failed"
        and status.books_closed
        and "stuck" in status.reason
        and set(status.books) <= {"left_at_stop", "filtered"}
    )
    check_books(driver)


def test_refused_commands_have_their_reason_in_the_table(tmp_path):
    """Commands as people send them, files in the run's folder:
    unknown, fixed, out of range, not a whole number of groups."""
    folder = create_run_folder(tmp_path, "a")
    (folder / "config.toml").write_text(to_toml(small()))
    for knob, value in (("temprature", 0.5), ("seed", 3), ("temperature", 99), ("batch", 18), ("temperature", 0.5)):
        send_command(folder, "somebody", knob, value)
    (folder / "commands/zzz.json").write_text("no json")
    drive(Driver(folder, small(), make_pools(small())))
    rows = read_table(folder, "commands").select("knob", "status", "reason", "author").rows()
    told = {(knob, status): reason for knob, status, reason, _ in rows}
    assert (
        len(rows) == 6
        and told["temperature", "applied"] == ""
        and all(reason for (_, status), reason in told.items() if status == "refused")
    )
    assert (
        "did you mean 'temperature'" in told["temprature", "refused"]
        and "fixed" in told["seed", "refused"]
        and "whole number of groups" in told["batch", "refused"]
    )


def test_what_the_generators_were_not_built_for_is_refused(tmp_path):
    """A longer response than there is room for would be lost again and again;
    a shorter one is a knob like any other, and so is the way back."""
    told = [(10, "max_tokens", 128, 0), (20, "max_tokens", 16, 0), (30, "max_tokens", 64, 0)]
    rows = read_table(inline_run(tmp_path, "room", SMALL, told).folder, "commands").to_dicts()
    assert [(r["value"], r["status"]) for r in rows] == [
        ("128", "refused"),
        ("16", "applied"),
        ("64", "applied"),
    ] and "use at most 64" in rows[0]["reason"]


def world_with_slow_link(delay_s: float) -> World:
    "A world that has ended, of two generators; weights need `delay_s` to the second one."
    eval_sets = [{"count": 6, "every": 10}]
    config = small(steps=30, batch=16, group=4, staleness=2, generators=2, preflight=0, eval=eval_sets)
    world = World(config, 11, (16, 16), pace=0.001)

    def publish(action):
        delay = delay_s if action.actor == "generator-1" else 0.02
        world.later(delay, world.load, action.actor, action.version, world.machines[action.actor].life)

    world.do_publish = publish
    return world.run()


def test_a_slow_link_does_not_hold_back_the_other_generators():
    """Weights that come late to one generator cost what it would have done:
    training goes on, evaluations happen, the bound holds."""
    usual, slow = world_with_slow_link(0.02), world_with_slow_link(5.0)
    assert slow.state.version == 30 and max(slow.watch.lags) <= 2
    assert slow.now < 1.5 * usual.now
    assert [row.version // 10 for row in slow.watch.evals] == [0, 1, 2, 3]
