"""mlx-lm's server on answers that are made up: ends, JSON, stop words, long calls."""

import itertools
import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from answer_shapes import Pieces, argument, call, closed, ids_of, opened
from mlx_lm.utils import load_tokenizer
from serving import MODEL, ScriptedModel, Server, serve_script
from tokenizer_folders import edit_json

from kimi_k3 import load
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.tokenizer.prompt import Piece

_, TOKENIZER = load(NANO_FOLDER)

END_IDS = ("<|end_of_msg|>", "[EOS]")
JSON = '{"name": "Ada", "tags": ["<|close|>", "a\\"b"]}'
STOPPED = "one <| two STOP three"
LONG = "".join(f'line {n}: «x < y & "z"» \\\n' for n in range(100))

_THOUGHT = [Piece("Hm."), *closed("think")]
_OPENED = [*_THOUGHT, *opened("response")]
_MESSAGE_ENDS = closed("message")
_ENDS = {
    "regular": [*closed("response"), *_MESSAGE_ENDS],
    "response closed": closed("response"),
    "without separator": closed("response")[:2],
    "message closed": _MESSAGE_ENDS,
    "nothing closed": [],
}


def _calls(*texts: str) -> Pieces:
    """An answer that calls ``write`` with each of ``texts``."""
    made = [
        piece
        for n, text in enumerate(texts, 1)
        for piece in call("write", argument("text", text), index=n)
    ]
    return [*_THOUGHT, *opened("tools"), *made, *closed("tools"), *_MESSAGE_ENDS]


def _ended_by(name: str) -> Pieces:
    """An answer that ends on the control id ``name``, and text that comes too late."""
    return [*_OPENED, Piece("Yes."), Piece(name, control=True), Piece(" And more.")]


SCRIPTS: dict[str, Pieces] = {
    **{name: _ended_by(name) for name in END_IDS},
    **{name: [*_OPENED, Piece(JSON), *end] for name, end in _ENDS.items()},
    "stop": [*_OPENED, Piece(STOPPED), *_ENDS["regular"]],
    "long call": _calls(LONG),
    "three calls": _calls("a" * 40, "b" * 400, "c" * 400),
}


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(TOKENIZER, [ids_of(TOKENIZER, p) for p in SCRIPTS.values()])


@pytest.fixture(scope="module")
def server(model: ScriptedModel) -> Iterator[Server]:
    with serve_script(model, TOKENIZER, "--max-tokens", "5000") as server:
        yield server


#: A word that no other prompt has, so that none goes on from another's cache.
_COUNTER = itertools.count()


def messages(script: str) -> Any:
    number = list(SCRIPTS).index(script)
    text = f"{next(_COUNTER)} script {number}"
    return [{"role": "user", "content": text}]


def chat(server: Server, script: str, **options: Any) -> tuple[str, str, int]:
    """Content, how it ended, tokens made."""
    reply = server.client().chat.completions.create(
        model=MODEL, messages=messages(script), **options
    )
    assert reply.usage is not None
    (choice,) = reply.choices
    return (
        choice.message.content or "",
        choice.finish_reason,
        reply.usage.completion_tokens,
    )


