"""The client in the manner of OpenAI's: many calls at once, cancelled ones, seeds,
and what a trainer reads from an answer."""

import asyncio
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from rlbench.engines.openai_client import Client, policy_client
from rlbench.engines.torch import TorchGenerator
from rlbench.generator import PlayedGenerator, Request, ScriptedResponse
from rlbench.models.model import encode_prompt, load_policy
from rlbench.records import Sampling, StopReason, stream_key


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


@pytest.fixture
def client(policy):
    return policy_client(policy, TorchGenerator(policy.model, max_length=128, slots=16, version=3))


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_many_calls_share_the_batch(policy, client):
    """Thirty-two calls over sixteen slots: each answer is what its request gives alone,
    to the token and the log-probability."""
    prompts = [f"{i}+{i + 3}=" for i in range(32)]

    async def all_at_once():
        return await asyncio.gather(
            *(
                client.chat.completions.create(model="m", messages=user(each), max_tokens=48, seed=i, logprobs=True)
                for i, each in enumerate(prompts)
            )
        )

    answers = asyncio.run(all_at_once())
    alone = TorchGenerator(policy.model, max_length=128, slots=1, version=3)
    alone.submit(
        Request(
            (i, 0), encode_prompt(policy, each), Sampling(max_tokens=48), stream_key(i, "client", 0), policy.stop_ids
        )
        for i, each in enumerate(prompts)
    )
    wanted = {result.key[0]: result for result in alone.step(10_000)}
    for i, answer in enumerate(answers):
        choice, result = answer.choices[0], wanted[i]
        assert (
            type(answer) is ChatCompletion
            and answer.prompt_token_ids == encode_prompt(policy, prompts[i]).tolist()
            and answer.model == "m"
        )
        assert choice.token_ids == result.segment.tokens.tolist() and choice.versions == [3] * len(choice.token_ids)
        assert (
            np.allclose(choice.token_logprobs, result.segment.logprobs, atol=1e-4)
            and [each.logprob for each in choice.logprobs.content] == choice.token_logprobs
        )
        assert choice.finish_reason == result.reason.value and answer.usage.completion_tokens == len(choice.token_ids)
    assert client.generator.idle and client.generator.stats().decode_tokens == sum(
        len(a.choices[0].token_ids) for a in answers
    )


def test_a_cancelled_call_leaves_the_generator(client):
    "And the calls beside it do not notice."

    async def talk():
        beside = asyncio.create_task(client.chat.completions.create(messages=user("17+25="), seed=1))
        endless = asyncio.create_task(
            client.chat.completions.create(messages=user("3+4="), seed=2, n=3, extra_body={"ignore_eos": True})
        )
        while client.generator.running < 4:
            await asyncio.sleep(0)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert len(client.open) <= 1
        with pytest.raises(TimeoutError):
            await client.chat.completions.create(messages=user("3+4="), timeout=0.001, extra_body={"ignore_eos": True})
        return await beside

    answer = asyncio.run(talk())
    assert client.generator.idle and client.open == {}
    assert (
        answer.choices[0].token_ids
        == asyncio.run(client.chat.completions.create(messages=user("17+25="), seed=1)).choices[0].token_ids
    )  # in another loop


def test_seeds(policy, client):
    "A seed repeats, its choices differ; calls without one differ, and another client repeats them in their order."

    async def draw(c):
        calls = ({"seed": 5}, {"seed": 5}, {}, {})
        return [
            [
                choice.token_ids
                for choice in (await c.completions.create(prompt="52+47=", n=4, temperature=2.0, **call)).choices
            ]
            for call in calls
        ]

    one, same, free, freer = drawn = asyncio.run(draw(client))
    assert (
        one == same and len({tuple(each) for each in one}) > 1 and len({str(each) for each in (one, free, freer)}) == 3
    )
    assert (
        asyncio.run(draw(policy_client(policy, client.generator)))
        == drawn
        != asyncio.run(draw(policy_client(policy, client.generator, seed=1)))
    )


def test_completions(policy, client):
    "A text, tokens, several of them; stops of a text are cut off and its tokens kept up to where it ends."

    async def all_of():
        create, ids = client.completions.create, encode_prompt(policy, "17+25=").tolist()
        return await asyncio.gather(
            create(prompt="17+25=", seed=1, logprobs=0),
            create(prompt=ids, seed=1),
            create(prompt=["17+25=", ids], seed=1, n=2),
            create(prompt="17+25=", seed=1, stop=":"),
        )

    text, tokens, several, stopped = asyncio.run(all_of())
    assert (
        type(text) is Completion
        and text.choices[0].text == tokens.choices[0].text
        and text.choices[0].prompt_token_ids == text.prompt_token_ids
    )
    assert text.choices[0].logprobs.token_logprobs == text.choices[0].token_logprobs and "".join(
        text.choices[0].logprobs.tokens
    ).startswith(text.choices[0].text)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.choices[
        0
    ].token_ids == several.choices[2].token_ids == text.choices[0].token_ids
    whole = text.choices[0].text
    assert (
        ":" in whole
        and stopped.choices[0].text == whole.partition(":")[0]
        and stopped.choices[0].finish_reason == "stop"
    )
    assert stopped.choices[0].token_ids == text.choices[0].token_ids[: len(stopped.choices[0].token_ids)]


