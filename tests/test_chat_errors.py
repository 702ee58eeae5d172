"""Conversations that cannot be rendered are refused by message and reason."""

from pathlib import Path
from typing import Any

import pytest
from conversations import assistant, call, system, user
from tokenizer_folders import load_tk

from kimi_k3.errors import ChatError
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

#: JSON that is deeper than Python can write or read.
_DEEP: list[Any] = []
for _ in range(100_000):
    _DEEP = [_DEEP]

MESSAGES: dict[str, tuple[Any, str]] = {
    "no list": ("hi", "a conversation is a list of messages, not str"),
    "nothing": (None, "a conversation is a list of messages, not nothing"),
    "empty": ([], "the conversation is empty"),
    "no dictionary": ([user("a"), "b"], "message 1 is str; a message is a dictionary"),
    "no role": ([{"content": "a"}], "message 0 has role None; Kimi K3 knows system"),
    "odd role": ([{"role": "function"}], "message 0 has role 'function'"),
    "unhashable role": ([{"role": ["user"]}], r"message 0 has role \['user'\]"),
    "content is a number": ([user(3)], "message 0 has content of type int"),
    "part is text": ([user(["a"])], "message 0, part 0 is str"),
    "audio": (
        [user("a"), user([{"type": "text", "text": "a"}, {"type": "input_audio"}])],
        "message 1, part 1 has type 'input_audio'; Kimi K3 takes 'text', 'input_text', "
        "'output_text', 'image', 'image_url', 'input_image'. Leave",
    ),
    "part without text": (
        [user([{"type": "text"}])],
        "part 0 has no string under 'text'",
    ),
    "name is a number": ([user("a", name=3)], "message 0 has name of type int"),
    "reasoning is a list": (
        [assistant("a", reasoning_content=["b"])],
        "message 0 has reasoning_content of type list",
    ),
    "nameless call": (
        [user("a"), assistant("", tool_calls=[call("f", {}), {"id": "x"}])],
        "message 1, call 1 names no function",
    ),
    "call of an empty name": (
        [assistant("", tool_calls=[call("", {})])],
        "message 0, call 0 names no function",
    ),
    "arguments are a list": (
        [assistant("", tool_calls=[call("f", "[1]")])],
        r"message 0, call 0 \(f\) has arguments of type list; pass a JSON object",
    ),
    "argument is no JSON": (
        [assistant("", tool_calls=[call("f", {"a": {1, 2}})])],
        "message 0, call 0, argument 'a' cannot be written as JSON: .*set",
    ),
    "argument is too deep": (
        [assistant("", tool_calls=[call("f", {"a": _DEEP})])],
        "message 0, call 0, argument 'a' cannot be written as JSON: .*recursion",
    ),
    "argument of a call sent apart": (
        [
            assistant("", tool_calls=[call("f", {})]),
            assistant("", tool_calls=[call("g", {"a": {1, 2}})]),
        ],
        "message 1, call 0, argument 'a' cannot be written as JSON",
    ),
    "calls are a number": (
        [assistant("", tool_calls=5)],
        "message 0 has tool_calls of type int; pass a list",
    ),
    "calls are a dictionary": (
        [assistant("", tool_calls={"name": "f"})],
        "message 0 has tool_calls of type dict",
    ),
    "call of the older API": (
        [user("a"), assistant(None, function_call={"name": "f", "arguments": "{}"})],
        "message 1 has function_call, of an older API; pass the call as 'tool_calls'",
    ),
    "empty call of the older API": (
        [assistant("", function_call={})],
        "message 0 has function_call",
    ),
    "later tools are a number": (
        [system(None, tools=5)],
        "message 0, tools is int; pass a list of dictionaries",
    ),
    "later tools are a dictionary": (
        [system(None, tools={"a": 1})],
        "message 0, tools is dict",
    ),
    "later tool is a word": (
        [system(None, tools=[{"name": "f"}, "abc"])],
        "message 0, tools, entry 1 is str; a tool is a dictionary",
    ),
    "half a character": (
        [user("a"), user("b\ud800")],
        r"message 1 holds '\\ud800', half of a surrogate pair",
    ),
    "half a character in a name": ([user("a", name="\udfff")], "message 0 holds"),
    "half a character in thoughts": (
        [user("a"), assistant("", reasoning="\ud83d")],
        "message 1 holds",
    ),
    "half a character in an argument": (
        [user("a"), assistant("", tool_calls=[call("f", {"a": ["\ud800"]})])],
        "message 1, call 0 holds",
    ),
    "half a character in a later tool": (
        [user("a"), system(None, tools=[{"name": "\ud800"}])],
        "message 1 holds",
    ),
    "tools and content": (
        [system("a", tools=[{"name": "f"}])],
        "message 0 declares tools and has content",
    ),
}

