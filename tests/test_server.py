"""A build behind mlx-lm's own server says what it says alone, however it is asked."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
from closeness import assert_close
from served_nano import (
    ADD,
    NO_CONTROL_IDS,
    NOTES,
    TOOLS,
    Alone,
    float32_nano,
    joined,
    said,
    user,
)
from serving import MODEL, Server, serve_build

from kimi_k3.tokenizer.answer import Answer

#: Tokens that the server reads at a time, so that every prompt takes a few steps.
STEP = 32

LONG_TEXT = " ".join(f"Line {n} says {n * n}." for n in range(30))

#: The answers of these chats are shorter; others are cut here.
LIMIT = 70

#: Chats in which the nano thinks, answers and calls.
CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "code": ([user(ADD)], {}),
    "low": ([user(ADD)], {"thinking_effort": "low"}),
    "no thinking": ([user("What is the capital of France?")], {"thinking": False}),
    "system": ([{"role": "system", "content": "Be short."}, user("Hello!")], {}),
    "chinese": ([user("用一句话介绍北京。")], {"thinking_effort": "high"}),
    "tools": ([user(NOTES)], {"tools": TOOLS}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(float32_nano(tmp_path_factory.mktemp("nano") / "nano"))


@pytest.fixture(scope="module")
def server(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hub = {"HF_HUB_CACHE": str(tmp_path_factory.mktemp("hub"))}
    options = ("--prefill-step-size", str(STEP), "--prompt-cache-size", "40")
    with serve_build(alone.build, *options, environment=hub) as server:
        yield server


def fields(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of the renderer as a request gives them."""
    kwargs = {name: value for name, value in options.items() if name != "tools"}
    tools = {"tools": options["tools"]} if "tools" in options else {}
    return {**tools, "extra_body": {"chat_template_kwargs": kwargs}}


def chat(server: Server, messages: Any, limit: int, **options: Any) -> Any:
    return server.client().chat.completions.create(
        model=MODEL, messages=messages, max_tokens=limit, **options
    )


def complete(server: Server, prompt: str, limit: int, **options: Any) -> Any:
    return server.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=limit, **options
    )


def ids_and_logprobs(reply: Any) -> tuple[list[int], list[float]]:
    entries = reply.model_dump()["choices"][0]["logprobs"]["content"]
    return [e["id"] for e in entries], [e["logprob"] for e in entries]


@pytest.mark.parametrize("name", CHATS)
def test_chat(server: Server, alone: Alone, name: str):
    messages, options = CHATS[name]
    reply = chat(server, messages, LIMIT, logprobs=True, **fields(options))
    prompt = alone.prompt(messages, **options)
    ids, logprobs = ids_and_logprobs(reply)
    assert ids == alone.ids(prompt, LIMIT)
    assert_close(logprobs, alone.logprobs(prompt, LIMIT), rel=1e-3)
    assert said(reply.choices[0].message) == alone.answer(messages, LIMIT, **options)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(ids)


def test_top_logprobs(server: Server, alone: Alone):
    messages = [user(ADD)]
    reply = chat(server, messages, 4, logprobs=True, top_logprobs=3)
    tops = [
        entry["top_logprobs"]
        for entry in reply.model_dump()["choices"][0]["logprobs"]["content"]
    ]
    assert [len(top) for top in tops] == [3] * 4
    likeliest = [max(top, key=lambda entry: entry["logprob"])["id"] for top in tops]
    assert likeliest == alone.ids(alone.prompt(messages), 4)


@pytest.mark.parametrize("name", ["code", "no thinking", "chinese", "tools"])
def test_a_stream_joins_to_the_whole_answer(server: Server, alone: Alone, name: str):
    messages, options = CHATS[name]
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(
        chat(server, messages, LIMIT, stream=True, **usage, **fields(options))
    )
    whole = alone.answer(messages, LIMIT, **options)
    assert joined(chunks) == (whole, "tool_calls" if whole.tool_calls else "stop")
    assert len(chunks) > 3
    ids = alone.ids(alone.prompt(messages, **options), LIMIT)
    assert chunks[-1].usage.completion_tokens == len(ids)


def test_tools_round_trip(server: Server, alone: Alone):
    messages: list[Any] = [user(NOTES)]
    first = chat(server, messages, 200, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert call.function.name == "read_file"
    assert said(first.message) == alone.answer(messages, 200, tools=TOOLS)
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Buy milk."},
    ]
    second = chat(server, messages, LIMIT, tools=TOOLS)
    # mlx-lm reads arguments that come as a string before it renders them.
    for entry in messages[1]["tool_calls"]:
        entry["function"]["arguments"] = json.loads(entry["function"]["arguments"])
    assert said(second.choices[0].message) == alone.answer(messages, LIMIT, tools=TOOLS)


