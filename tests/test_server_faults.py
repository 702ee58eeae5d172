"""What mlx-lm's server makes of requests that are wrong, and whether it goes on."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm.server
import pytest
from conversations import assistant, call, tool, user
from huggingface_hub import scan_cache_dir
from serving import CHAT, TEXT, ScriptedModel, Server, serve_script

from kimi_k3 import load
from kimi_k3.nano import NANO_FOLDER

_, TOKENIZER = load(NANO_FOLDER)


def scripted() -> ScriptedModel:
    return ScriptedModel(TOKENIZER, [TOKENIZER.encode("Hello there.")])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_script(scripted(), TOKENIZER) as server:
        yield server


def chat(messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 3, **more}


def hello(**more: Any) -> dict[str, Any]:
    return chat([user("Hello")], **more)


def assert_goes_on(server: Server) -> None:
    status, text = server.post(CHAT, hello())
    assert status == 200, text
    assert json.loads(text)["choices"][0]["message"]["reasoning"]


_ASKED = [user("x"), assistant("", tool_calls=[call("f", "{}", "one")])]

#: A wrong request, its status, and what its body says. 400 is what mlx-lm finds by
#: itself, 404 what the renderer does, or anything else after mlx-lm's own checks.
WRONG: dict[str, tuple[Any, int, str]] = {
    "half JSON": (b'{"messages": [', 400, "Invalid JSON in request body"),
    "a list": ([], 400, "should be a JSON dictionary"),
    "no messages": ({}, 400, "did not contain messages"),
    "messages null": (chat(None), 400, "not iterable"),
    "messages a string": (chat("Hello"), 400, "'str' object"),
    "a message is a number": (chat([5]), 400, "'int' object"),
    "messages empty": (chat([]), 404, "the conversation is empty"),
    "unknown role": (chat([{"role": "robot"}]), 404, "message 0 has role 'robot'"),
    "no role": (chat([{"content": "x"}]), 404, "message 0 has role None"),
    "content a number": (chat([user(5)]), 404, "message 0 has content of type int"),
    "content a dict": (chat([user({})]), 404, "message 0 has content of type dict"),
    "part without text": (chat([user([{"type": "text"}])]), 404, "'text'"),
    "unknown part": (chat([user([{"type": "video"}])]), 404, "Only 'text' content"),
    "no such call": (
        chat([*_ASKED, tool("r", tool_call_id="two")]),
        404,
        "tool_call_id 'two'",
    ),
    "result without call": (chat([user("x"), tool("r")]), 404, "message 1 is a tool"),
    "half arguments": (
        chat([user("x"), assistant("", tool_calls=[call("f", "{x", "one")])]),
        404,
        "line 1 column 2",
    ),
    "a call is a number": (
        chat([user("x"), assistant("", tool_calls=[5])]),
        404,
        "'int' object",
    ),
    "unknown effort": (
        hello(chat_template_kwargs={"thinking_effort": "huge"}),
        404,
        "thinking_effort is 'huge'",
    ),
    "kwargs a string": (hello(chat_template_kwargs="x"), 404, "dictionary"),
    "max_tokens negative": (hello(max_tokens=-1), 400, "max_tokens must be at least"),
    "max_tokens null": (hello(max_tokens=None), 400, "max_tokens must be of type int"),
    "temperature null": (hello(temperature=None), 400, "temperature must be of type"),
    "temperature a string": (hello(temperature="1"), 400, "temperature must be of"),
    "top_p too high": (hello(top_p=1.5), 400, "top_p must be at most 1"),
    "top_logprobs null": (hello(top_logprobs=None), 400, "top_logprobs must be of"),
    "stream a string": (hello(stream="yes"), 400, "stream must be of type bool"),
    "bias of a word": (hello(logit_bias={"a": 1}), 400, "logit_bias must be a dict"),
    "model a number": (hello(model=5), 400, "requested_model must be of type str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_told_why(server: Server, name: str):
    body, wanted, words = WRONG[name]
    status, text = server.post(CHAT, body)
    assert status == wanted
    assert words in json.loads(text)["error"]
    assert_goes_on(server)


@pytest.mark.parametrize(
    ("body", "wanted", "words"),
    [
        ({}, 400, "did not contain a prompt"),
        ({"prompt": None}, 404, "Input must be a string"),
        ({"prompt": 5}, 404, "Input must be a string"),
    ],
    ids=["no prompt", "null", "a number"],
)
def test_wrong_completions_are_told_why(
    server: Server, body: Any, wanted: int, words: str
):
    status, text = server.post(TEXT, body)
    assert status == wanted
    assert words in json.loads(text)["error"]
    assert_goes_on(server)


def test_unknown_paths(server: Server):
    assert server.post("/v1/embeddings", {}) == (404, "Not Found")


def test_another_model_costs_a_load():
    """mlx-lm lets go of the model it has before it looks for another.

    When it keeps it, this says so, and the page on serving need not warn.
    """
    model = scripted()
    with serve_script(model, TOKENIZER) as server:
        assert_goes_on(server)
        assert model.loads == 1
        status, text = server.post(CHAT, hello(model="gpt-4o"))
        assert (status, json.loads(text)["error"]) == (404, "no model gpt-4o")
        assert_goes_on(server)
        assert model.loads == 2


#: mlx-lm breaks off the connection and goes on with others.
DROPPED: dict[str, Any] = {
    "no UTF-8": b'{"messages": "\xff"}',
    "bias null": hello(logit_bias={"1": None}),
    "seed negative": hello(seed=-1),
    "seed too large": hello(seed=2**64),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_mlx_lm_drops_without_a_word(server: Server, name: str):
    with pytest.raises(http.client.RemoteDisconnected):
        server.post(CHAT, DROPPED[name])
    assert_goes_on(server)


def test_stream_options_without_include_usage(server: Server):
    """mlx-lm breaks off after the answer, before the line that says so."""
    status, text = server.post(CHAT, hello(stream=True, stream_options={}))
    assert status == 200
    assert '"finish_reason": "length"' in text
    assert "[DONE]" not in text
    assert_goes_on(server)


def test_models_need_the_folder_of_the_hub(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without it mlx-lm's list is an empty reply; an empty folder will do."""
    hub = tmp_path / "hub"
    scan = partial(scan_cache_dir, hub)
    monkeypatch.setattr(mlx_lm.server, "scan_cache_dir", scan)

    def models() -> bytes:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=20) as reply:
            return reply.read()

    assert models() == b""
    hub.mkdir()
    assert json.loads(models())["object"] == "list"


