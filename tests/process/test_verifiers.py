"""Environments of the package `verifiers`: the same rewards and metrics run by that package and run here; whole runs;
the other way; and nobody phones home."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from inline import check_books, inline_run
from patience import until

import rlbench as rl
from rlbench.base.chat import answer_message, read_chat
from rlbench.base.ledger_reading import read_table
from rlbench.environments import verifiers_adapter as foreign
from rlbench.environments.environment import EnvironmentActor
from rlbench.environments.episode import Done, Judged, SingleTurn
from rlbench.environments.kv_store import store
from rlbench.environments.scoring_messages import ScoreRequest, ScoreResult, TurnResult
from rlbench.environments.verifiers_adapter import to_verifiers, verifiers
from rlbench.environments.verifiers_episode import VerifiersEpisode, in_process
from rlbench.environments.verifiers_tasks import load_environment, task_of_dataset_row, verifiers_package
from rlbench.loop.config import make_config
from rlbench.loop.config_tables import ConfigError
from rlbench.records import Outcome, Rollout, StopReason, Task, observation_segment, prompt_segment, response_segment
from rlbench.reward import correct, exact
from rlbench.runtime.prompts import make_pools

OWN = str(Path(__file__).parents[1] / "helpers" / "own_environments.py")


def call(name: str, **arguments) -> str:
    "A call of a tool, as a policy writes it."
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripts(kind: str, row: dict) -> list[list[str]]:
    "What policies might say to a row, good and bad; the last line is said again as often as it is asked for."
    answer, number = row["answer"], int(row["answer"])
    if kind == "sums":
        return [[f":{answer}"], [f"let me see:{number + 1}"], ["no idea"], [""], [call("price", item="apple")]]
    if kind == "shop":
        item = row["info"]["item"]
        count = int(row["question"].split()[0])
        good = call("price", item=item, count=count)
        return [
            [good, answer],
            ["I look. " + good, f"{number + 1}"],
            [answer],
            [good],
            [call("price", item="grape"), answer],
            [call("price", what=item), good, answer],
            [call("steal", item=item), answer],
            ["<tool_call>price(apple)</tool_call>"],
            ['<tool_call>{"name": "price", "arguments": "[1"}</tool_call>', answer],
            [good + call("total", numbers=[number, 2]), f" {answer} "],
            ['<tool_call>{"name": "total", "arguments": [1]}</tool_call>', answer],
            ["", answer],
            ['<tool_call>{"name": "price", "arguments": {"item": "' + item + '"}}', answer],
        ]
    few = [coin for coin in (5, 2, 1) for _ in range({5: number // 5, 2: number % 5 // 2, 1: number % 5 % 2}[coin])]
    return [
        ["".join(call("put", coin=coin) for coin in few), "done"],
        [call("put", coin=1)],
        [call("put", coin=3), "done"],
        [call("look"), call("put", coin=2), "done"],
        [call("put", coin=5) * 4, "done"],
        [call("put", coin=1, till=[]), "done"],
        ['<tool_call>{"name": "put", "arguments": "1"}</tool_call>', "done"],
        [call("put"), call("put", coin="x"), "done"],
        [call("open"), "done"],
        ["done"],
    ]


class Server:
    "Stands for a server and the client in front of it: it says of each script what is its turn."

    def __init__(self, kind: str, which: int):
        self.kind, self.which = kind, which

    async def post(self, path, *, body, cast_to, options):
        "An answer over the wire."
        row = self.rows[next(m["content"] for m in body["messages"] if m["role"] == "user")]
        lines, turn = scripts(self.kind, row), sum(m["role"] == "assistant" for m in body["messages"])
        message = answer_message(
            lines[self.which % len(lines)][min(turn, len(lines[self.which % len(lines)]) - 1)], turn
        )
        await asyncio.sleep(0)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {**message, "content": message["content"] or None},
        }
        return SimpleNamespace(
            content=json.dumps(
                {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            ).encode()
        )


def by_the_package(kind: str, env, rows: list[dict], which: int) -> dict[int, tuple[float, dict]]:
    "Reward and metrics of each row, as `verifiers` itself finds them."
    server = Server(kind, which)
    server.rows = {row["prompt"][-1]["content"]: row for row in rows}
    outputs = env.generate_sync(
        rows, client=verifiers_package().OpenAIChatCompletionsClient(server), model="m", on_progress=lambda *_: None
    )
    assert all(o["error"]["error"] == "EmptyModelResponseError" for o in outputs["outputs"] if o["error"])
    return {o["example_id"]: (o["reward"], o["metrics"]) for o in outputs["outputs"]}


def grown(rollout: Rollout, turn: int, shown: str | None, text: str) -> Rollout:
    "The rollout with a turn more."
    seen = () if shown is None else (observation_segment(shown, turn, tokens=[2]),)
    return replace(
        rollout,
        segments=(*rollout.segments, *seen, replace(response_segment([0], [0.0], [0], turn=turn), text=text)),
        text=text,
        reason=StopReason.STOP,
    )


def through_the_actor(
    kind: str, id: str, args: dict, tasks: list[Task], rows: list[dict], which: int
) -> dict[int, ScoreResult]:
    "The same by the environment actor, all rollouts at once."
    actor, found = EnvironmentActor(exact, correct, partial(verifiers, id=id, args=args)), {}
    of = {row["example_id"]: scripts(kind, row)[which % len(scripts(kind, row))] for row in rows}
    rollouts = {
        n: grown(Rollout(n, 0, n, 0, task, (prompt_segment([1]),)), 0, None, of[n][0])
        for n, task in ((json.loads(t.answer)["example_id"], t) for t in tasks)
    }
    actor.receive(ScoreRequest(r, last=False) for r in rollouts.values())
    limit = time.monotonic() + 60
    while not actor.idle:
        assert time.monotonic() < limit
        for said in actor.work():
            n = said.key[0]
            if isinstance(said, TurnResult):
                rollouts[n] = grown(rollouts[n], said.turn, said.text, of[n][min(said.turn, len(of[n]) - 1)])
                actor.receive([ScoreRequest(rollouts[n], last=False)])
            else:
                found[n] = said
    assert not actor.episodes.waiting
    actor.close()
    return found


@pytest.mark.parametrize("kind", ["sums", "shop", "coins"])
def test_the_same_rewards_and_metrics(kind):
    """Every row under every script: right, wrong, malformed calls, tools that raise, unknown tools,
    and more turns than there may be."""
    id, args = f"{OWN}:{kind}", {"rows": 12}
    env = load_environment(id, json.dumps(args))
    rows = env.get_dataset().to_list()
    tasks = [task_of_dataset_row(env, id, "train", row) for row in rows]
    assert len(tasks) > 7
    seen, compared = set(), 0
    for which in range(len(scripts(kind, rows[0]))):
        wanted, found = by_the_package(kind, env, rows, which), through_the_actor(kind, id, args, tasks, rows, which)
        assert wanted.keys() == found.keys()
        for n, (reward, metrics) in wanted.items():
            judged = found[n].judged
            assert judged.outcome is Outcome.OK and judged.reward == reward and dict(judged.parts) == metrics, (
                which,
                n,
                judged,
                reward,
                metrics,
            )
            assert judged.correct == (reward >= env.pass_threshold)
            seen.add(round(reward, 6))
            compared += 1
    assert compared == len(rows) * len(scripts(kind, rows[0])) and len(seen) >= 3
    if kind == "coins":
        assert env.cleaned == 2 * compared  # by both, every rollout was cleaned up


async def alone(env, task: Task, *responses: str):
    "What an episode answers, one response after the other, and the episode."
    episode = VerifiersEpisode(env)
    episode.start(task)
    return [await episode.advance(response) for response in responses], episode


def test_counts_and_limits():
    """Calls are counted, what a tool says is shown with its role, and a limit of the run has the environment judge what
    there is."""
    env = load_environment(f"{OWN}:shop", "{}")
    task = task_of_dataset_row(env, "shop", "train", env.get_dataset()[0])
    assert [m["role"] for m in read_chat(task.prompt).messages] == ["system", "user"] and {
        t["function"]["name"] for t in read_chat(task.prompt).tools
    } == {"price", "total"}

    async def cut_short():
        said, episode = await alone(env, task, call("price", item="apple") * 2)
        return said, episode.calls, await episode.cut()

    (shown,), calls, done = asyncio.run(cut_short())
    assert (
        calls == 2
        and [m["content"] for m in read_chat(shown.text).messages] == ["3", "3"]
        and {m["role"] for m in read_chat(shown.text).messages} == {"tool"}
    )
    assert (
        done.judged.outcome is Outcome.OK and dict(done.judged.parts)["asked"] == 2.0 and done.judged.correct is False
    )


def test_machinery_that_fails_is_no_reward():
    """An error that the environment stops for, one that it does not foresee, its own timeout, a reward that is none,
    and one that is not a number."""
    vf, row = verifiers_package(), {"question": "1+1=", "answer": "2"}
    from datasets import Dataset

    def one(kind, rubric=None, **more):
        with foreign.own_signals():
            env = kind(
                dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[rubric or (lambda completion: 1.0)]), **more
            )
        return env, task_of_dataset_row(env, "one", "train", env.get_dataset()[0])

    def breaks(n: int) -> int:
        "Fails."
        raise RecursionError("too deep")

    class Slow(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **more):
            await asyncio.sleep(5)

    def judged(made, *responses):
        said, _ = asyncio.run(alone(*made, *responses))
        return said[-1].judged

    stopped = judged(one(vf.ToolEnv, tools=[breaks], stop_errors=[RecursionError]), call("breaks", n=1))
    assert (
        (stopped.reward, stopped.outcome) == (None, Outcome.ENVIRONMENT_ERROR)
        and "ToolCallError" in stopped.message
        and "too deep" in stopped.message
    )
    late = judged(one(Slow, timeout_seconds=0.3), ":2")
    assert (late.reward, late.outcome) == (None, Outcome.ENVIRONMENT_ERROR) and "its own timeout" in late.message
    assert judged(one(vf.SingleTurnEnv, lambda completion: float("nan")), ":2").outcome is Outcome.INVALID_REWARD
    assert judged(one(vf.SingleTurnEnv, lambda completion: completion["no"]), ":2").outcome is Outcome.FUNCTION_ERROR
    assert judged(one(vf.SingleTurnEnv), "").reward == 1.0  # the policy's own fault, as the rubric pays it

    class Fails(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **more):
            raise ConnectionError("gone")

    made = one(Fails)
    actor = EnvironmentActor(exact, correct, lambda: VerifiersEpisode(made[0]))
    actor.receive(
        [ScoreRequest(grown(Rollout(0, 0, 0, 0, made[1], (prompt_segment([1]),)), 0, None, ":2"), last=False)]
    )
    said = []
    while not actor.idle:
        said += actor.work()
    assert (
        said[0].judged.reward is None
        and said[0].judged.outcome is Outcome.ENVIRONMENT_ERROR
        and "gone" in said[0].judged.message
    )
    actor.close()


def test_closed_or_hung(monkeypatch):
    """A rollout that is given up is cancelled and cleaned up;
    a tool that hangs costs the deadline, and nothing is left behind."""
    env = load_environment(f"{OWN}:coins", '{"rows": 3}')
    task, before = task_of_dataset_row(env, "coins", "train", env.get_dataset()[0]), env.cleaned

    async def given_up():
        _, episode = await alone(env, task, call("look"))
        await episode.close()
        assert VerifiersEpisode(env).close() is None  # one that was never begun holds nothing
        return episode.running.cancelled()

    assert asyncio.run(given_up()) and env.cleaned == before + 1

    async def hangs(till):
        await asyncio.sleep(60)

    monkeypatch.setitem(env.tool_map, "look", hangs)
    actor = EnvironmentActor(exact, correct, lambda: VerifiersEpisode(env))
    actor.receive(
        [
            ScoreRequest(
                grown(Rollout(0, 0, 0, 0, task, (prompt_segment([1]),)), 0, None, call("look")),
                deadline=0.3,
                last=False,
            )
        ]
    )
    said = []
    while not actor.idle:
        said += actor.work()
    judged = said[0].judged
    assert (judged.outcome, judged.reward) == (
        Outcome.ENVIRONMENT_ERROR,
        None,
    ) and "passed its deadline of 0.3 s" in judged.message
    actor.close()
    assert env.cleaned == before + 2


SMALL = {
    "group": 4,
    "batch": 16,
    "steps": 3,
    "concurrency": 24,
    "preflight": 0,
    "checkpoint_every": 0,
    "filter": "none",
    "staleness": 1,
}


def test_on_the_virtual_clock(tmp_path):
    "A whole run with scripted responses, twice: the same, and judged by the environment."
    table = {
        **SMALL,
        "environment": {"name": "verifiers", "id": f"{OWN}:second_try", "args": {"rows": 32}},
        "max_tokens": 40,
        "max_turns": 4,
        "eval": [{"name": "held_out", "count": 4, "every": 0}],
    }
    runs = [inline_run(tmp_path, name, table) for name in ("one", "two")]
    for run in runs:
        check_books(run)
    rows = [read_table(run.folder, "rollouts").drop("seconds", "at", "score_seconds", strict=False) for run in runs]
    assert runs[0].state.digest == runs[1].state.digest and rows[0].equals(rows[1])
    assert (
        (rows[0]["turns"] == 2).any()
        and set(rows[0]["outcome"].unique()) <= {"ok", None}
        and rows[0].filter(pl.col("fate") == "trained")["reward"].is_not_null().all()
    )


def test_a_run_of_the_embedded_policy(tmp_path, monkeypatch):
    """Real processes: the embedded policy plays an environment of the package from a file,
    and its rewards are the environment's."""
    monkeypatch.chdir(tmp_path)
    run = rl.run(
        "tiny",
        name="foreign",
        environment={"name": "verifiers", "id": f"{OWN}:second_try"},
        tasks="verifiers",
        **SMALL,
        max_turns=2,
        eval=[{"name": "held_out", "count": 8, "every": 0}],
        placement="split",
    )
    until(lambda: run.state in ("finished", "failed"), 400)
    log = (run.folder / "run.log").read_text()
    assert run.state == "finished" and run.status.books_closed, log[-3000:]
    rollouts = read_table(run.folder, "rollouts").filter(pl.col("fate") == "trained")
    assert (
        len(rollouts) == 3 * 16
        and (rollouts["turns"] == 2).any()
        and (rollouts["turns"] == 1).any()
        and rollouts["outcome"].unique().to_list() == ["ok"]
    )
    assert rollouts.filter(pl.col("turns") == 1)["reward"].min() == 1.0 and 0 < rollouts["reward"].mean() < 1
    assert set(rollouts["correct"] == (rollouts["reward"] >= 0.5)) == {True}


