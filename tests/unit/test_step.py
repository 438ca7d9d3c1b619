"""Single stories of the loop, told event by event: what `step` answers to each."""

import pytest

from rlbench.knobs import Captured, FileFunction
from rlbench.loop.actions import Generate, Notify, Score, Start, Train, Write
from rlbench.loop.config import make_config
from rlbench.loop.events import (
    Commanded,
    Generated,
    Lost,
    Measured,
    Published,
    Recalled,
    Scored,
    Started,
    TaskPool,
    Trained,
    TrainFailed,
)
from rlbench.loop.fates import are_books_closed
from rlbench.loop.loop import step
from rlbench.loop.resume import resume_state
from rlbench.loop.state import LoopState, alerts_of, start_state
from rlbench.records import CommandRow, Fate, Outcome, StopReason

SMALL = {
    "group": 2,
    "batch": 4,
    "steps": 5,
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 0,
    "generator": "scripted",
    "clock": "virtual",
}


def begin(slots: int = 8, functions: dict | None = None, **settings) -> tuple[LoopState, Generate]:
    "A run whose actors are up, and the first responses it wants."
    state = start_state(make_config(SMALL | settings), levels=[1, 1, 2], eval_counts={}, functions=functions)
    start(state)
    return state, step(state, Started("generator", "generator", slots=slots))[-1]


def start(state: LoopState) -> None:
    "Trainer and environment are up."
    for kind in ("trainer", "environment"):
        step(state, Started(kind, kind))


def answer(state: LoopState, rollout: int) -> list:
    "The generator finishes a response of ten tokens."
    return step(state, Generated("generator", rollout, 0, StopReason.STOP, 10, 0, 0, 0.1))


def judge(state: LoopState, rollout: int, is_right: bool) -> list:
    "The environment gives a verdict."
    return step(state, Scored(rollout, 0, float(is_right), is_right, Outcome.OK, 0.0))


def answer_and_judge(state: LoopState, items) -> list:
    "All responses are finished, then judged: every second one is right. Returns the actions after the last verdict."
    actions = []
    for item in items:
        answer(state, item.rollout)
    for item in items:
        actions = judge(state, item.rollout, bool(item.k % 2))
    return actions


def rows_of(actions: list) -> list[CommandRow]:
    "The rows of the journal among some actions."
    return [a.row for a in actions if isinstance(a, Write) and isinstance(a.row, CommandRow)]


def wants_training(actions: list) -> bool:
    return any(isinstance(action, Train) for action in actions)


def test_a_paused_run_trains_one_version_at_a_step():
    state, generate = begin()
    step(state, Commanded("1", "me", "pause"))
    assert not wants_training(answer_and_judge(state, generate.items))
    assert wants_training(step(state, Commanded("3", "me", "step"))) and state.commands.allowed_version == 1


def test_an_unknown_knob_is_refused_with_its_reason():
    state, _ = begin()
    (row,) = rows_of(step(state, Commanded("2", "me", "temprature", 0.9)))
    assert row.status == "refused" and "temprature" in row.reason and "temperature" in row.reason


def replaced_functions() -> LoopState:
    "A run in which a sampler that returns no task and a loss that returns nothing were swapped in."
    texts = {
        "far": "def far(curriculum, u, band, progress):\n    return 10**6\n",
        "odd": "def odd(logprobs_RT, old_RT, advantages_RT):\n    return None\n",
    }
    captured = {name: Captured(name, text) for name, text in texts.items()}
    known = {each.stem: FileFunction(each, name) for name, each in captured.items()}
    config = make_config(SMALL | {"batch": 20})
    state = start_state(config, [1, 1, 2], {}, {"sampler": known, "loss": known})
    start(state)
    for number, (knob, name) in enumerate((("sampler", "far"), ("loss", "odd"))):
        table = {"name": name, "source": f"functions/{captured[name].stem}.py"}
        step(state, Commanded(str(number), "me", knob, table))
    return state