#: mlx-lm's generation thread dies of these, and with it every request that is under way:
#: path, body, what it dies of.
FATAL: dict[str, tuple[str, Any, str]] = {
    "stop a number": (CHAT, hello(stop=5), "'int' object is not iterable"),
    "top_k of the vocabulary": (
        CHAT,
        hello(top_k=len(TOKENIZER), temperature=1.0),
        "`top_k` has to be an integer",
    ),
    "xtc_threshold above a half": (
        CHAT,
        hello(xtc_probability=0.5, xtc_threshold=0.6, temperature=1.0),
        "`threshold` has to be a float",
    ),
    "empty prompt": (TEXT, {"prompt": ""}, "has an empty prompt"),
    "list of prompts": (TEXT, {"prompt": ["a", "b"]}, "unpack"),
}


@pytest.mark.parametrize("name", FATAL)
def test_what_mlx_lm_dies_of(name: str, caplog: pytest.LogCaptureFixture):
    """When it survives one of them, this says so, and the page need not list it."""
    path, body, fault = FATAL[name]
    with serve_script(scripted(), TOKENIZER) as server:
        try:
            status, _ = server.post(path, body)
        except http.client.RemoteDisconnected:
            status = 0
        assert status != 200
        assert not server.healthy()
        status, text = server.post(CHAT, hello())
        assert (status, json.loads(text)["error"]) == (404, "generation thread died")
    (died,) = [record for record in caplog.records if "died" in record.message]
    assert fault in died.message
