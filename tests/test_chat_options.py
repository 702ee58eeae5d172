"""Options of a prompt: efforts in both vocabularies, choices, and how a prompt ends."""

from pathlib import Path
from typing import Any

import pytest
from conversations import WEATHER, assistant, call, system, tool, user
from tokenizer_folders import load_tk

from kimi_k3.errors import ChatError
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

MESSAGES = [user("a"), assistant("b", reasoning_content="R"), user("c")]


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    folder: Path = tmp_path_factory.mktemp("tk")
    return load_tk(folder)


def text_of(tk: TikTokenTokenizer, messages: list[Any], **options: Any) -> str:
    return str(tk.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "high"),
        ("high", "high"),
        ("xhigh", "max"),
        ("max", "max"),
    ],
)
def test_openai_efforts(tk, theirs, own):
    want = text_of(tk, MESSAGES, thinking_effort=own)
    assert f"`thinking_effort={own}`" in want
    for thinking in ({}, {"thinking": True}, {"enable_thinking": True}):
        assert text_of(tk, MESSAGES, reasoning_effort=theirs, **thinking) == want
    off = text_of(tk, MESSAGES, thinking=False)
    assert text_of(tk, MESSAGES, reasoning_effort=theirs, thinking=False) == off


def test_no_effort_is_no_thinking(tk):
    """Also where the host passes thinking=True, as mlx-lm does unasked."""
    off = text_of(tk, MESSAGES, thinking=False)
    assert "think" not in off
    for thinking in ({}, {"thinking": True}, {"enable_thinking": True}):
        assert text_of(tk, MESSAGES, reasoning_effort="none", **thinking) == off
    assert text_of(tk, MESSAGES, reasoning_effort=None) == text_of(tk, MESSAGES)


def test_the_models_own_effort_goes_first(tk):
    for theirs in ("none", "low", "xhigh"):
        own = {"thinking_effort": "high"}
        want = text_of(tk, MESSAGES, **own)
        assert text_of(tk, MESSAGES, reasoning_effort=theirs, **own) == want
    silent = text_of(tk, MESSAGES, thinking_effort=None)
    assert "thinking_effort" not in silent
    both = {"reasoning_effort": "low", "thinking_effort": None}
    assert text_of(tk, MESSAGES, **both) == silent


@pytest.mark.parametrize("effort", ["ultra", "", 3, ["low"], True])
def test_unknown_efforts_are_refused(tk, effort):
    with pytest.raises(ChatError, match="reasoning_effort is .* choose none, minimal"):
        text_of(tk, MESSAGES, reasoning_effort=effort)


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thinking_in_the_form_of_moonshots_api(tk, name):
    for kind, thinking in (("enabled", True), ("disabled", False)):
        want = text_of(tk, MESSAGES, **{name: thinking})
        assert text_of(tk, MESSAGES, **{name: {"type": kind}}) == want


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
@pytest.mark.parametrize("value", ["false", "no", 0, 1, "", {}, {"type": "off"}, []])
def test_other_values_of_thinking_are_refused(tk, name, value):
    for effort in ({}, {"reasoning_effort": "none"}):
        with pytest.raises(ChatError, match="thinking is .*; pass true or false"):
            text_of(tk, MESSAGES, **{name: value}, **effort)


def test_no_value_is_the_default(tk):
    names = ("thinking", "tools", "tool_choice", "continue_final_message")
    assert text_of(tk, MESSAGES, **dict.fromkeys(names)) == text_of(tk, MESSAGES)


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_choice_of_the_only_tool(tk):
    later = [system(None, tools=[WEATHER]), user("a")]
    for messages, tools in (
        ([user("a")], [WEATHER]),
        (later, None),
        (later, [WEATHER]),
    ):
        options = {"tools": tools, "add_generation_prompt": True}
        want = text_of(tk, messages, tool_choice="required", **options)
        for choice in (
            chosen("get_weather"),
            {"type": "function", "name": "get_weather"},
        ):
            assert text_of(tk, messages, tool_choice=choice, **options) == want


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([WEATHER, {"name": "b"}], "declared are 'get_weather', 'b'"),
        ([{"name": "b"}], "declared are 'b'"),
        ([], "declared are none"),
    ],
)
def test_a_choice_that_cannot_be_told_is_refused(tk, tools, told):
    with pytest.raises(ChatError, match=f"'get_weather', and the tools {told}"):
        text_of(
            tk,
            [user("a")],
            tools=tools,
            tool_choice=chosen("get_weather"),
            add_generation_prompt=True,
        )


def test_continuing_goes_before_a_new_answer(tk):
    """mlx-lm's server always asks for a new answer."""
    messages = [user("a"), assistant("Su", reasoning_content="R")]
    for field in (True, "content", "reasoning_content"):
        want = text_of(tk, messages, continue_final_message=field)
        both = {"continue_final_message": field, "add_generation_prompt": True}
        assert text_of(tk, messages, **both) == want
        assert want.endswith("R" if field == "reasoning_content" else "Su")


def test_a_result_is_not_continued(tk):
    messages = [assistant("", tool_calls=[call("f", {}, "x")]), tool("r")]
    with pytest.raises(ChatError, match="message 1 cannot be continued: it declares"):
        text_of(tk, messages, continue_final_message=True)


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": chosen("get_weather")},
        {"tool_choice": chosen("get_weather"), "tools": [WEATHER]},
        {"tool_choice": "required", "response_format": "json_object"},
        {"continue_final_message": True},
        {"continue_final_message": "reasoning_content"},
        {"reasoning_effort": "none"},
        {"thinking_effort": None},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ],
)
def test_the_start_of_a_conversation_renders_with_every_option(tk, options):
    """mlx-lm's server renders it beside the whole, to find where system messages end."""
    head = [system("S"), system("T"), user("")]
    rest = [user("a"), system(None, tools=[WEATHER])]
    whole = [*head[:2], *rest, assistant("A", reasoning="R")]
    start = tk.apply_chat_template(head, add_generation_prompt=False, **options)
    prompt = tk.apply_chat_template(whole, **options)
    pairs = enumerate(zip(start, prompt, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), len(start))
    before = tk.decode(prompt[:same])
    assert before.endswith('<|open|>message role="user"<|sep|>')
    assert ">T<|close|>message" in before