def test_a_sampler_that_keeps_failing_is_put_back():
    state = replaced_functions()
    (row,) = rows_of(step(state, Started("generator", "generator", slots=24)))
    assert (row.author, row.knob, row.value["name"], row.status) == ("rlbench", "sampler", "band", "applied")
    assert len(state.groups) == 10  # draws that failed were made by uniform


def test_a_loss_that_cannot_train_is_put_back_and_the_batch_is_trained():
    state = replaced_functions()
    generate = step(state, Started("generator", "generator", slots=24))[-1]
    taken = answer_and_judge(state, generate.items)[-1]
    assert isinstance(taken, Train) and state.config.loss["name"] == "odd"
    actions = step(state, TrainFailed("trainer", 1, "loss odd: raised TypeError: ...\nTraceback", "loss"))
    assert [a for a in actions if isinstance(a, Train)] == [taken] and state.config.loss["name"] == "ppo"
    step(state, TrainFailed("trainer", 1, "loss ppo: raised MemoryError: ...\nTraceback", "loss"))
    assert state.phase == "failed" and state.reason == "loss ppo: raised MemoryError: ..."
    assert are_books_closed(state) and state.books["left_at_stop"][0] == 20


def test_other_tasks_are_served_and_the_old_groups_are_trained():
    state, generate = begin(staleness=1)
    (refused,) = rows_of(step(state, Commanded("1", "me", "tasks", "addition")))
    assert refused.status == "refused"  # nobody made the tasks
    pool = TaskPool("train-2", (4, 5), {"name": "addition"})
    step(state, Commanded("2", "me", "tasks", "addition", pool=pool))
    assert state.config.tasks["name"] == "addition" and state.dispatch.curriculum.levels == [4, 5]
    answer_and_judge(state, generate.items)
    step(state, Trained("trainer", 1, 1))
    step(state, Published("generator", 1, 0.0))
    assert {group.pool for group in state.groups.values()} == {"train", "train-2"}
    assert state.dispatch.evidence == []  # what the old tasks showed says nothing about the new ones


def test_a_guard_fires_once_and_comes_by_command():
    state, _ = begin()
    digest = state.digest
    step(state, Commanded("5", "me", "guard", {"when": "entropy < 0.1", "do": "pause"}))
    assert state.digest == digest  # watching changes nothing
    actions = step(state, Measured(1, {"entropy": 0.083, "loss": 0.5}))
    (paused,) = rows_of(actions)
    assert (paused.knob, paused.author, paused.status) == ("pause", "guard: entropy < 0.1", "applied")
    assert state.commands.is_paused and any(isinstance(action, Notify) for action in actions)
    step(state, Commanded("6", "me", "go"))
    assert rows_of(step(state, Measured(2, {"entropy": 0.08}))) == [] and not state.commands.is_paused
    step(state, Commanded("8", "me", "unguard", "entropy < 0.1"))
    assert len(state.watch.guards) == len(alerts_of(state.config))


def test_a_loss_that_is_no_number_is_an_alert():
    state, _ = begin()
    (alert,) = rows_of(step(state, Measured(3, {"entropy": 0.5, "loss": float("nan")})))
    assert (alert.knob, alert.author) == ("alert", "guard: loss is nan")


@pytest.mark.parametrize(
    "value, words",
    [
        ({"when": "entrpy < 0.1", "do": "pause"}, "entropy"),
        ({"when": "entropy < 0.1", "do": "temperature = 9.0"}, "temperature"),
        ("entropy < 0.1", "give a table"),
    ],
)
def test_a_guard_that_could_never_work_is_refused(value, words):
    state, _ = begin()
    (refused,) = rows_of(step(state, Commanded("7", "me", "guard", value)))
    assert refused.status == "refused" and words in refused.reason


def test_values_that_are_only_right_together_wait_for_each_other():
    "A group of three does not divide the batch of four, but the batch of six that waits before it."
    state, generate = begin(staleness=2)
    answer_and_judge(state, generate.items[:4])
    assert state.training.batch
    assert rows_of(step(state, Commanded("1", "me", "batch", 6))) == []
    assert rows_of(step(state, Commanded("2", "me", "group", 3))) == []
    (refused,) = rows_of(step(state, Commanded("3", "me", "group", 5)))
    assert refused.status == "refused"
    applied = rows_of(step(state, Trained("trainer", 1, 1)))
    assert [(row.knob, row.value, row.status) for row in applied] == [("batch", 6, "applied"), ("group", 3, "applied")]
    assert (state.config.batch, state.config.group) == (6, 3)


