"""A conversation as hosts pass it, read into typed messages and checked.

Messages are OpenAI-style dictionaries. Every error names the message by its index.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ChatError

#: Roles that hosts send → the role that K3 knows.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class ToolCall:
    """One call of an assistant message.

    ``arguments`` is None where the caller's string is no JSON: ``raw`` then holds it.
    """

    name: str
    arguments: dict[str, Any] | None
    raw: str = ""
    call_id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message; ``content`` keeps the caller's text parts apart.

    ``tool`` and ``tool_index`` (from 1) are set for tool results.
    """

    index: int
    role: str
    content: tuple[str, ...] = ()
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: Sequence[Any] = field(default=())
    call_id: str | None = None
    tool: str | None = None
    tool_index: int = 0


def read_conversation(conversation: Any) -> list[Message]:
    """Typed messages of ``conversation``, tool results in order of their calls.

    Raises ChatError naming the message that cannot be rendered and why.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise ChatError(
            f"a conversation is a list of messages, not {_kind(conversation)}; pass "
            "[{'role': 'user', 'content': …}]."
        )
    if not conversation:
        raise ChatError("the conversation is empty; pass at least one message.")
    messages = [_read(i, message) for i, message in enumerate(conversation)]
    return _with_tool_names(_in_call_order(messages))


def _read(index: int, message: Any) -> Message:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise ChatError(
            f"{where} is {_kind(message)}; a message is a dictionary with 'role' and "
            "'content'."
        )
    given = message.get("role")
    if not isinstance(given, str) or given not in ROLES:
        raise ChatError(
            f"{where} has role {given!r}; Kimi K3 knows {', '.join(ROLES)}."
        )
    role = ROLES[given]
    read = Message(
        index=index,
        role=role,
        content=_content(where, message.get("content")),
        name=_text(where, "name", message.get("name")) or None,
    )
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls") or ()
        return replace(
            read,
            reasoning=_text(where, "reasoning_content", reasoning),
            tool_calls=tuple(
                _call(f"{where}, call {n}", c) for n, c in enumerate(calls)
            ),
        )
    if role == "tool":
        call_id = message.get("tool_call_id", message.get("id"))
        return replace(
            read,
            call_id=None if call_id is None else str(call_id),
            tool=_text(where, "tool", message.get("tool")) or read.name,
        )
    if role == "system" and (tools := message.get("tools")):
        if any(read.content):
            raise ChatError(
                f"{where} declares tools and has content; only one can be rendered. "
                "Make it two system messages."
            )
        return replace(read, tools=tools)
    return read


def _content(where: str, content: Any) -> tuple[str, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, Sequence):
        raise ChatError(
            f"{where} has content of type {_kind(content)}; pass a string or a list of "
            "{'type': 'text', 'text': …} parts."
        )
    return tuple(_part(f"{where}, part {n}", part) for n, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ChatError(
            f"{where} is {_kind(part)}; a content part is a dictionary such as "
            "{'type': 'text', 'text': …}."
        )
    if part.get("type") != "text":
        raise ChatError(
            f"{where} has type {part.get('type')!r}; only 'text' parts are rendered "
            "here. Leave media out, or describe them in words."
        )
    if not isinstance(text := part.get("text"), str):
        raise ChatError(f"{where} has no string under 'text'; add it.")
    return text


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ChatError(
            f"{where} names no function; a tool call is {{'id': …, 'function': "
            "{'name': …, 'arguments': …}}."
        )
    call_id = call.get("id")
    call_id = None if call_id is None else str(call_id)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if not arguments.strip():
            return ToolCall(name, {}, call_id=call_id)
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return ToolCall(name, None, raw=arguments, call_id=call_id)
        arguments = parsed
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ChatError(
            f"{where} ({name}) has arguments of type {_kind(arguments)}; pass a JSON "
            "object, as a dictionary or as its text."
        )
    return ToolCall(name, arguments, call_id=call_id)


def _in_call_order(messages: list[Message]) -> list[Message]:
    """Each run of tool results sorted by the calls they answer, and named after them.

    A run of which some result carries no id of the last assistant message's calls
    stays as it is.
    """
    ordered: list[Message] = []
    run: list[Message] = []
    calls: dict[str | None, tuple[int, str]] = {}
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        ordered += _sorted_run(run, calls)
        run = []
        if message.role == "assistant":
            calls = _calls_by_id(message)
        ordered.append(message)
    return ordered + _sorted_run(run, calls)


def _calls_by_id(message: Message) -> dict[str | None, tuple[int, str]]:
    """Call id → position and function name; of equal ids the first call counts."""
    calls: dict[str | None, tuple[int, str]] = {}
    for position, call in enumerate(message.tool_calls):
        if call.call_id is not None:
            calls.setdefault(call.call_id, (position, call.name))
    return calls


def _sorted_run(
    run: list[Message], calls: Mapping[str | None, tuple[int, str]]
) -> list[Message]:
    if any(message.call_id not in calls for message in run):
        return run
    in_order = sorted(run, key=lambda message: calls[message.call_id][0])
    return [replace(message, tool=calls[message.call_id][1]) for message in in_order]


def _with_tool_names(messages: list[Message]) -> list[Message]:
    """Tool results numbered from 1 after each assistant message, and named."""
    named: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    count = 0
    for message in messages:
        if message.role == "assistant":
            calls, count = message.tool_calls, 0
        elif message.role == "tool":
            count += 1
            tool = message.tool or (
                calls[count - 1].name if count <= len(calls) else ""
            )
            if not tool:
                raise ChatError(
                    f"message {message.index} is a tool result that no tool call before "
                    "it asked for; give it 'name', or 'tool_call_id' of a call."
                )
            message = replace(message, tool=tool, tool_index=count)
        named.append(message)
    return named


def _text(where: str, key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{where} has {key} of type {_kind(value)}; pass a string.")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
