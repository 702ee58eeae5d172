"""XTML, the chat format of Kimi K3: a conversation as pieces of text and structure.

    <|open|>message role="user"<|sep|>Hello<|close|>message<|sep|><|end_of_msg|>

An assistant message holds up to three sections, ``think``, ``response`` and ``tools``.
Only markers written here are control pieces; whatever callers pass is text. Text pieces
are encoded one by one, so where one ends is part of the format.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ChatError
from .messages import Message, ToolCall, read_conversation
from .prompt import Piece

logger = logging.getLogger(__name__)

OPEN, CLOSE, SEP, END = (
    Piece("<|open|>", control=True),
    Piece("<|close|>", control=True),
    Piece("<|sep|>", control=True),
    Piece("<|end_of_msg|>", control=True),
)

TAGS = ("message", "think", "response", "tools", "call", "argument", "json")

THINKING_EFFORTS = ("low", "high", "max")

_NO_FENCE = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)

_TOOL_CHOICE = {
    "required": "MUST call tools",
    "none": "MUST NOT call any tools",
}


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation is rendered with, beside its messages.

    ``thinking_effort`` None leaves the note on effort out. ``continue_final_message``
    leaves the last message open: True its content (or its reasoning, if it has nothing
    else), or the name of the field to continue.
    """

    tools: Sequence[Any] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"
    tool_choice: Any = None
    response_format: Any = None
    response_schema: Any = None
    add_generation_prompt: bool = False
    continue_final_message: bool | str = False


#: Options of transformers that mean nothing here: markers in messages never count.
_IGNORED = ("sanitize_control_tokens", "tokenizer_kwargs")
_REFUSED = ("chat_template", "documents", "return_assistant_tokens_mask")


def chat_options(*, thinking: bool | None = None, **kwargs: Any) -> ChatOptions:
    """Options as hosts pass them: unknown ones are logged and ignored.

    ``enable_thinking`` is the name that other models have for ``thinking``. Raises
    ChatError for what transformers can do with a template and this format cannot.
    """
    if thinking is None:
        thinking = kwargs.pop("enable_thinking", None)
    for name in _REFUSED:
        if kwargs.pop(name, None):
            raise ChatError(f"Kimi K3's chat format has no {name}; leave it out.")
    known = {field.name for field in fields(ChatOptions)}
    for name in kwargs.keys() - known - {*_IGNORED}:
        logger.warning("Kimi K3's chat format has no option %r; ignored.", name)
    given = {name: value for name, value in kwargs.items() if name in known}
    return ChatOptions(thinking=thinking is None or bool(thinking), **given)


