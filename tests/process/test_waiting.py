"""Episodes that wait for tools: beside each other, beside verdicts, and in nobody's way;
closed once, however they end."""

import asyncio
import ctypes
import gc
import threading
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pytest
from inline import check_books, inline_run
from patience import until
from scripted import WITHOUT_MODEL

import rlbench as rl
import rlbench.environments.event_loop
import rlbench.environments.live_episodes
import rlbench.runtime.worker
from rlbench.base.ledger_reading import read_table
from rlbench.base.safe_call import FunctionFailed
from rlbench.environments.environment import EnvironmentActor
from rlbench.environments.episode import Done, Observation, State, run_until_wait
from rlbench.environments.event_loop import EpisodeLoop, first_prompt, first_prompts, play_episode
from rlbench.environments.judging_pool import JudgingPool
from rlbench.environments.scoring_messages import Forget, GivenUp, ScoreRequest, ScoreResult, TurnResult
from rlbench.loop.config import make_config
from rlbench.loop.config_files import Functions
from rlbench.records import Outcome, Rollout, StopReason, Task, observation_segment, prompt_segment, response_segment
from rlbench.reward import REWARDS, VERIFIERS
from rlbench.runtime.environment_worker import EnvironmentWorker
from rlbench.runtime.messages import ConfigureRequest

TASK = Task("sums/1", "1+1=", "2", 1, "sums")


def rollout(id: int, *words: str, attempt: int = 0) -> Rollout:
    "What was written in as many turns, with what `Asks` shows in between."
    segments = [prompt_segment([1])]
    for turn, word in enumerate(words):
        segments += [observation_segment("look", turn, tokens=[2])] * (turn > 0)
        segments.append(replace(response_segment([0], [0.0], [0], turn=turn), text=word))
    return Rollout(id, attempt, id, 0, TASK, tuple(segments), text=words[-1], reason=StopReason.STOP)


class Asks:
    """Words are what to do: wait (a moment), hang, hog (without awaiting), block (a thread, for long), leave, raise;
    a number ends it. `log` has what was opened and closed."""

    def __init__(self, log: list):
        self.log, self.calls, self.sessions = log, 0, 0
        log.append(("open", self))

    async def start(self, task):
        await asyncio.sleep(0)
        return task.prompt

    async def advance(self, response):
        self.calls += 1
        match response:
            case "wait":
                await asyncio.sleep(0.2)
            case "hang":
                await asyncio.Event().wait()
            case "hog":
                time.sleep(4)
            case "block":
                await asyncio.to_thread(time.sleep, 30)
            case "leave":
                raise SystemExit("enough")
            case "raise":
                raise ConnectionError("nobody there")
            case "deaf":
                for _ in range(60):
                    try:
                        await asyncio.sleep(0.5)
                    except asyncio.CancelledError:
                        continue
            case _:
                return Done(response)
        return Observation("look")

    async def cut(self):
        await asyncio.sleep(0)
        return Done("cut")

    async def close(self):
        await asyncio.sleep(0.01)
        self.log.append(("closed", self))


def closed_once(log: list) -> bool:
    told = Counter((what, id(episode)) for what, episode in log)
    episodes = {id(episode) for _, episode in log}
    return all(told["open", each] == told["closed", each] == 1 for each in episodes)


def all_of(actor: EnvironmentActor, patience: float = 20.0) -> dict:
    "Everything the actor says until it is idle, by rollout."
    heard, limit = [], time.monotonic() + patience
    while not actor.idle:
        heard += actor.work()
        assert time.monotonic() < limit, f"still {actor.waiting()}"
    return {each.key[0]: each for each in heard if isinstance(each, (ScoreResult, TurnResult))}


def late(judged) -> bool:
    "Whether a verdict is that of an episode past its deadline: a failure of the environment, and no reward."
    return (
        judged.outcome is Outcome.ENVIRONMENT_ERROR
        and judged.reward is None
        and "passed its deadline" in judged.message
    )


