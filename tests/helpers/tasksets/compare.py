"""Three tasksets of `verifiers` 0.4, played by that package with its own program, and here:
the same rewards and metrics.

By hand, with a version from 0.4 on installed: `python tests/tasksets/compare.py [sums] [shop] [coins]`.
The lock has an older one, whose tests are in `test_verifiers.py`.
"""

import asyncio
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
sys.path.insert(0, str(HERE))

import verifiers.v1 as vf  # noqa: E402
from aiohttp import web  # noqa: E402

from rlbench.base.chat import answer_message, read_chat  # noqa: E402
from rlbench.environments import verifiers_adapter as foreign  # noqa: E402
from rlbench.environments.episode import Done  # noqa: E402

UV = f"""#!/bin/sh
case "$*" in
  *--help*) echo --script ;;
  "python find"*) echo {sys.executable} ;;
esac
"""


def call(name: str, **arguments) -> str:
    "A call of a tool, as a policy writes it."
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripts(kind: str, answer: str, item: str) -> list[list[str]]:
    "What policies might say, good and bad; the last line is said again."
    if kind == "sums":
        return [[f":{answer}"], [f"let me see:{int(answer) + 1}"], ["no idea"]]
    if kind == "shop":
        good = call("price", item=item, count=1 + ["apple", "pear", "plum"].index(item))
        return [
            [good, answer],
            [answer],
            ["I look. " + good, "0"],
            [good],
            [call("price", item="grape"), answer],
            [call("steal", item=item), answer],
            ['<tool_call>{"name": "price", "arguments": "[1"}</tool_call>', answer],
        ]
    coins = {"3": (2, 1), "7": (5, 2)}[answer]
    return [
        [call("put", coin=coins[0]), call("put", coin=coins[1]), "done"],
        [call("put", coin=1)],
        [call("put", coin=3), "done"],
        ["done"],
    ]


def chunk(delta: dict, reason: str | None) -> bytes:
    "A piece of a streamed answer."
    table = {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    return f"data: {json.dumps(table)}\n\n".encode()


def answers(lines: list[str]):
    "A server's handler that says the lines of a script."

    async def handle(request):
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message = answer_message(lines[min(turn, len(lines) - 1)], turn)
        if "tool_calls" in message:
            message = {**message, "tool_calls": [{"index": n, **each} for n, each in enumerate(message["tool_calls"])]}
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for piece in (
            chunk(message, None),
            chunk({}, "tool_calls" if "tool_calls" in message else "stop"),
            b"data: [DONE]\n\n",
        ):
            await reply.write(piece)
        await reply.write_eof()
        return reply

    return handle


async def by_the_package(tasks, place: int, lines: list[str]):
    "Reward and metrics as the package finds them, with its own program."
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answers(lines))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
    config = vf.AgentConfig(model="m", client=client, harness={"id": "null"}, runtime=vf.SubprocessConfig())
    trace = await vf.make_agent(config).run(tasks.by_index[place])
    await runner.cleanup()
    assert trace.ok, trace.errors
    return trace.reward, {**{name: each.score for name, each in trace.rewards.items()}, **trace.metrics}


async def here(tasks, task, lines: list[str]):
    "The same by an episode."
    episode = foreign.VerifiersEpisode(tasks)
    episode.start(task)
    for turn in range(20):
        heard = await episode.advance(lines[min(turn, len(lines) - 1)])
        if isinstance(heard, Done):
            return heard.judged.reward, dict(heard.judged.parts), heard.judged
    raise AssertionError("no end")


async def limited(tasks, task):
    "A limit of the run ends an episode, and the task judges what there is."
    episode = foreign.VerifiersEpisode(tasks)
    episode.start(task)
    await episode.advance(call("price", item="apple"))
    return (await episode.cut()).judged


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "uv").write_text(UV)
        (Path(folder) / "uv").chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        os.environ["NO_KEY"] = "none"
        compared, seen = 0, set()
        for kind in sys.argv[1:] or ("sums", "shop", "coins"):
            args = {"rows": 2} if kind == "sums" else {}
            tasks = foreign.load_environment(f"own_{kind}", json.dumps(args))
            for place, task in list(tasks.by_index.items())[
                : 2 if kind == "sums" else 1
            ]:  # a rollout with tools starts processes
                made = tasks.task(f"own_{kind}", place)
                for lines in scripts(kind, task.data.answer, getattr(task.data, "item", "")):
                    wanted = asyncio.run(by_the_package(tasks, place, lines))
                    found = asyncio.run(here(tasks, made, lines))
                    assert found[:2] == wanted, (kind, place, lines, found, wanted)
                    compared, seen = compared + 1, seen | {wanted[0]}
                    print(kind, place, lines[0][:70], wanted, flush=True)
            print(
                f"{kind}: {len(tasks.by_index)} tasks, tools "
                f"{[each['function']['name'] for each in read_chat(made.prompt).tools]}",
                flush=True,
            )
            if kind == "shop":
                judged = asyncio.run(limited(tasks, tasks.task("own_shop", 0)))
                assert judged.reward == -0.05 and dict(judged.parts) == {"right": 0.0, "asked": 1.0}, judged
    print(
        f"verifiers {version('verifiers')}: {compared} rollouts compared, equal rewards and metrics, "
        f"{len(seen)} different rewards"
    )


if __name__ == "__main__":
    main()