def streamed(server: Server, script: str, **options: Any) -> tuple[str, str, int]:
    chunks = list(
        server.client().chat.completions.create(
            model=MODEL,
            messages=messages(script),
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    *parts, usage = chunks
    assert usage.usage is not None
    content = "".join(part.choices[0].delta.content or "" for part in parts)
    reason = parts[-1].choices[0].finish_reason
    return content, str(reason), usage.usage.completion_tokens


@pytest.fixture(scope="module", params=END_IDS)
def server_of_one_end(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server on a checkpoint whose config knows one of the two end ids."""
    folder = tmp_path_factory.mktemp("one_end") / "nano"
    weights_and_both_ends = ("*.safetensors", "generation_config.json")
    shutil.copytree(
        NANO_FOLDER, folder, ignore=shutil.ignore_patterns(*weights_and_both_ends)
    )
    one = TOKENIZER.convert_tokens_to_ids(request.param)
    edit_json(folder / "config.json", lambda config: config.update(eos_token_id=one))
    tokenizer = load_tokenizer(folder, eos_token_ids=one)
    answers = [ids_of(TOKENIZER, pieces) for pieces in SCRIPTS.values()]
    with serve_script(ScriptedModel(tokenizer, answers), tokenizer) as server:
        yield server


WAYS = {"whole": chat, "streamed": streamed}

#: With a seed mlx-lm leaves its batches for another loop of its own.
LOOPS: dict[str, dict[str, Any]] = {"batched": {}, "single": {"seed": 1}}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", END_IDS)
def test_both_end_ids_stop(server_of_one_end: Server, end: str, way: str, loop: str):
    """B18."""
    content, reason, tokens = WAYS[way](server_of_one_end, end, **LOOPS[loop])
    assert (content, reason) == ("Yes.", "stop")
    assert tokens == len(ids_of(TOKENIZER, SCRIPTS[end][:-1]))


@pytest.mark.parametrize("end", END_IDS)
def test_both_end_ids_stop_a_completion(server_of_one_end: Server, end: str):
    """B18. A prompt of ids may hold control ids; one of text has none."""
    asked = Piece(messages(end)[0]["content"])
    prompt = ids_of(TOKENIZER, [asked, *opened("think")])
    create = server_of_one_end.client().completions.create
    reply = create(model=MODEL, prompt=prompt)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text.endswith("Yes.")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", _ENDS)
def test_json_has_nothing_behind_it(server: Server, end: str, way: str):
    kwargs = {"response_format": {"type": "json_object"}}
    body = {"chat_template_kwargs": kwargs}
    content, reason, _ = WAYS[way](server, end, extra_body=body)
    assert (content, reason) == (JSON, "stop")
    assert json.loads(content)["tags"] == ["<|close|>", 'a"b']


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("word", ["<|close|", "|>", "<|open|>resp", "sponse"])
def test_stop_words_find_no_part_of_a_marker(server: Server, word: str, way: str):
    content, reason, tokens = WAYS[way](server, "stop", stop=[word])
    assert (content, reason) == (STOPPED, "stop")
    assert tokens == len(ids_of(TOKENIZER, SCRIPTS["stop"])) + 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("word", "content"), [("<|", "one "), (" STOP", "one <| two"), ("none", STOPPED)]
)
def test_stop_words_end_text(server: Server, word: str, content: str, way: str):
    assert WAYS[way](server, "stop", stop=word)[:2] == (content, "stop")


@pytest.mark.parametrize(
    ("word", "content"),
    [
        ("response", ""),  # the word in the marker that opens the content
        ("Hm", ""),  # thinking
        ("STOP", "one <| two  three"),  # written as " STOP", another token
    ],
)
def test_what_mlx_lm_makes_of_stop_words(server: Server, word: str, content: str):
    """It compares ids, and those of the whole answer. As the page on serving says."""
    assert chat(server, "stop", stop=word)[0] == content


def arrivals(server: Server, script: str) -> Iterator[dict[str, Any] | None]:
    """What a stream sends, piece by piece: a delta, or None for a keep-alive."""
    body = {"messages": messages(script), "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as lines:
        for line in lines:
            if line.startswith(b":"):
                yield None
            elif line.startswith(b"data: {"):
                yield json.loads(line[len("data: ") :])["choices"][0]["delta"]


def test_a_long_argument_arrives_whole(server: Server, model: ScriptedModel):
    """B25. mlx-lm sends nothing at all while a call is written, then all of it.

    When it sends arguments bit by bit, or keep-alives, this says so.
    """
    written = len(ids_of(TOKENIZER, SCRIPTS["long call"]))
    assert written > 2000
    made: list[tuple[int, dict[str, Any]]] = []
    before = model.steps
    for delta in arrivals(server, "long call"):
        if delta is None:
            assert not made, "a keep-alive after the prompt"
        else:
            made.append((model.steps - before, delta))
    place = next(n for n, (_, delta) in enumerate(made) if "tool_calls" in delta)
    said = [delta for _, delta in made[:place]]
    assert "".join(delta["reasoning"] for delta in said) == "Hm."
    steps, delta = made[place]
    assert steps > 0.95 * written
    pieces = [called["function"]["arguments"] for called in delta["tool_calls"]]
    assert json.loads("".join(pieces)) == {"text": LONG}
    assert not any("tool_calls" in delta for _, delta in made[place + 1 :])


def test_calls_arrive_as_each_closes(
    server: Server, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "seconds", 0.002)
    arrived: list[tuple[float, int, str]] = []
    for delta in arrivals(server, "three calls"):
        for called in (delta or {}).get("tool_calls", ()):
            text = json.loads(called["function"]["arguments"])["text"]
            arrived.append((time.monotonic(), called["index"], text))
    assert [index for _, index, _ in arrived] == [0, 1, 2]
    assert [text[0] for _, _, text in arrived] == ["a", "b", "c"]
    # Each takes as long as it is written, so half of that lies between two at least.
    for (first, *_), (second, _, text) in itertools.pairwise(arrived):
        written = len(TOKENIZER.encode(text, add_special_tokens=False))
        assert second - first > written * model.seconds / 2