def asking(log: list, **more) -> EnvironmentActor:
    return EnvironmentActor(VERIFIERS["exact"], REWARDS["correct"], partial(Asks, log), **more)


def test_a_slow_or_dead_tool_costs_its_own_rollout():
    "Of forty episodes five never answer, each in another way; the rest take as long as one."
    log = []
    actor, bad = asking(log), {0: "hang", 1: "block", 2: "leave", 3: "raise", 4: "deaf"}
    actor.receive(ScoreRequest(rollout(i, bad.get(i, "wait")), deadline=1.5, last=False) for i in range(40))
    began, heard = time.monotonic(), {}
    while len(heard) < 37:
        heard |= {each.key[0]: (each, time.monotonic() - began) for each in actor.work()}
    assert all(
        isinstance(heard[i][0], TurnResult) and heard[i][0].calls == 1 and 0.15 < heard[i][0].seconds < 1.4
        for i in range(5, 40)
    )
    assert max(heard[i][1] for i in range(5, 40)) < 1.4, "before anything was late"
    heard |= {key: (each, 0) for key, each in all_of(actor).items()}
    judged = [heard[i][0].judged for i in range(5)]
    assert [late(each) for each in judged] == [True, True, False, False, True] and all(
        "deadline of 1.5 s" in judged[i].message for i in (0, 1, 4)
    )
    assert all(each.outcome is Outcome.ENVIRONMENT_ERROR and each.reward is None for each in judged)
    assert (
        "SystemExit: enough" in judged[2].message
        and "nobody there" in judged[3].message
        and "in advance" in judged[3].message
    )
    assert time.monotonic() - began < 6
    actor.receive([ScoreRequest(rollout(i, "wait", "2"), last=False) for i in range(5, 40)])
    assert {each.judged.reward for each in all_of(actor).values()} == {1.0}
    actor.close()
    assert closed_once(log)


class Cancels(Asks):
    "As `Asks`; and: inner (a task of its own is cancelled), itself, all (whatever the loop has)."

    async def advance(self, response):
        if response == "inner":
            inner = asyncio.create_task(asyncio.sleep(5))
            inner.cancel()
            await inner
        if response in ("itself", "all"):
            for task in asyncio.all_tasks() if response == "all" else (asyncio.current_task(),):
                task.cancel()
        return await super().advance(response)


class Thrown(Asks):
    "Cancelled before it ever waits."

    def advance(self, response):
        raise asyncio.CancelledError


@pytest.mark.parametrize(("kind", "word"), [(Cancels, "inner"), (Cancels, "itself"), (Cancels, "all"), (Thrown, "1")])
def test_code_that_is_cancelled_from_within_has_failed(kind, word):
    "The request is answered, and the actor goes on with the next."
    log = []
    actor = EnvironmentActor(VERIFIERS["exact"], REWARDS["correct"], partial(kind, log))
    actor.receive([ScoreRequest(rollout(1, word if word != "all" else "wait"), deadline=2.0, last=False)])
    if word == "all":
        actor.receive([ScoreRequest(rollout(2, word), deadline=2.0, last=False)])
    heard = all_of(actor)
    assert all(
        each.judged.outcome is Outcome.ENVIRONMENT_ERROR and "ancelled" in each.judged.message
        for each in heard.values()
    ) and len(heard) == 1 + (word == "all")
    if kind is Cancels:
        actor.receive([ScoreRequest(rollout(3, "wait"), last=False)])
        assert isinstance(all_of(actor)[3], TurnResult)
    actor.close()
    assert closed_once(log)


