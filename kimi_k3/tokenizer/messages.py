"""A conversation as hosts pass it, read into typed messages and checked.

Messages are OpenAI-style dictionaries. Every error names the message by its index.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ChatError
from .media import IMAGE
from .prompt import Piece
from .tools import check_tools, function_name, function_of

#: Roles that hosts send → the role that K3 knows.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

#: Types of content parts that hosts send for text.
TEXT_TYPES = ("text", "input_text", "output_text")

#: The same for an image.
IMAGE_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True)
class ToolCall:
    """One call of an assistant message, which errors name by ``where``.

    ``arguments`` is None where the caller's string is no JSON: ``raw`` then holds it.
    """

    where: str
    name: str
    arguments: dict[str, Any] | None
    raw: str = ""
    call_id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message; ``content`` keeps the caller's parts apart, images as placeholders.

    A tool result has ``tool`` if it brings a name; ``tool_index``, from 1, is its
    call's once it is known which call it answers. ``own_id`` is the id of the result
    itself, where some clients put the call's.
    """

    index: int
    role: str
    content: tuple[str | Piece, ...] = ()
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: Sequence[Any] = ()
    call_id: str | None = None
    own_id: str | None = None
    tool: str | None = None
    tool_index: int = 0

    @property
    def text(self) -> str:
        """The text of ``content``, without images."""
        return "".join(part for part in self.content if isinstance(part, str))


def read_conversation(conversation: Any) -> list[Message]:
    """Typed messages of ``conversation``, in its order.

    An assistant's message of nothing but calls, directly behind calls, belongs to the
    message before: clients that send each call by itself mean one turn. Raises
    ChatError naming the message that cannot be rendered and why.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise ChatError(
            f"a conversation is a list of messages, not {_kind(conversation)}; pass "
            "[{'role': 'user', 'content': …}]."
        )
    if not conversation:
        raise ChatError("the conversation is empty; pass at least one message.")
    messages: list[Message] = []
    for message in (_read(i, given) for i, given in enumerate(conversation)):
        if messages and messages[-1].tool_calls and _only_calls(message):
            calls = (*messages[-1].tool_calls, *message.tool_calls)
            messages[-1] = replace(messages[-1], tool_calls=calls)
        else:
            messages.append(message)
    return messages


def _only_calls(message: Message) -> bool:
    says = message.name or message.reasoning.strip() or any(message.content)
    return bool(message.tool_calls) and not says


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
        return replace(
            read,
            reasoning=_text(where, "reasoning_content", reasoning),
            tool_calls=_calls(where, message),
        )
    if role == "tool":
        return replace(
            read,
            call_id=_id(message.get("tool_call_id")),
            own_id=_id(message.get("id")),
            tool=_text(where, "tool", message.get("tool")) or read.name,
        )
    tools = message.get("tools") if role == "system" else None
    if tools := check_tools(f"{where}, tools", tools):
        if any(read.content):
            raise ChatError(
                f"{where} declares tools and has content; only one can be rendered. "
                "Make it two system messages."
            )
        return replace(read, tools=tools)
    return read


def _content(where: str, content: Any) -> tuple[str | Piece, ...]:
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


def _part(where: str, part: Any) -> str | Piece:
    if not isinstance(part, Mapping):
        raise ChatError(
            f"{where} is {_kind(part)}; a content part is a dictionary such as "
            "{'type': 'text', 'text': …}."
        )
    kind = part.get("type")
    if kind in IMAGE_TYPES:
        return IMAGE
    if kind not in TEXT_TYPES:
        raise ChatError(
            f"{where} has type {kind!r}; Kimi K3 takes "
            f"{', '.join(map(repr, TEXT_TYPES + IMAGE_TYPES))}. Leave other media out, "
            "or describe them in words."
        )
    if not isinstance(text := part.get("text"), str):
        raise ChatError(f"{where} has no string under 'text'; add it.")
    return text


def _calls(where: str, message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    if message.get("function_call") is not None:
        raise ChatError(
            f"{where} has function_call, of an older API; pass the call as "
            "'tool_calls': [{'id': …, 'function': {'name': …, 'arguments': …}}], and its "
            "result as a message of role 'tool'."
        )
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise ChatError(
            f"{where} has tool_calls of type {_kind(calls)}; pass a list of calls."
        )
    return tuple(
        _call(f"{where}, call {n}", call) for n, call in enumerate(calls or ())
    )


def _call(where: str, call: Any) -> ToolCall:
    function, name = function_of(call), function_name(call)
    if name is None:
        raise ChatError(
            f"{where} names no function; a tool call is {{'id': …, 'function': "
            "{'name': …, 'arguments': …}}."
        )
    call_id = _id(call.get("id"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if not arguments.strip():
            return ToolCall(where, name, {}, call_id=call_id)
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(where, name, None, raw=arguments, call_id=call_id)
        arguments = parsed
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ChatError(
            f"{where} ({name}) has arguments of type {_kind(arguments)}; pass a JSON "
            "object, as a dictionary or as its text."
        )
    return ToolCall(where, name, arguments, call_id=call_id)


def _id(value: Any) -> str | None:
    """An id as a string; an empty one is none."""
    return None if value is None else str(value) or None


def _text(where: str, key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{where} has {key} of type {_kind(value)}; pass a string.")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