def test_configuration(monkeypatch):
    "Named once; wrong combinations, a missing package and what is no environment are refused with the remedy."
    c = make_config(
        {"environment": {"name": "verifiers", "id": f"{OWN}:sums", "args": {"rows": 30}}, "eval": [{"count": 5}]}
    )
    pools = make_pools(c)
    assert (
        len(pools["train"]) + 1 > 20
        and 0 < len(pools["held_out"]) <= 5
        and not {t.id for t in pools["train"]} & {t.id for t in pools["held_out"]}
    )
    split = make_pools(make_config({"environment": {"name": "verifiers", "id": f"{OWN}:shop"}}))
    assert len(split["train"]) == 8 and len(split["held_out"]) == 4 and "/eval/" in split["held_out"][0].id
    for table, says in (
        ({"environment": {"name": "verifiers", "id": "x"}, "tasks": "chains"}, 'set tasks = "verifiers"'),
        ({"tasks": {"name": "verifiers", "id": "x"}}, "set environment"),
        ({"environment": "verifiers"}, "environment.id: none"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_config(table)
    for id, says in (
        ("no_such_module_at_all", "cannot be imported"),
        (f"{OWN}:nothing", "no function 'nothing'"),
        (f"{OWN}:price", "has to return an Environment|missing|unexpected"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            load_environment(id)
    verifiers_package.cache_clear()
    load_environment.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"rlbench\[verifiers\]"):
        load_environment(f"{OWN}:sums")
    verifiers_package.cache_clear()


def test_signals_stay_the_runs_own():
    "Loading an environment leaves the handlers of signals as they were."
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    load_environment(f"{OWN}:sums", '{"rows": 2}')
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_other_way():
    "An episode with a store, exported: that package plays it, and finds the rewards that are found here."
    tasks = [Task("chains/1", "17+25;x+8", "x=42;y=50", 2, "chains"), Task("chains/2", "3+4", "x=7", 1, "chains")]
    env = to_verifiers(tasks, lambda: store(tries=1), exact, correct, max_turns=4)
    lines = {"17+25=": [":42", ":50"], "3+4=": ["/", "x", ":7"]}

    async def say(messages):
        turn = sum(m["role"] == "assistant" for m in messages)
        return answer_message(lines[messages[0]["content"]][turn], turn)

    outputs = env.generate_sync(
        env.get_dataset().to_list(), client=in_process(verifiers_package(), say), model="m", on_progress=lambda *_: None
    )["outputs"]
    assert [(o["reward"], o["metrics"]["correct"], o["metrics"]["num_turns"], o["error"]) for o in outputs] == [
        (1.0, 1.0, 2, None),
        (0.0, 0.0, 2, None),
    ]
    assert [m["content"] for m in outputs[0]["completion"]] == [":42", "42+8=", ":50"]
    broken = to_verifiers(tasks, lambda: store(tries=1), lambda text, answer: 1 / 0, correct)
    failed = broken.generate_sync(
        broken.get_dataset().to_list()[:1],
        client=in_process(verifiers_package(), say),
        model="m",
        on_progress=lambda *_: None,
    )["outputs"]
    assert failed[0]["reward"] == 0.0 and "division by zero" in failed[0]["error"]["message"]

    class Unsure(SingleTurn):
        "Its own judgement is no number."

        def advance(self, response):
            return Done(response, Judged(True, float("nan")))

    async def anything(messages):
        return answer_message(":42", 0)

    unsure = to_verifiers(tasks, Unsure)
    (output,) = unsure.generate_sync(
        unsure.get_dataset().to_list()[:1],
        client=in_process(verifiers_package(), anything),
        model="m",
        on_progress=lambda *_: None,
    )["outputs"]
    assert output["reward"] == 0.0 and "Unsure" in output["error"]["message"]


PHONES = """
import socket, sys, threading
called = []
def refuse(*args, **kwargs):
    called.append(args[1:] or args)
    raise OSError("no network")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
import rlbench.loop.config, rlbench.runtime.driver
assert "verifiers" not in sys.modules, "only a run that needs the package imports it"
import asyncio
from rlbench.environments import verifiers_adapter as foreign
from rlbench.environments.verifiers_tasks import verifiers_tasks
(task, *_) = verifiers_tasks(id=ID, args={"rows": 3})
episode = foreign.verifiers(id=ID, args={"rows": 3})
episode.start(task)
async def play():
    await episode.advance('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    return await episode.advance("done")
assert asyncio.run(play()).judged.reward == 0.0
assert not {"torch", "transformers", "vllm", "ray"} & set(sys.modules), "the run process stays light"
assert not called, called
others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
print("quiet", [t.name for t in others if "asyncio" not in t.name])
"""


def test_nobody_phones_home():
    "Importing the package, making an environment and playing it open no connection, and import no torch."
    done = subprocess.run(
        [sys.executable, "-c", PHONES.replace("ID", repr(f"{OWN}:coins"))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(OWN).parents[1])},
    )
    assert done.returncode == 0 and done.stdout.strip() == "quiet []", done.stdout + done.stderr


def test_a_sandbox_that_is_awaited(tmp_path):
    "The interface of `inspect_ai`, on a sandbox of a pool."
    from rlbench.sandbox.pool import AwaitableSandbox, PoolClient, stop_pool
    from rlbench.sandbox.pool_rules import PoolSpec

    pool = PoolClient.connect(tmp_path / "pool", PoolSpec(workers=1))

    async def use(box):
        await box.write_file("in/a.txt", "17+25")
        said = await box.exec(["/bin/cat", "in/a.txt"])
        missing = await box.exec(["/bin/cat", "in/b.txt"])
        assert (
            (said.success, said.returncode, said.stdout) == (True, 0, "17+25")
            and not missing.success
            and missing.returncode
            and "b.txt" in missing.stderr
        )
        assert (await box.exec(["/bin/cat"], input="hello")).stdout == "hello"
        assert await box.read_file("in/a.txt") == "17+25"
        with pytest.raises(FileNotFoundError):
            await box.read_file("in/b.txt")
        with pytest.raises(TimeoutError):
            await box.exec(["/bin/sleep", "5"], timeout=0.5)

    try:
        with pool.open() as sandbox:
            asyncio.run(use(AwaitableSandbox(sandbox)))
    finally:
        stop_pool(tmp_path / "pool")