def test_what_does_not_await_is_found_out():
    """An episode that works without awaiting holds up its loop.

    It is late; the others begin again, and those between two turns are rebuilt."""
    log = []
    actor = asking(log)
    actor.receive([ScoreRequest(rollout(9, "wait"), last=False)])
    assert isinstance(all_of(actor)[9], TurnResult)
    actor.receive(ScoreRequest(rollout(i, "hog" if i == 1 else "wait"), deadline=1.0, last=False) for i in range(6))
    heard = all_of(actor)
    assert late(heard[1].judged) and all(isinstance(heard[i], TurnResult) for i in (0, 2, 3, 4, 5))
    actor.receive([ScoreRequest(rollout(9, "wait", "2"))])
    assert all_of(actor)[9].judged.reward == 1.0
    actor.close()
    assert closed_once(log)


@pytest.mark.parametrize("at_once", [1, 256])
def test_every_ending_closes_once(at_once, monkeypatch):
    """Over, cut, failed, late, stopped while it waits and between two turns, begun anew, pushed out,
    and at the end of the actor."""
    monkeypatch.setattr(rlbench.environments.live_episodes, "MOST_LIVE", 3)
    log = []
    actor = asking(log, at_once=at_once)
    words = {
        0: ("2",),
        1: ("wait",),
        2: ("raise",),
        3: ("hang",),
        4: ("wait",),
        5: ("wait",),
        6: ("wait",),
        7: ("wait",),
    }
    actor.receive(ScoreRequest(rollout(i, *said), deadline=0.4, last=i == 1) for i, said in words.items())
    heard = all_of(actor)
    assert (
        heard[0].judged.reward == 1.0
        and (heard[1].cut, heard[1].text) == (True, "cut")
        and len(actor.episodes.waiting) == 3
    )
    actor.receive(
        [
            ScoreRequest(rollout(7, "wait", attempt=1), deadline=0.4, last=False),
            ScoreRequest(rollout(8, "hang"), last=False),
            ScoreRequest(rollout(9, "wait"), last=False),
        ]
    )
    if at_once > 1:
        actor.work()
    actor.forget([(6, 0), (8, 0), (123, 0)])
    told = []
    while not actor.idle:
        told += actor.work()
    assert GivenUp(((8, 0),)) in told and {each.key for each in told if isinstance(each, TurnResult)} == {
        (7, 1),
        (9, 0),
    }
    actor.receive([ScoreRequest(rollout(10, "hang"), last=False)])
    if at_once > 1:
        actor.work()
    actor.close()
    assert closed_once(log) and actor.idle
    left = [t.name for t in threading.enumerate() if t.name == "episodes"]
    for _ in range(50):
        left = [t.name for t in threading.enumerate() if t.name == "episodes"]
        if not left:
            break
        time.sleep(0.1)
    assert not left


class Notes(Asks):
    "Keeps what it hears as its state; or answers with something that is no answer."

    state = State()

    async def advance(self, response, version):
        self.state = State(response, version)
        return response if response == "bare" else await super().advance(response)


def test_playing_again_is_what_the_actor_does():
    "An episode with a state is told the version, -1 where nobody acts, and what is no answer is refused."
    log = []
    assert play_episode(Notes(log), TASK, ["wait", "2"]) == "2" and log[0][1].state == State("2", -1)
    with pytest.raises(TypeError, match="advance returned 'bare'"):
        play_episode(Notes([]), TASK, ["bare"])


class Starts(Asks):
    """Begins as its task's answer says: waits for ever, blocks for good, blocks past its deadline,
    raises at once or after a moment."""

    async def start(self, task):
        match task.answer:
            case "hang":
                await asyncio.Event().wait()
            case "block":
                time.sleep(8)
            case "late":
                time.sleep(0.6)
            case "raise":
                raise ConnectionError("nobody there")
            case "raise later":
                await asyncio.sleep(0.05)
                raise ConnectionError("nobody there")
        return task.prompt


@pytest.mark.parametrize("how", ["hang", "block", "late", "raise", "raise later"])
def test_an_episode_that_cannot_begin_says_so_before_the_run(how, monkeypatch):
    """However it fails: in bounded time, with one kind of error;
    and what was opened is closed, unless its own code stands in the way."""
    monkeypatch.setattr(rlbench.environments.event_loop, "STUCK_S", 0.3)
    log, began = [], time.monotonic()
    with pytest.raises(FunctionFailed, match="nobody there" if "raise" in how else "passed its deadline of 0.4 s"):
        first_prompts(partial(Starts, log), [replace(TASK, answer=how)], 0.4)
    assert time.monotonic() - began < 4
    time.sleep(0.2)
    assert closed_once(log) or how in ("block", "late")


