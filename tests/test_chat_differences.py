"""Where our prompts differ from mlx-vlm's on purpose; docs/tokenizer.md lists them."""

import copy
from pathlib import Path
from typing import Any

import pytest
from conversations import WEATHER, assistant, call, system, tool, user
from reference_chat import ReferenceTokenizer, both_tokenizers
from tokenizer_folders import write_tk

from kimi_k3.errors import ChatError
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

Chat = list[Any]

_CALLS = assistant(None, tool_calls=[call("a", {}, "one"), call("b", {}, "two")])
_A, _B = tool("A", tool_call_id="one"), tool("B", tool_call_id="two")
_UNKNOWN = tool("?", tool_call_id="three", name="c")

#: mlx-vlm renders these, mostly with a result under another call's name or number.
REFUSED: dict[str, tuple[Chat, dict[str, Any], str]] = {
    "unknown id": ([_CALLS, _A, _UNKNOWN], {}, "tool_call_id 'three'"),
    "id of an older turn": (
        [_CALLS, _A, _B, assistant(None, tool_calls=[call("c", {}, "new")]), _A],
        {},
        "tool_call_id 'one'",
    ),
    "id answered twice": ([_CALLS, _A, _A, _B], {}, "message 1 answers already"),
    "id of two calls": (
        [
            assistant(None, tool_calls=[call("a", {}, "x"), call("b", {}, "x")]),
            tool("A", tool_call_id="x"),
        ],
        {},
        "2 calls of message 0 share",
    ),
    "call without a result": ([_CALLS, _B], {}, "follows for 'one'"),
    "calls without results": ([_CALLS, user("Well?")], {}, "for 'one'.*'two'"),
    "name of no call": ([_CALLS, tool("?", name="c"), _B], {}, "result of 'c'"),
    "role unknown": ([user("a"), {"role": "critic", "content": "b"}], {}, "'critic'"),
    "no message": ([user("a"), "b"], {}, "message 1 is str"),
    "tools and content": ([system("S", tools=[WEATHER])], {}, "only one can be"),
    "no schema": (
        [user("a")],
        {"response_format": {"type": "json_schema"}},
        "carries no schema",
    ),
    "format unknown": ([user("a")], {"response_format": "xml"}, "'xml'"),
    "choice unknown": ([user("a")], {"tool_choice": "any"}, "'any'"),
    "some ids of several": (
        [
            assistant(None, tool_calls=[call(n, {}, n) for n in "abc"]),
            *[tool("C"), tool("A", tool_call_id="a"), tool("B")],
        ],
        {},
        "message 1 is a tool result without a tool_call_id",
    ),
    "call of the older API": (
        [user("a"), assistant(None, function_call={"name": "f", "arguments": "{}"})],
        {},
        "has function_call",
    ),
    "tools are no list": ([user("a")], {"tools": {"a": 1}}, "tools is dict"),
    "thinking is a word": ([user("a")], {"thinking": "false"}, "thinking is 'false'"),
    "choice without tools": (
        [user("a")],
        {"tool_choice": "required", "add_generation_prompt": True},
        "no tools are declared",
    ),
    "choice of one of several": (
        [user("a")],
        {
            "tools": [WEATHER, {"name": "b"}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
            "add_generation_prompt": True,
        },
        "names the function 'b', and the tools declared are 'get_weather', 'b'",
    ),
}

_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}

#: (conversation, options, what it is for us in terms that mlx-vlm agrees on): there,
#: mlx-vlm gives other ids or an error.
RENDERED: dict[str, tuple[Chat, dict[str, Any], Chat, dict[str, Any]]] = {
    "names of calls, out of order": (
        [_CALLS, tool("B", name="b"), tool("A", name="a")],
        {},
        [_CALLS, _A, _B],
        {},
    ),
    "one by id, one by what is left": (
        [_CALLS, _B, tool("A")],
        {},
        [_CALLS, _A, _B],
        {},
    ),
    "calls sent apart": (
        [
            assistant("So", tool_calls=[call("a", {}, "one")]),
            assistant(None, tool_calls=[call("b", {}, "two")]),
            *[_B | {"name": "b"}, _A | {"name": "a"}],
        ],
        {},
        [{**_CALLS, "content": "So"}, _A, _B],
        {},
    ),
    "id of a result's own": (
        [_CALLS, {**tool("B", name="b"), "id": "msg_1"}, tool("A", name="a")],
        {},
        [_CALLS, _A, _B],
        {},
    ),
    "thinking in Moonshot's form": (
        [user("a"), assistant("b")],
        {"thinking": {"type": "disabled"}},
        [user("a"), assistant("b")],
        {"thinking": False},
    ),
    "developer": (
        [{"role": "developer", "content": "S"}, user("a")],
        {},
        [system("S"), user("a")],
        {},
    ),
    "choice of the only tool": (
        [user("a")],
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        },
        [user("a")],
        {"tools": [WEATHER], "tool_choice": "required"},
    ),
    "OpenAI's effort": (
        [user("a")],
        {"reasoning_effort": "medium"},
        [user("a")],
        {"thinking_effort": "high"},
    ),
    "schema not there beside one that is": (
        [user("a")],
        {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_schema": None,
        },
        [user("a")],
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ),
}


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TikTokenTokenizer, ReferenceTokenizer]:
    folder: Path = tmp_path_factory.mktemp("tk")
    write_tk(folder)
    return both_tokenizers(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_here_and_rendered_there(pair, name):
    ours, reference = pair
    messages, options, told = REFUSED[name]
    assert reference.chat_ids(copy.deepcopy(messages), **options)
    with pytest.raises(ChatError, match=told):
        ours.apply_chat_template(messages, **options)


@pytest.mark.parametrize("name", RENDERED)
def test_rendered_otherwise(pair, name):
    ours, reference = pair
    messages, options, plainly, plain_options = RENDERED[name]
    want = reference.chat_ids(copy.deepcopy(plainly), **plain_options)
    assert ours.apply_chat_template(messages, **options) == want
    assert reference.chat_ids(copy.deepcopy(messages), **options) != want


def test_results_apart_keep_the_number_of_their_call(pair):
    """mlx-vlm counts results as they come: number 1 for the second call's."""
    ours, reference = pair
    messages = [_CALLS, _B, user("wait"), _A]
    text = ours.apply_chat_template(messages, tokenize=False)
    assert 'tool="b" index="2"' in text
    assert 'tool="a" index="1"' in text.split("wait")[1]
    assert ours.encode(text) != reference.chat_ids(copy.deepcopy(messages))


def test_a_placeholder_that_a_user_typed_stays_text(pair):
    """Of mlx-vlm it takes the place of an image. K3's page: such text is text."""
    ours, reference = pair
    spelled = "<|kimi_image_placeholder|>"
    messages = [user([{"type": "text", "text": spelled}, _IMAGE])]
    prompt = ours.apply_chat_template(messages, tokenize=False)
    assert spelled in [piece.text for piece in prompt.pieces if not piece.control]
    assert [piece.text for piece in prompt.pieces if piece.control].count(spelled) == 1
    with pytest.raises(ValueError, match="More image placeholders than image prompts"):
        reference.chat_ids(copy.deepcopy(messages), image_prompts=["one"])
