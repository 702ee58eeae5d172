"""Clients of mlx-lm's server that go away: their work stops, others get their answer."""

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from answer_shapes import closed, ids_of, opened
from serving import HOST, MODEL, ScriptedModel, Server, serve_script

from kimi_k3 import load
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.tokenizer.prompt import Piece

_, TOKENIZER = load(NANO_FOLDER)

#: Tokens of a prompt that are read in one step.
STEP = 8

#: What a step takes. mlx-lm looks every half second whether somebody has left.
SECONDS = 0.02

WORDS = " and so on" * 400
LONG_PROMPT = "All of this has to be read first. " * 40
SCRIPTS = [[Piece(text), *closed("think"), *opened("response")] for text in (WORDS, "")]
SHORT, LONG = 1, 0


@pytest.fixture
def model() -> ScriptedModel:
    answers = [ids_of(TOKENIZER, [*script, Piece("Yes.")]) for script in SCRIPTS]
    model = ScriptedModel(TOKENIZER, answers)
    model.seconds = SECONDS
    return model


@pytest.fixture
def server(model: ScriptedModel) -> Iterator[Server]:
    options = ("--prefill-step-size", str(STEP), "--max-tokens", "2000")
    with serve_script(model, TOKENIZER, *options) as server:
        yield server


def messages(script: int, text: str = "") -> Any:
    return [{"role": "user", "content": f"{text} script {script}"}]


def leave(server: Server, asked: Any, mark: bytes) -> None:
    """Ask for a stream, and go away once a line of it starts with ``mark``."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=20)
    body = json.dumps({"messages": asked, "stream": True})
    connection.request("POST", "/v1/chat/completions", body)
    with connection.getresponse() as reply:
        while not reply.readline().startswith(mark):
            pass
    connection.close()


def steps_until_idle(model: ScriptedModel) -> int:
    """Steps of the model once it takes no more of them."""
    deadline = time.monotonic() + 60
    steps = -1
    while steps != model.steps:
        assert time.monotonic() < deadline, "the server goes on and on"
        steps = model.steps
        time.sleep(0.3)
    return steps


def assert_answers(server: Server, asked: Any) -> None:
    reply = server.client().chat.completions.create(model=MODEL, messages=asked)
    assert reply.choices[0].message.content == "Yes."


def test_left_in_mid_answer(server: Server, model: ScriptedModel):
    """B51."""
    leave(server, messages(LONG), b"data:")
    assert steps_until_idle(model) < len(model.answers[LONG]) / 2
    model.seconds = 0.0
    assert_answers(server, messages(SHORT))
    assert_answers(server, messages(LONG))


def test_left_in_mid_prompt(server: Server, model: ScriptedModel):
    """B51. The same prompt is answered afterwards, whatever was kept of it."""
    asked = messages(SHORT, LONG_PROMPT)
    prompt = TOKENIZER.apply_chat_template(asked, add_generation_prompt=True)
    assert len(prompt) > 50 * STEP
    leave(server, asked, b": keepalive")
    assert steps_until_idle(model) * STEP < len(prompt)
    model.seconds = 0.0
    assert_answers(server, messages(SHORT))
    assert_answers(server, asked)


def test_left_before_an_answer_that_is_not_streamed(
    server: Server, model: ScriptedModel
):
    """mlx-lm notices nobody leaving while it has nothing to send: it goes on to the end.

    When it stops, this says so, and the page on serving need not tell.
    """
    model.seconds = 0.0
    connection = http.client.HTTPConnection(HOST, server.port, timeout=20)
    body = json.dumps({"messages": messages(LONG)})
    connection.request("POST", "/v1/chat/completions", body)
    while not model.steps:
        time.sleep(0.01)
    connection.close()
    assert steps_until_idle(model) > len(model.answers[LONG])
    assert_answers(server, messages(SHORT))