class Shuts(Starts):
    "Closes at once."

    async def start(self, task):
        return task.prompt

    def close(self):
        self.log.append(("closed", self))


def test_what_a_loop_has_not_come_to_ends_without_a_word(recwarn):
    "A loop that is stopped as soon as something was begun in it: the coroutine is closed, and so is its episode."
    log = []
    for _ in range(20):
        loop, step = EpisodeLoop(), first_prompt(partial(Shuts, log), TASK)
        awaitable, _ = run_until_wait(step)
        future = loop.begin(step, awaitable, 1.0)
        loop.stop()
        assert wait([future], 10).done
        del step, awaitable, future
    until(lambda: gc.collect() >= 0 and closed_once(log))
    assert len(log) == 40 and not [each for each in recwarn if "Shuts.start' was never awaited" in str(each.message)]


def test_starts_that_block_a_little_are_not_taken_for_one_that_hangs(monkeypatch):
    "Each is in time; together they hold the loop longer than one may."

    class Blocks:
        async def start(self, task):
            time.sleep(0.6)
            return task.prompt

    monkeypatch.setattr(rlbench.environments.event_loop, "STUCK_S", 0.1)
    assert first_prompts(Blocks, [TASK] * 4, 0.9) == ["1+1="] * 4


def test_what_is_over_after_its_deadline_was_late():
    "Also on the loop, where nothing interrupts code that does not await."

    class Slow(Asks):
        async def advance(self, response):
            time.sleep(0.6)
            return Done(response)

    actor = EnvironmentActor(VERIFIERS["exact"], REWARDS["correct"], partial(Slow, []))
    actor.receive([ScoreRequest(rollout(1, "2"), deadline=0.3)])
    assert late(all_of(actor)[1].judged)
    actor.close()


def test_who_could_not_go_on_was_not_late():
    """A verifier in compiled code holds the whole interpreter past all deadlines:
    it is late, and those whose wait was over meanwhile are not."""

    def holds(response, answer):
        return not ctypes.PyDLL(None).usleep(3_300_000)

    actor = EnvironmentActor(holds, REWARDS["correct"], partial(Asks, []))
    actor.receive(
        [
            *(ScoreRequest(rollout(i, "wait"), deadline=1.0, last=False) for i in range(4)),
            ScoreRequest(rollout(9, "2"), deadline=1.0),
        ]
    )
    heard = all_of(actor)
    assert (
        (heard[9].judged.outcome, heard[9].judged.reward) == (Outcome.TIMEOUT, None)
        and "verifier" in heard[9].judged.message
        and "passed its deadline of 1 s" in heard[9].judged.message
    )
    assert all(isinstance(heard[i], TurnResult) for i in range(4))
    actor.close()


def test_a_replay_that_fails_is_closed_as_well():
    log = []
    for words, error in ((["raise"], ConnectionError), (["wait"], ValueError)):
        with pytest.raises(error):
            play_episode(Asks(log), TASK, words)
    assert closed_once(log)


