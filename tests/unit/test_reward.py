"""Reward and environment where a notebook cell is too short: formulas that never end, threads, many alarms."""

import re
import signal
import threading
import time
from dataclasses import replace

import pytest

from rlbench.base.safe_call import DeadlinePassed, call_within
from rlbench.environments.environment import EnvironmentActor
from rlbench.environments.judging import judge_rollout
from rlbench.environments.scoring_messages import ScoreRequest
from rlbench.environments.scripted_environment import ScriptedEnvironment
from rlbench.records import Outcome, Rollout, Task
from rlbench.reward import VERIFIERS, correct, exact, math

TASK = Task(id="t", prompt="1+1=", answer="2", level=1, set="test")


def rollout(text: str, id: int = 0, task: Task = TASK) -> Rollout:
    "A rollout that wrote `text`."
    return Rollout(id=id, attempt=0, group=0, k=0, task=task, text=text)


@pytest.mark.slow
def test_an_endless_formula_is_a_timeout_and_the_next_one_is_judged():
    math("1", "1")  # the import is not what is timed
    monster = rollout(
        r"\boxed{\int_0^1 \frac{x^{17}\sin(x^{9})}{\sqrt{1+x^{23}}} \cdot 9^{9^{9^{9}}} dx}",
        task=replace(TASK, answer=r"\frac{\pi^{7^{7^{7^{7}}}}}{3}"),
    )
    began = time.monotonic()
    judged = judge_rollout(monster, math, correct, deadline=1.0)
    assert time.monotonic() - began < 30, "it would go on for hours"
    assert judged.reward is None and judged.outcome is Outcome.TIMEOUT or judged.correct is False
    assert judge_rollout(rollout(":2"), math, correct, deadline=5.0).reward == 1.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_an_endless_verifier_that_swallows_everything_is_stopped():
    def swallows(response, answer):
        rings = 0
        while rings < 2:
            try:
                while True:
                    pass
            except BaseException:
                rings += 1
        return True

    began = time.monotonic()
    judged = judge_rollout(rollout(":2"), swallows, correct, deadline=0.2)
    assert judged.outcome is Outcome.TIMEOUT
    assert time.monotonic() - began < 30, "it would go on for ever"


ACCEPTED: dict[str, str] = {}  # verifier -> a response that it accepts where the answer is 2, if that is not ":2"


@pytest.mark.parametrize("name", sorted(set(VERIFIERS)))
def test_verifiers_agree_in_a_thread(name):
    "All that compare with an answer; code is judged by tests, in a pool."
    found = []
    accepted = rollout(ACCEPTED.get(name, ":2"))
    thread = threading.Thread(target=lambda: found.append(judge_rollout(accepted, VERIFIERS[name], correct)))
    thread.start()
    thread.join()
    assert found[0].correct is True, f"{name} refuses {accepted.text!r}; give it a response in ACCEPTED"
    assert found[0].reward == 1.0 and "no deadline" in found[0].message


@pytest.mark.slow
def test_alarms_leave_nothing_behind():
    "Calls that end right at their deadline: each returns or is stopped, and no alarm is left to hit somebody else."

    def spin(seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return "done"

    ends = set()
    for _ in range(300):
        try:
            ends.add(call_within(0.002, spin, 0.002))
        except DeadlinePassed:
            ends.add("stopped")
    assert ends <= {"done", "stopped"} and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.6)  # an alarm left armed would ring now


def test_an_alarm_of_somebody_else_is_put_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        call_within(5.0, sum, [1, 2])
        signal.raise_signal(signal.SIGALRM)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_scripted_verdicts_do_not_depend_on_order_or_tries():
    requests = [ScoreRequest(rollout("", id)) for id in range(200)]
    forward, backward = ScriptedEnvironment(seed=1, failures=0.3), ScriptedEnvironment(seed=1, failures=0.3)
    forward.receive(requests)
    backward.receive(requests[::-1])
    a, b = ({r.key: r.judged for _ in requests for r in environment.work()} for environment in (forward, backward))
    assert a == b and {j.outcome for j in a.values()} == {Outcome.OK, Outcome.ENVIRONMENT_ERROR}
    other = ScriptedEnvironment(seed=2, failures=0.3)
    other.receive(requests)
    assert a != {r.key: r.judged for _ in requests for r in other.work()}


def test_a_crashing_function_stops_nobody_else():
    def crashes(r):
        raise RecursionError("too deep") if r.id % 2 else MemoryError("too much")

    actor = EnvironmentActor(exact, crashes)
    actor.receive([ScoreRequest(rollout(":2", id)) for id in range(6)])
    judged = [r.judged for _ in range(6) for r in actor.work()]
    assert [j.outcome for j in judged] == [Outcome.FUNCTION_ERROR] * 6 and all(
        j.correct and j.reward is None for j in judged
    )
    assert "reward crashes: raised MemoryError: too much" in judged[0].message


def test_what_a_response_makes_a_function_raise_is_the_responses_failure():
    """Tried against the task's own answer: where that is judged, the response is wrong;
    where that fails, too, the function is, and there is no reward."""

    def parses(response, answer):
        return int(response) == int(answer)

    def looks(response, answer):
        return re.fullmatch(r"\d+", response) and response == answer

    def wants_box(response, answer):
        return response.split("{")[1].rstrip("}") == answer

    def broken(response, answer):
        return response["text"] == answer

    def wrong_type(response, answer):
        return None

    def counts(r):
        return 1.0 / len(re.findall(r"\d", r.text)) if r.text else -1.0

    for verifier in (parses, looks, wants_box):
        judged = judge_rollout(rollout("two"), verifier, correct)
        assert (judged.correct, judged.reward, judged.outcome) == (
            False,
            0.0,
            Outcome.OK,
        ) and "counts as wrong" in judged.message, judged
        assert judge_rollout(rollout("\\boxed{2}" if verifier is wants_box else "2"), verifier, correct).reward == 1.0
    for verifier in (broken, wrong_type):
        assert judge_rollout(rollout("two"), verifier, correct).outcome is Outcome.FUNCTION_ERROR
    judged = judge_rollout(rollout("two"), exact, counts)
    assert (judged.reward, judged.outcome) == (-1.0, Outcome.OK) and "ZeroDivisionError" in judged.message