def test_bad_requests_are_openais(client):
    "Caught as openai.BadRequestError and as ValueError, naming the field; nothing is left in the generator."

    async def refused(field, **fields):
        with pytest.raises(openai.BadRequestError) as told:
            await client.chat.completions.create(**{"messages": user("1+1="), **fields})
        assert (
            told.value.param == field
            and told.value.status_code == 400
            and isinstance(told.value, ValueError)
            and str(told.value).startswith(field)
        )
        return told.value

    async def all_of():
        await refused("temperature", temperature=-0.1)
        await refused("top_p", top_p=0)
        await refused("stop_token_ids", extra_body={"stop_token_ids": ["x"]})
        await refused("stop_token_ids", extra_body={"stop_token_ids": 5})
        await refused("max_tokens", max_tokens=500)
        await refused("presence_penalty", presence_penalty=1)
        await refused("top_q", extra_body={"top_q": 1})
        await refused("messages", messages=user("über"))
        assert "maximum context length" in (await refused("messages", messages=user("1+" * 99))).response.text

    asyncio.run(all_of())
    assert client.generator.idle and client.open == {}


def test_what_the_generator_raises_reaches_every_call(client, monkeypatch):
    def broken(n: int = 1):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(client.generator, "step", broken)

    async def all_of():
        return await asyncio.gather(
            *(client.chat.completions.create(messages=user(each)) for each in ("1+1=", "2+2=")), return_exceptions=True
        )

    assert [str(each) for each in asyncio.run(all_of())] == ["the device is gone"] * 2


def test_routes_of_a_server(client):
    "Environments that post for themselves: raw JSON, a prompt of tokens, the tokenizer."

    class Response:
        "A stand-in for the class of an HTTP library."

    async def all_of():
        ids = await client.with_options(base_url="x").post("/tokenize", body={"messages": user("17+25="), "model": "m"})
        body = {
            "model": "m",
            "messages": user("17+25="),
            "seed": 1,
            "logprobs": True,
            "max_completion_tokens": 40,
            "tools": None,
            "return_token_ids": True,
        }
        return (
            ids,
            await client.post("/chat/completions", body=body, cast_to=Response, options={}),
            await client.post(
                "/chat/completions/tokens", body={**body, "tokens": ids["tokens"]}, cast_to=ChatCompletion
            ),
        )

    ids, raw, typed = asyncio.run(all_of())
    parsed = ChatCompletion.model_validate_json(raw.content)
    assert (
        parsed.prompt_token_ids == ids["tokens"] == typed.prompt_token_ids
        and ids["count"] == 6
        and parsed.choices[0].token_ids == typed.choices[0].token_ids
    )
    assert parsed.choices[0].model_extra["versions"] == [3] * len(typed.choices[0].token_ids)
    with pytest.raises(openai.BadRequestError, match="path: '/embeddings'"):
        asyncio.run(client.post("/embeddings", body={}))


def test_a_chat_of_three_turns_keeps_its_tokens():
    """Every prompt begins with the tokens of all turns before it, though the tokenizer would have taken others;
    a history that was changed is tokenised anew."""
    words = ["<end>", "a", "b", "ab", "?"]

    def encode(text: str) -> list[int]:
        ids = []
        while text:
            ids.append(next(i for i in (0, 3, 1, 2, 4) if text.startswith(words[i])))
            text = text[len(words[ids[-1]]) :]
        return ids

    spell = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    render = lambda said, **_: "".join(m["content"] + "<end>" * (m["role"] == "assistant") for m in said)  # noqa: E731
    script = ScriptedResponse(np.array([1, 2, 0], np.int32), np.zeros(3, np.float32), StopReason.STOP)
    client = Client(
        PlayedGenerator(lambda request: script),
        encode,
        lambda ids: spell([i for i in ids if i]),
        [0],
        context=99,
        spell=spell,
        render=render,
    )

    async def talk():
        said, prompts = [], []
        for _ in range(3):
            said.append({"role": "user", "content": "?"})
            answer = await client.chat.completions.create(messages=said)
            prompts.append(answer.prompt_token_ids)
            said.append(answer.choices[0].message)
        changed = [*said[:-1], {"role": "assistant", "content": "abab"}, {"role": "user", "content": "?"}]
        return prompts, (await client.chat.completions.create(messages=changed)).prompt_token_ids

    prompts, changed = asyncio.run(talk())
    turn = [4, 1, 2, 0]
    assert prompts == [[4], [*turn, 4], [*turn, *turn, 4]]
    assert changed == [*turn, *turn, 4, 3, 3, 0, 4] and encode("?ab<end>?") == [4, 3, 0, 4]


def test_without_the_package_answers_look_the_same(client, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openai.types", None)
    answer = asyncio.run(client.chat.completions.create(messages=user("17+25="), seed=1))
    assert (
        isinstance(answer, SimpleNamespace)
        and not isinstance(answer, openai.BaseModel)
        and answer.choices[0].message.role == "assistant"
    )
    assert answer.model_dump()["choices"][0]["token_ids"] == answer.choices[0].token_ids