@pytest.mark.parametrize("waits", [True, False])
def test_a_rebuilt_episode_has_a_deadline_for_each_turn(waits):
    """Four turns of 0.2 s, taken again by an actor that has never seen them, under a deadline of 0.5 s;
    and one that hangs there is late all the same."""

    class Blocks:
        def start(self, task):
            return task.prompt

        def advance(self, response):
            time.sleep(0.2 if response == "wait" else 30)
            return Observation("look")

    actor = EnvironmentActor(VERIFIERS["exact"], REWARDS["correct"], partial(Asks, []) if waits else Blocks)
    actor.receive(
        [
            ScoreRequest(rollout(1, *["wait"] * 4), deadline=0.5, last=False),
            ScoreRequest(rollout(2, "wait", "hang"), deadline=0.5, last=False),
        ]
    )
    heard = all_of(actor)
    assert (
        (heard[1].turn, heard[1].text) == (4, "look")
        and late(heard[2].judged)
        and "0.5 s for each of 2 turns" in heard[2].judged.message
    )
    actor.receive([ScoreRequest(rollout(1, *["wait"] * 4, "hang"), deadline=0.5, last=False)])
    judged = all_of(actor)[1].judged
    assert late(judged) and "deadline of 0.5 s;" in judged.message, "the others were taken before"
    actor.close()


def test_a_loop_that_answers_is_not_stuck():
    "What waits looks late because nobody had looked for it for long; the loop goes on, and so does what waits in it."
    log = []
    actor = asking(log)
    actor.receive(ScoreRequest(rollout(i, "wait"), deadline=5.0, last=False) for i in range(3))
    assert actor.work(0.0) == [] and len(actor.running) == 3
    loop = actor.episodes.loop
    for under in actor.running.by_future.values():
        under.began -= 60.0
    assert actor.work(0.0) == [] and actor.episodes.loop is loop and len(actor.running) == 3
    assert all(isinstance(each, TurnResult) for each in all_of(actor).values())
    actor.close()
    assert closed_once(log) and len(log) == 6


def test_waiting_verdicts_and_rewards_go_side_by_side():
    "Programs are judged while episodes wait; neither takes the other's places."

    class Place:
        def run(self, program, limits, owner=""):
            raise AssertionError("not asked")

    def judged(response, answer, *, pool):
        time.sleep(0.3)
        return response == answer

    log = []
    actor = EnvironmentActor(judged, REWARDS["correct"], partial(Asks, log), JudgingPool(Place(), 4), at_once=8)
    actor.receive(
        [
            *(ScoreRequest(rollout(i, "2"), last=False) for i in range(8)),
            *(ScoreRequest(rollout(i, "wait"), last=False) for i in range(8, 16)),
        ]
    )
    began, most = time.monotonic(), [0, 0]
    heard = {}
    while not actor.idle:
        heard |= {each.key[0]: each for each in actor.work()}
        judging = sum(under.is_judging for under in actor.running.by_future.values())
        most = [max(most[0], judging), max(most[1], len(actor.running) - judging)]
    assert most[0] == 4 and 4 < most[1] <= 8 and time.monotonic() - began < 8 * 0.3 + 8 * 0.2
    assert [heard[i].judged.reward for i in range(8)] == [1.0] * 8 and all(
        isinstance(heard[i], TurnResult) for i in range(8, 16)
    )
    actor.close()
    assert closed_once(log)


def config_with(**more):
    return make_config(
        {"generator": "torch", "model": "tiny", "environment": "store", "tasks": {"name": "chains"}, **more}
    )


def test_a_changed_configuration_keeps_what_is_under_way(monkeypatch):
    "A run is steered while episodes wait: those go on, and what is rewarded later is rewarded by the new function."
    log = []
    scorer = EnvironmentWorker(config_with(), Functions())
    scorer.actor.environment = partial(Asks, log)
    assert scorer.work().results and scorer.waits is None and scorer.idle
    for i in range(4):
        scorer.receive(ScoreRequest(rollout(i, "wait"), last=False))
    scorer.work()
    under_way = dict(scorer.actor.running.by_future)
    assert len(under_way) == 4 and scorer.waits is not None
    scorer.receive(ScoreRequest(rollout(4, "2")))
    scorer.receive(ConfigureRequest(config_with(reward="brief", episodes_at_once=7)))
    assert scorer.actor.running.by_future == under_way and len(scorer.actor.queue) == 1 and scorer.actor.at_once == 7
    scorer.actor.environment = partial(Asks, log)
    said = []
    while not scorer.idle:
        said += scorer.work().results
    assert (
        sorted(each.key[0] for each in said) == [0, 1, 2, 3, 4]
        and len([each for each in log if each[0] == "open"]) == 5
    )
    (ended,) = [each for each in said if isinstance(each, ScoreResult)]
    assert ended.judged.outcome is Outcome.OK and 0.9 < ended.judged.reward < 1.0, "brief takes off a little"
    scorer.receive(Forget(((0, 0), (1, 0))))
    assert sorted(scorer.actor.episodes.waiting) == [2, 3]
    scorer.close()
    assert closed_once(log)