def test_a_second_turn_goes_on_from_the_cache(server: Server, alone: Alone):
    messages: list[Any] = [user(ADD + " Be quick.")]
    first = chat(server, messages, 200)
    assert first.choices[0].finish_reason == "stop"
    messages += [first.choices[0].message.model_dump(exclude_none=True), user(NOTES)]
    second = chat(server, messages, LIMIT, logprobs=True)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens
    prompt = alone.prompt(messages)
    ids, logprobs = ids_and_logprobs(second)
    assert ids == alone.ids(prompt, LIMIT)
    assert_close(logprobs, alone.logprobs(prompt, LIMIT), rel=1e-3)


def test_a_long_prompt_in_chunks(server: Server, alone: Alone):
    """A keep-alive comes for each chunk, and nothing of the answer depends on them."""
    messages, limit = [user(LONG_TEXT)], 20
    prompt = alone.prompt(messages)
    body = {"messages": messages, "max_tokens": limit, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as lines:
        kept_alive = sum(line.startswith(b": keepalive") for line in lines)
    assert kept_alive >= len(prompt) // STEP > 8
    reply = chat(server, messages, limit, logprobs=True)
    ids, logprobs = ids_and_logprobs(reply)
    assert ids == alone.ids(prompt, limit)
    assert_close(logprobs, alone.logprobs(prompt, limit), rel=1e-3)


@pytest.mark.parametrize("prompt", ["def add(a, b):\n", "北京"])
def test_text_completions(server: Server, alone: Alone, prompt: str):
    plain = complete(server, prompt, 24, logprobs=True)
    ids = alone.ids(alone.tokenizer.encode(prompt), 24)
    assert ids_and_logprobs(plain)[0] == ids
    whole = complete(server, prompt, 24, logit_bias=NO_CONTROL_IDS).choices[0]
    chunks = complete(server, prompt, 24, logit_bias=NO_CONTROL_IDS, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.finish_reason == "length"


def test_models(server: Server, alone: Alone):
    """The model goes by its path, and a request may name it so."""
    (model,) = server.client().models.list().data
    assert model.id == str(alone.build.resolve())
    create = server.client().chat.completions.create
    messages: Any = [user(ADD)]
    reply = create(model=model.id, messages=messages, max_tokens=8)
    assert said(reply.choices[0].message) == alone.answer(messages, 8)


def leave_in_mid_stream(server: Server) -> str:
    """What two pieces of a long answer say, to a client that then goes away."""
    options = {"stream": True, "extra_body": {"logit_bias": NO_CONTROL_IDS}}
    with chat(server, [user(NOTES)], 3000, **options) as stream:
        return joined(next(stream) for _ in range(2))[0].reasoning


def test_two_chats_and_one_that_leaves(server: Server, alone: Alone):
    """B51. Each wait ends after a minute."""
    long, short = [user(LONG_TEXT[: 6 * STEP])], [user("Hello!")]
    prompts = [alone.prompt(messages) for messages in (long, short)]
    assert len(prompts[0]) > 2 * STEP, "no three chunks"
    wanted = [alone.ids(prompt, 30) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        leaving = pool.submit(leave_in_mid_stream, server)
        waiting = [
            pool.submit(whole_ids, server, messages, 30, {})
            for messages in (long, short)
        ]
        assert leaving.result(60)
        assert [asked.result(60) for asked in waiting] == wanted
        third = pool.submit(whole_ids, server, long, 30, {})
        assert third.result(60) == wanted[0]


def whole_ids(server: Server, messages: Any, limit: int, given: Any) -> list[int]:
    return ids_and_logprobs(chat(server, messages, limit, logprobs=True, **given))[0]


def stream_answer(server: Server, messages: Any, limit: int, given: Any) -> Answer:
    return joined(chat(server, messages, limit, stream=True, **given))[0]


def completed_ids(server: Server, prompt: str, limit: int) -> list[int]:
    return ids_and_logprobs(complete(server, prompt, limit, logprobs=True))[0]


def sixteen(server: Server, alone: Alone) -> list[tuple[Callable[[], Any], Any]]:
    """Requests of every kind and length, and what each is answered alone."""
    cases: list[tuple[Callable[[], Any], Any]] = []
    for place, (messages, options) in enumerate(CHATS.values()):
        limit = 20 + 10 * place
        asked = (server, messages, limit, fields(options))
        ids = alone.ids(alone.prompt(messages, **options), limit)
        answer = alone.answer(messages, limit, **options)
        cases += [(partial(whole_ids, *asked), ids)]
        cases += [(partial(stream_answer, *asked), answer)]
    for place, text in enumerate(("def add(a, b):\n", "It is", "北京", LONG_TEXT)):
        limit = 6 + 5 * place
        ids = alone.ids(alone.tokenizer.encode(text), limit)
        cases += [(partial(completed_ids, server, text, limit), ids)]
    return cases


def test_sixteen_at_once(server: Server, alone: Alone):
    cases = sixteen(server, alone)
    assert len(cases) == 16
    together = Barrier(len(cases))

    def ask(number: int) -> Any:
        together.wait(20)
        # mlx-lm lets five connections wait to be taken, and the system may reset more.
        time.sleep(0.02 * number)
        return cases[number][0]()

    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(ask, range(len(cases)), timeout=60))
    for number, (answer, (_, wanted)) in enumerate(zip(answers, cases, strict=True)):
        assert answer == wanted, number
