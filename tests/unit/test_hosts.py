"""Hosts in the loop: what one event does, beside moves, resumes and checkpoints.

`test_loop.py` has the random interleavings."""

import json

import pytest

from rlbench.loop.actions import Notify, Place, Start, Write
from rlbench.loop.config import make_config
from rlbench.loop.events import (
    Checkpointed,
    Commanded,
    Generated,
    HostJoined,
    HostLost,
    Lost,
    Started,
    Ticked,
    kind_of,
)
from rlbench.loop.journal import kind_on_disk
from rlbench.loop.loop import step
from rlbench.loop.packing import PackedArrays, pack_record, unpack_record
from rlbench.loop.resume import resume_state
from rlbench.loop.state import Checkpoint, HostsState, LoopState, start_state
from rlbench.records import StopReason
from rlbench.runtime.driver import event_fields

ACTORS = ("trainer", "environment", "generator-1", "generator-2")


def started_state(is_paused: bool = False) -> LoopState:
    "A run whose actors are up and at work; or paused before it began."
    table = {"group": 2, "batch": 4, "preflight": 0, "eval": [], "generators": 2, "deadlines": {"start": 60}}
    state = start_state(make_config(table | {"placement": "split", "staleness": 1}), [1, 1, 2], {})
    if is_paused:
        step(state, Commanded("pause", "somebody", "pause"))
    for name in ACTORS:
        step(state, Started(name, kind_of(name), slots=8))
    step(state, Checkpointed(0, "v000000"))
    return state


def lose_host(state: LoopState, *actors: str, host: str = "host-2", at: float = 0.0) -> list:
    "The actions after a host and its actors are lost, as the driver says it."
    actions = step(state, HostLost(host, "power cut", actors, at=at))
    for name in actors:
        actions += step(state, Lost(name, "its host is lost", at=at))
    return actions


def test_a_lost_host_is_one_alert_and_no_start():
    state = started_state()
    actions = lose_host(state, "generator-2", "environment", at=5.0)
    (firing,) = [action.firing for action in actions if isinstance(action, Notify)]
    assert firing.text == "host host-2 lost: power cut; generator-2 and environment wait for a host"
    (row,) = [action.row for action in actions if isinstance(action, Write) and action.table == "commands"]
    assert (row.knob, row.author, row.reason, row.heard) == ("alert", "guard: host lost", firing.text, -1)
    assert not any(isinstance(action, Start) for action in actions)
    assert set(state.hosts.waiting) == {"generator-2", "environment"} and state.phase == "running"
    assert [state.actors[name].restarts for name in ACTORS] == [0, 0, 0, 0]


def test_a_second_event_of_a_lost_host_is_no_second_alert():
    state = started_state()
    lose_host(state, "generator-2")
    assert not any(isinstance(action, Notify) for action in lose_host(state, "generator-2"))


def test_only_time_is_needed_to_give_up_an_actor_without_a_host():
    state = started_state()
    lose_host(state, "generator-2", at=5.0)
    step(state, Ticked(at=64.9))
    assert not state.actors["generator-2"].given_up
    step(state, Ticked(at=65.0))
    assert state.actors["generator-2"].given_up and state.phase == "running"
    assert [action for action in step(state, Ticked(at=66.0)) if isinstance(action, (Start, Notify))] == []
    actions = step(state, HostJoined("host-9", ("generator-2", "generator-1"), at=500.0))
    assert [action for action in actions if isinstance(action, Start)] == [Start("generator-2")]
    assert not state.actors["generator-2"].given_up and not state.hosts.waiting


def test_without_any_environment_the_run_ends_and_says_why():
    state = started_state()
    lose_host(state, "environment")
    step(state, Ticked(at=60.0))
    assert state.phase == "failing"
    assert state.reason == "environment lost: host host-2 lost (power cut), and no host joined for it within 60 s"


def test_a_trainer_lost_with_its_host_ends_the_run_at_once():
    state = started_state()
    actions = lose_host(state, "trainer", "generator-2")
    (firing,) = [action.firing for action in actions if isinstance(action, Notify)]
    assert firing.text.endswith("generator-2 waits for a host; the trainer is lost with it, so the run ends")
    assert (state.phase, state.reason) == ("failing", "trainer lost: its host is lost")
    assert not any(isinstance(action, Start) for action in actions)