def judged_run(failing: set[int]) -> tuple[LoopState, list]:
    "Sixteen rollouts, of which the machine fails these; and all actions."
    state, generate = begin(slots=16, batch=16, score_retries=0)
    actions = []
    for item in generate.items:
        actions += answer(state, item.rollout)
    for item in generate.items:
        if item.rollout in failing:
            failure = Scored(item.rollout, 0, None, None, Outcome.ENVIRONMENT_ERROR, 0.0, "sandbox: host_oom")
            actions += step(state, failure)
        else:
            actions += judge(state, item.rollout, bool(item.k))
    return state, actions


def test_one_failure_of_the_machine_is_an_alert():
    state, actions = judged_run({3})
    (alert,) = rows_of(actions)
    assert state.phase == "running" and (alert.knob, alert.author) == ("alert", "guard: infra_masked > 0.05")
    assert any(isinstance(action, Notify) for action in actions)


def test_many_failures_of_the_machine_end_the_run_untrained():
    state, actions = judged_run({1, 4, 7, 9})
    assert state.phase in ("failing", "failed") and not wants_training(actions)
    assert "infra_stop" in state.reason and "host_oom" in state.reason


def test_a_recalled_verdict_of_a_batch_in_training_stays():
    state, _ = judged_run(set())
    group = state.groups[state.training.batch[0]]
    actions = step(state, Recalled(tuple((i, 0) for i in group.rollouts)))
    assert not any(isinstance(action, Score) for action in actions)


def test_a_recalled_verdict_of_a_queued_group_is_asked_for_again():
    state, generate = begin(slots=16, batch=16)
    first, second = generate.items[:2]
    for item in (first, second):
        answer(state, item.rollout)
        judge(state, item.rollout, bool(item.k))
    assert [waiting.group for waiting in state.training.queue] == [first.group]
    actions = step(state, Recalled(((first.rollout, 0), (999, 0)), "the reference solution fails"))
    assert [a.rollout for a in actions if isinstance(a, Score)] == [first.rollout]
    assert not state.training.queue and not state.dispatch.evidence
    step(state, Scored(first.rollout, 0, 0.5, False, Outcome.OK, 0.0))
    assert [waiting.group for waiting in state.training.queue] == [first.group]
    assert state.rollouts[first.rollout].reward == 0.5


def test_rollouts_of_a_lost_generator_are_asked_for_again():
    state, generate = begin()
    first = generate.items[0].rollout
    actions = step(state, Lost("generator", "killed", tokens=(((first, 0), 7),)))
    assert Start("generator") in actions and state.books["lost_generator"][:2] == [4, 7]
    (again,) = step(state, Started("generator", "generator", slots=8))
    assert {item.attempt for item in again.items} == {1} and len(again.items) == 4


def test_a_resumed_state_keeps_what_was_finished():
    state, generate = begin(staleness=1, steps=3)
    first, second, third = generate.items[:3]
    answer(state, first.rollout)
    answer(state, second.rollout)
    judge(state, first.rollout, True)
    rows = [a.row for a in resume_state(state, {(third.rollout, 0): 7}, {third.rollout: 3}, lost=(2, 20, 0.5))]
    assert {row.fate for row in rows} == {Fate.LOST_RESUME}
    assert state.books["lost_resume"] == [2 + len(rows), 27, 0.5]
    assert state.rollouts[first.rollout].status == "done"
    assert state.rollouts[second.rollout].status == "generated"
    assert state.rollouts[third.rollout].attempt == 3
    start(state)
    (generate,) = step(state, Started("generator", "generator", slots=8))
    assert (third.rollout, 3) in [(item.rollout, item.attempt) for item in generate.items]