class _Page:
    """Pieces in the order they are written."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def text(self, *texts: str) -> None:
        self.pieces += [Piece(text) for text in texts if text]

    def open(self, tag: str, **attributes: str | int | None) -> None:
        self.pieces.append(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            if value is not None:
                escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
                self.text(f" {key}", '="', escaped, '"')
        self.pieces.append(SEP)

    def close(self, tag: str) -> None:
        self.pieces.append(CLOSE)
        self.text(tag)
        self.pieces.append(SEP)

    def section(self, tag: str, *texts: str, **attributes: str | int | None) -> None:
        self.open(tag, **attributes)
        self.text(*texts)
        self.close(tag)

    def note(self, kind: str, body: str) -> None:
        """A system message that the serving system writes, not the caller."""
        self.section("message", body, role="system", type=kind)
        self.pieces.append(END)

    def message(self, *texts: str, **attributes: str | int | None) -> None:
        self.section("message", *texts, **attributes)
        self.pieces.append(END)


def render(conversation: Any, options: ChatOptions) -> list[Piece]:
    """The pieces of ``conversation``; raises ChatError naming message and fault."""
    messages = read_conversation(conversation)
    last = messages.pop() if options.continue_final_message else None
    page = _Page()
    if options.tools:
        page.note("tool-declare", _tool_declaration(options.tools))
    if options.thinking and options.thinking_effort is not None:
        page.note("thinking-effort", _effort(options.thinking_effort))
    for message in messages:
        _message(page, message, options.thinking)
    before = len(page.pieces)
    _closing_notes(page, options)
    if last is not None:
        if last.role != "assistant" and len(page.pieces) > before:
            raise ChatError(
                f"message {last.index} ({last.role}) cannot be continued together with "
                "tool_choice or response_format, which end the prompt; drop those."
            )
        _open_message(page, last, options)
    if options.add_generation_prompt:
        if last is not None:
            raise ChatError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "choose one."
            )
        page.open("message", role="assistant")
        page.open("think" if options.thinking else "response")
    return page.pieces


def _message(page: _Page, message: Message, thinking: bool) -> None:
    if message.tools:
        page.note("tool-declare", _later_tools(message))
    elif message.role != "assistant":
        page.message(*message.content, **_attributes(message))
    else:
        page.open("message", **_attributes(message))
        if thinking:
            page.section("think", _shown(message.reasoning))
        page.section("response", *message.content)
        if message.tool_calls:
            page.open("tools")
            for number, call in enumerate(message.tool_calls, start=1):
                _tool_call(page, message.index, number, call)
            page.close("tools")
        page.close("message")
        page.pieces.append(END)


def _attributes(message: Message) -> dict[str, str | int | None]:
    if message.role == "tool":
        return {"role": "tool", "tool": message.tool, "index": message.tool_index}
    return {"role": message.role, "name": message.name}


def _open_message(page: _Page, message: Message, options: ChatOptions) -> None:
    """``message`` up to the end of what it says, so that a model goes on from there."""
    where = f"message {message.index}"
    if message.tools or message.tool_calls:
        raise ChatError(
            f"{where} cannot be continued: it declares or calls tools, which are "
            "complete. Use add_generation_prompt instead."
        )
    page.open("message", **_attributes(message))
    if message.role != "assistant":
        page.text(*message.content)
        return
    field = options.continue_final_message
    if field is True:
        only_reasons = (
            options.thinking and message.reasoning and not any(message.content)
        )
        field = "reasoning_content" if only_reasons else "content"
    if field in ("reasoning_content", "reasoning") and options.thinking:
        page.open("think")
        page.text(message.reasoning)
    elif field == "content":
        if options.thinking:
            page.section("think", _shown(message.reasoning))
        page.open("response")
        page.text(*message.content)
    else:
        raise ChatError(
            f"{where} cannot be continued in {field!r}; choose 'content', or "
            "'reasoning_content' with thinking on."
        )


def _shown(reasoning: str) -> str:
    """Reasoning of white space only is none."""
    return reasoning if reasoning.strip() else ""


def _tool_call(page: _Page, message: int, number: int, call: ToolCall) -> None:
    page.open("call", tool=call.name, index=number)
    if call.arguments is None:
        page.section("json", call.raw, type="object")
    else:
        for key, value in call.arguments.items():
            where = f"message {message}, call {number - 1}, argument {key!r}"
            text = value if isinstance(value, str) else _json(where, value)
            page.section("argument", text, key=str(key), type=_type(value))
    page.close("call")


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def _tool_declaration(tools: Sequence[Any]) -> str:
    return (
        "# Tools\n"
        "Here are the available tools, described in JSONSchema.\n\n"
        f"```json\n{_sorted_json('tools', tools)}\n```"
    )


def _later_tools(message: Message) -> str:
    tools = _sorted_json(f"message {message.index}, tools", message.tools)
    return (
        "## New Tools Available\n"
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n"
        f"```json\n{tools}\n```"
    )


def _effort(effort: str) -> str:
    if effort not in THINKING_EFFORTS:
        raise ChatError(
            f"thinking_effort is {effort!r}; choose {', '.join(THINKING_EFFORTS)}, or "
            "thinking=False for none."
        )
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not "
        "including the response channel), supported values include `low`, `medium`, "
        "`high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


def _closing_notes(page: _Page, options: ChatOptions) -> None:
    """What the caller asks of the next message, told after all messages."""
    choice = options.tool_choice
    if isinstance(choice, str) and choice in _TOOL_CHOICE:
        page.note(
            "tool-choice",
            f"The system is invoked with `tool_choice={choice}`.\n"
            f"You {_TOOL_CHOICE[choice]} in the next message.",
        )
    elif choice not in (None, "auto"):
        raise ChatError(
            f"tool_choice is {choice!r}; Kimi K3 knows 'auto', 'required' and 'none'."
        )
    wanted = options.response_format
    if isinstance(wanted, Mapping):
        wanted = wanted.get("type")
    if wanted in (None, "text"):
        return
    if wanted not in ("json_object", "json_schema"):
        raise ChatError(
            f"response_format is {wanted!r}; Kimi K3 knows 'text', 'json_object' and "
            "'json_schema'."
        )
    body = f"The system is invoked with `response_format={wanted}`.\n{_NO_FENCE}"
    if wanted == "json_schema":
        schema = _sorted_json("response_format", _schema(options))
        body += (
            f"\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
        )
    page.note("response-format", body)


def _schema(options: ChatOptions) -> Any:
    """The schema itself, out of OpenAI's wrapping if it has one."""
    if options.response_schema is not None:
        return options.response_schema
    wrapped = options.response_format
    wrapped = wrapped.get("json_schema") if isinstance(wrapped, Mapping) else None
    if wrapped is None:
        raise ChatError(
            "response_format is 'json_schema' but carries no schema; pass {'type': "
            "'json_schema', 'json_schema': {'schema': …}} or response_schema."
        )
    if isinstance(wrapped, Mapping):
        for key in ("schema", "json_schema"):
            if key in wrapped:
                return wrapped[key]
    return wrapped


def _sorted_json(where: str, value: Any) -> str:
    """Compact JSON with the keys of every object in order."""
    return _json(where, value, sort_keys=True, separators=(",", ":"))


def _json(where: str, value: Any, **style: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **style)
    except (TypeError, ValueError) as error:
        raise ChatError(f"{where} cannot be written as JSON: {error}.") from None


def bare_tags() -> Iterable[tuple[Piece, ...]]:
    """Every opening and closing tag without attributes, as pieces."""
    for tag in TAGS:
        for first in (OPEN, CLOSE):
            yield first, Piece(tag), SEP