def test_a_host_lost_before_its_generator_is_ready_does_not_end_the_run():
    state = start_state(started_state().config, [1, 1, 2], {})
    for name in ACTORS[:3]:
        step(state, Started(name, kind_of(name), slots=8))
    lose_host(state, "generator-2")
    assert state.phase == "running" and state.hosts.waiting["generator-2"].is_lost
    assert Start("generator-2") in step(state, HostJoined("host-2", ("generator-2",)))
    step(state, Started("generator-2", "generator", slots=8))
    assert state.actors["generator-2"].up


def test_a_generator_that_is_ready_just_before_its_host_is_lost_stays_down():
    state = started_state()
    step(state, HostLost("host-2", "power cut", ("generator-2",)))
    step(state, Started("generator-2", "generator", slots=8))
    assert not state.actors["generator-2"].up
    step(state, Lost("generator-2", "its host is lost"))
    assert state.hosts.waiting["generator-2"].is_lost


def test_one_that_failed_too_often_waits_for_no_host():
    state = started_state()
    for _ in range(4):
        step(state, Lost("generator-2", "killed"))
        step(state, Started("generator-2", "generator", slots=8))
    step(state, Lost("generator-2", "killed"))
    assert state.actors["generator-2"].given_up
    lose_host(state, "generator-2")
    actions = step(state, HostJoined("host-2", ("generator-2",)))
    assert not any(isinstance(action, Start) for action in actions) and state.actors["generator-2"].given_up


def test_a_host_that_is_named_at_the_beginning_alerts_nobody():
    state = started_state()
    actions = step(state, HostJoined("host-1", ()))
    assert not any(isinstance(action, Notify) for action in actions) and state.hosts.known["host-1"].up


def test_a_host_lost_while_workers_move_leaves_the_generators_to_the_driver():
    state = started_state(is_paused=True)
    lose_host(state, "generator-2")
    step(state, Ticked(at=60.0))  # given up: it does not hold the move up
    actions = step(state, Commanded("move", "somebody", "generators", 3, at=60.0))
    actions += step(state, Ticked(at=61.0)) + step(state, Ticked(at=61.5))
    (checkpoint,) = [action for action in actions if isinstance(action, Checkpoint)]
    actions = step(state, Checkpointed(checkpoint.version, "v000000", at=62.0))
    assert any(isinstance(action, Place) for action in actions) and not state.hosts.waiting
    step(state, HostLost("host-3", "power cut", ("generator-1", "environment"), at=63.0))
    assert set(state.hosts.waiting) == {"environment"}


def test_a_resumed_run_knows_no_host():
    state = started_state()
    lose_host(state, "generator-2")
    resume_state(state, {}, {}, (0, 0, 0.0))
    assert state.hosts == HostsState()


def test_states_with_and_without_hosts_open():
    state = started_state()
    lose_host(state, "generator-2", at=5.0)
    arrays = PackedArrays()
    data = json.loads(json.dumps(pack_record(state, arrays)))
    assert unpack_record(LoopState, data, arrays.joined()).hosts == state.hosts
    del data["hosts"]  # as an older rlbench wrote it
    assert unpack_record(LoopState, data, arrays.joined()).hosts == HostsState()


@pytest.mark.parametrize(
    "event, kind",
    [(HostLost("host-2", "power cut", ("generator-2",)), "HostLost"), (HostJoined("host-2", ()), "HostJoined")],
)
def test_both_events_stand_in_the_table_of_events(event, kind):
    assert kind_on_disk(event) == kind
    fields = json.loads(json.dumps(event_fields(event)))
    assert fields["host"] == "host-2" and fields["actors"] == list(event.actors)


def test_no_rollout_is_charged_for_a_lost_host():
    "Its last try is not final, as it would be if the environment alone had died."
    for is_host, tries in ((True, 0), (False, 1)):
        state = started_state()
        state.config = state.config.model_copy(update={"score_retries": 0})
        rollout = next(each for each in state.rollouts.values() if each.status == "generating")
        step(state, Generated(rollout.actor, rollout.id, 0, StopReason.STOP, 5, 0, 0, 0.1))
        assert (rollout.status, rollout.tried) == ("scoring", 1)
        if is_host:
            step(state, HostLost("host-2", "power cut", ("environment",)))
        step(state, Lost("environment", "gone", at_work=((rollout.id, 0),)))
        assert rollout.tried == tries and (rollout.lost is None) == is_host