def test_an_environment_that_asks_for_a_pool_has_one(tmp_path, monkeypatch):
    """Also where the verifier asks for none: then the pool is the environment's alone,
    and no canary is tried until a verifier judges with it."""
    opened, tried = [], []
    monkeypatch.setattr(
        rlbench.runtime.environment_worker, "open_pool", lambda config: opened.append(config) or object()
    )
    monkeypatch.setattr(
        rlbench.runtime.environment_worker, "check_canaries", lambda verifier, tasks: tried.append(verifier) or []
    )
    monkeypatch.setitem(rlbench.loop.config_tables.FUNCTIONS["environment"], "scripted", lambda *, pool=None: pool)
    scorer = EnvironmentWorker(config_with(environment="scripted"), Functions())
    assert (
        len(opened) == 1
        and not tried
        and scorer.actor.judging_pool is None
        and scorer.actor.environment().pool is scorer.pooled.pool
    )
    scorer.receive(ConfigureRequest(config_with(environment="code", tasks="programs", verifier="code", reward="tests")))
    assert len(opened) == len(tried) == 1 and scorer.actor.judging_pool is scorer.pooled
    scorer.close()


def drawn(waits: bool):
    "The scripted store's episodes; `waits`: as async ones."
    from rlbench.environments.kv_store import DrawnEpisode

    class Waits(DrawnEpisode):
        async def start(self, task):
            await asyncio.sleep(0.001)
            return super().start(task)

        async def advance(self, response, version):
            await asyncio.sleep(0.001)
            return super().advance(response, version)

    return (Waits if waits else DrawnEpisode)(2, 4, 0.6, 0.2)


def test_on_the_virtual_clock_waiting_changes_nothing(tmp_path, monkeypatch):
    """The same run with episodes that await and with episodes that do not:
    the same rollouts at the same times, and the same again."""
    table = {
        "environment": "scripted",
        "staleness": 2,
        "group": 4,
        "batch": 16,
        "steps": 6,
        "concurrency": 24,
        "max_tokens": 80,
        "preflight": 0,
        "eval": [],
        "checkpoint_every": 0,
        "filter": "none",
        "virtual": {"train": 0.0001, "scripted_length": 12.0},
    }
    runs = []
    for name, waits in (("plain", False), ("waits", True), ("again", True)):
        monkeypatch.setitem(rlbench.loop.config_tables.FUNCTIONS["environment"], "scripted", partial(drawn, waits))
        runs.append(inline_run(tmp_path, name, table))
        check_books(runs[-1])
    assert len({run.state.digest for run in runs}) == 1
    rows = [read_table(run.folder, "rollouts").drop("seconds", "at", "score_seconds", strict=False) for run in runs]
    assert rows[0].equals(rows[1]) and rows[1].equals(rows[2]) and (rows[0]["turns"] > 1).any()