OPTIONS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "effort": (
        [user("a")],
        {"thinking_effort": "medium"},
        "'medium'; choose low, high, max",
    ),
    "choice": ([user("a")], {"tool_choice": {"type": "function"}}, "tool_choice is"),
    "choice of another kind": (
        [user("a")],
        {"tool_choice": {"type": "custom", "name": "f"}, "tools": [{"name": "f"}]},
        "tool_choice is {'type': 'custom', 'name': 'f'}; Kimi K3 knows",
    ),
    "format": ([user("a")], {"response_format": "xml"}, "response_format is 'xml'"),
    "no schema": (
        [user("a")],
        {"response_format": {"type": "json_schema"}},
        "'json_schema' but carries no schema",
    ),
    "continued call": (
        [user("a"), assistant("", tool_calls=[call("f", {})])],
        {"continue_final_message": True},
        "message 1 cannot be continued: it declares or calls tools",
    ),
    "continued field": (
        [assistant("a")],
        {"continue_final_message": "name"},
        "continue_final_message is 'name'; pass true or false",
    ),
    "continued user in a field": (
        [user("a")],
        {"continue_final_message": "bogus"},
        "continue_final_message is 'bogus'",
    ),
    "continued by a dictionary": (
        [user("a")],
        {"continue_final_message": {"a": 1}},
        "continue_final_message is {'a': 1}",
    ),
    "continued thought without thinking": (
        [assistant("a")],
        {"continue_final_message": "reasoning_content", "thinking": False},
        "message 0 cannot be continued in 'reasoning_content'",
    ),
    "continued question with notes": (
        [user("a")],
        {
            "continue_final_message": True,
            "tool_choice": "required",
            "tools": [{"name": "f"}],
        },
        r"message 0 \(user\) cannot be continued together with tool_choice",
    ),
    "template": ([user("a")], {"chat_template": "{{ x }}"}, "has no chat_template"),
    "documents": ([user("a")], {"documents": [{}]}, "has no documents"),
    "mask": (
        [user("a")],
        {"return_assistant_tokens_mask": True},
        "has no return_assistant_tokens_mask",
    ),
    "choice without tools": (
        [user("a")],
        {"tool_choice": "required", "add_generation_prompt": True},
        "tool_choice is 'required', and no tools are declared",
    ),
    "choice without tools, continued": (
        [user("a"), assistant("b")],
        {"tool_choice": "required", "tools": [], "continue_final_message": True},
        "tool_choice is 'required', and no tools are declared",
    ),
    "tools are a number": ([user("a")], {"tools": 5}, "tools is int; pass a list"),
    "tools are a dictionary": ([user("a")], {"tools": {"a": 1}}, "tools is dict"),
    "tools are a word": ([user("a")], {"tools": "abc"}, "tools is str"),
    "tool is a function": (
        [user("a")],
        {"tools": [print]},
        "tools, entry 0 is builtin_function_or_method; a tool is a dictionary",
    ),
    "tool is no JSON": (
        [user("a")],
        {"tools": [{"a": print}]},
        "tools cannot be written as JSON: .*builtin",
    ),
    "tool is too deep": (
        [user("a")],
        {"tools": [{"a": _DEEP}]},
        "tools cannot be written as JSON: .*recursion",
    ),
    "half a character in a tool": (
        [user("a")],
        {"tools": [{"a": "\ud800"}]},
        r"an option \(tools or a schema\) holds",
    ),
    "half a character, continued": (
        [user("a"), assistant("b\ud800")],
        {"continue_final_message": True},
        "message 1 holds",
    ),
    "half a character in a schema": (
        [user("a")],
        {"response_format": "json_schema", "response_schema": "\ud800"},
        r"an option \(tools or a schema\) holds",
    ),
}


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    folder: Path = tmp_path_factory.mktemp("tk")
    return load_tk(folder)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(tk, name):
    messages, reason = MESSAGES[name]
    with pytest.raises(ChatError, match=reason):
        tk.apply_chat_template(messages)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(tk, name):
    messages, options, reason = OPTIONS[name]
    with pytest.raises(ChatError, match=reason):
        tk.apply_chat_template(messages, **options)


def test_arguments_that_are_too_deep_to_read_stay_text(tk):
    deep = "[" * 100_000
    messages = [assistant("", tool_calls=[call("f", deep)])]
    text = str(tk.apply_chat_template(messages, tokenize=False))
    assert f'<|open|>json type="object"<|sep|>{deep}<|close|>' in text


def test_who_renders_our_template_is_told(tk):
    """As transformers, and other programs, render a template with Jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with pytest.raises(Exception, match=r"call tokenizer\.apply_chat_template"):
        render_jinja_template([[user("a")]], chat_template=tk.chat_template)