@pytest.mark.parametrize(("score", "low", "high"), [(1e-9, 0.0, 0.001), (0.05, 0.5, 1.0)])
def test_what_is_lost_to_the_environment_is_booked(score, low, high, tmp_path):
    """On the virtual clock, where all seconds are stated: an environment that takes no time stalls nobody;
    one that takes longer for a turn than the generator stalls it most of the time."""
    table = {
        "environment": "scripted",
        "staleness": 1,
        "group": 4,
        "batch": 16,
        "steps": 8,
        "concurrency": 16,
        "max_tokens": 120,
        "preflight": 0,
        "eval": [],
        "checkpoint_every": 0,
        "filter": "none",
        "virtual": {"train": 1e-6, "scripted_length": 12.0, "score": score, "decode": 0.001},
    }
    driver = inline_run(tmp_path, "a", table)
    check_books(driver)
    steps, rollouts = (read_table(driver.folder, name) for name in ("steps", "rollouts"))
    assert low <= steps["stalled"].sum() / steps["seconds"].sum() <= high
    assert (steps["stalled"] <= steps["seconds"] + 1e-9).all() and (
        steps["stalled"] <= steps["generator_wait"] + 1e-6
    ).all()
    several = rollouts.filter(pl.col("turns") > 1)
    assert (
        several["turn_lengths"].list.sum().to_list() == several["length"].to_list()
        and several["turn_lengths"].list.len().to_list() == several["turns"].to_list()
    )
    assert (
        rollouts["tool_seconds"].sum() > 0
        and not driver.live.tools
        and not driver.scoring.episodes.open
        and not driver.scoring.episodes.handed_over
    )
    trained = rollouts.filter(pl.col("fate") == "trained")
    assert np.average(steps["tool_seconds"], weights=steps["trained_rollouts"]) == pytest.approx(
        trained["tool_seconds"].mean()
    )


def patient():
    """Two turns; between them a tool that takes a moment, and in one of eleven rollouts for ever.

    What is opened and closed is written down."""
    import asyncio as aio
    import os
    from hashlib import blake2b

    from rlbench.environments.episode import Done, Observation

    class Patient:
        def __init__(self):
            self.turn, self.calls = 0, 0
            self.note(f"open {id(self)} {os.getpid()}")

        def note(self, line):
            with open(os.environ["PATIENT_LOG"], "a") as file:
                file.write(line + "\n")

        async def start(self, task):
            return task.prompt

        async def advance(self, response):
            self.turn += 1
            if self.turn == 2:
                return Done(response)
            self.calls += 1
            dead = blake2b(response.encode(), digest_size=2).digest()[0] % 11 == 0
            await (aio.Event().wait() if dead else aio.sleep(0.05))
            return Observation("5+5=")

        async def close(self):
            self.note(f"closed {id(self)} {os.getpid()}")

    return Patient()


def test_a_run_whose_tools_wait_and_sometimes_hang(tmp_path, monkeypatch):
    """Real processes: a hung tool costs its rollout the reward, all others go on,
    and at the end every episode that was opened is closed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATIENT_LOG", str(tmp_path / "log"))
    run = rl.run(
        "tiny",
        name="patient",
        environment=patient,
        steps=4,
        group=4,
        batch=16,
        concurrency=32,
        staleness=2,
        preflight=0,
        eval=[],
        filter="none",
        score_deadline=2.0,
        score_retries=0,
        infra_stop=1.0,
        placement="split",
        tasks="addition",
        checkpoint_every=0,
        **WITHOUT_MODEL | {"virtual": {"scripted_pace": 0.2, "scripted_length": 8.0}},
    )  # short: each has room for its second turn
    until(lambda: run.state in ("finished", "failed"), 400)
    log = (run.folder / "run.log").read_text()
    assert run.state == "finished" and run.status.books_closed, log[-2000:]
    rollouts = read_table(run.folder, "rollouts")
    failed = rollouts.filter(pl.col("outcome") == "environment_error")
    overdue = failed.filter(pl.col("message").str.contains("passed its deadline", literal=True))
    assert 0 < len(overdue) == len(failed) < len(rollouts) / 4 and overdue["reward"].null_count() == len(overdue)
    trained = rollouts.filter(pl.col("fate") == "trained")
    assert len(trained) and (trained["turns"] == 2).all() and trained["reward"].null_count() == 0
    told = Counter(line.partition(" ")[0] for line in (tmp_path / "log").read_text().splitlines())
    assert told["open"] == told["closed"] > len(trained)
