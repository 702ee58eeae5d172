"""XTML, the chat format of Kimi K3: a conversation as pieces of text and structure.

    <|open|>message role="user"<|sep|>Hello<|close|>message<|sep|><|end_of_msg|>

An assistant message holds up to three sections, ``think``, ``response`` and ``tools``.
Only markers written here are control pieces; whatever callers pass is text. Text pieces
are encoded one by one, so where one ends is part of the format.
"""

from collections.abc import Iterable
from typing import Any

from ..errors import ChatError
from .messages import Message, ToolCall, read_conversation
from .notes import (
    check_choice,
    effort_note,
    json_text,
    later_tools,
    response_format_note,
    tool_choice_note,
    tool_declaration,
)
from .options import ChatOptions
from .prompt import Piece
from .tool_results import pair_results

OPEN, CLOSE, SEP, END = (
    Piece("<|open|>", control=True),
    Piece("<|close|>", control=True),
    Piece("<|sep|>", control=True),
    Piece("<|end_of_msg|>", control=True),
)

TAGS = ("message", "think", "response", "tools", "call", "argument", "json")


#: Where text comes from that is of no message.
_OPTIONS = "an option (tools or a schema)"


class _Page:
    """Pieces in the order they are written; errors name ``where`` their text is from."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.where = _OPTIONS

    def text(self, *texts: str | Piece) -> None:
        """Texts of callers; a placeholder of theirs is a piece already."""
        for text in texts:
            if isinstance(text, str):
                self._check(text)
            if text:
                self.pieces.append(Piece(text) if isinstance(text, str) else text)

    def _check(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(
                f"{self.where} holds {text[error.start]!r}, half of a surrogate pair, "
                "which is no character; leave it out, or put '\ufffd' in its place."
            ) from None

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

    def section(
        self, tag: str, *texts: str | Piece, **attributes: str | int | None
    ) -> None:
        self.open(tag, **attributes)
        self.text(*texts)
        self.close(tag)

    def note(self, kind: str, body: str) -> None:
        """A system message that the serving system writes, not the caller."""
        self.section("message", body, role="system", type=kind)
        self.pieces.append(END)

    def message(self, *texts: str | Piece, **attributes: str | int | None) -> None:
        self.section("message", *texts, **attributes)
        self.pieces.append(END)


def render(conversation: Any, options: ChatOptions) -> list[Piece]:
    """The pieces of ``conversation``; raises ChatError naming message and fault."""
    asks = options.add_generation_prompt and not options.continue_final_message
    messages = pair_results(read_conversation(conversation), reply=asks)
    last = messages.pop() if options.continue_final_message else None
    page = _Page()
    if options.tools:
        page.note("tool-declare", tool_declaration(options.tools))
    if options.thinking and options.thinking_effort is not None:
        page.note("thinking-effort", effort_note(options.thinking_effort))
    for message in messages:
        _message(page, message, options.thinking)
    before = len(page.pieces)
    page.where = _OPTIONS
    # Hosts also render the start of a conversation, to find where it ends in the whole;
    # tools may be declared after it.
    if asks or last is not None:
        later = [tool for message in messages for tool in message.tools]
        check_choice(options.tool_choice, [*options.tools, *later])
    _closing_notes(page, options)
    if last is not None:
        if last.role != "assistant" and len(page.pieces) > before:
            raise ChatError(
                f"message {last.index} ({last.role}) cannot be continued together with "
                "tool_choice or response_format, which end the prompt; drop those."
            )
        _open_message(page, last, options)
    elif asks:
        page.open("message", role="assistant")
        page.open("think" if options.thinking else "response")
    return page.pieces


def _closing_notes(page: _Page, options: ChatOptions) -> None:
    """What the caller asks of the next message, told after all messages."""
    choice = tool_choice_note(options.tool_choice)
    wanted = response_format_note(options.response_format, options.response_schema)
    if choice is not None:
        page.note("tool-choice", choice)
    if wanted is not None:
        page.note("response-format", wanted)


def _message(page: _Page, message: Message, thinking: bool) -> None:
    page.where = f"message {message.index}"
    if message.tools:
        note = later_tools(page.where, message.tools)
        page.note("tool-declare", note)
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
                _tool_call(page, number, call)
            page.close("tools")
        page.close("message")
        page.pieces.append(END)


def _attributes(message: Message) -> dict[str, str | int | None]:
    if message.role == "tool":
        return {"role": "tool", "tool": message.tool, "index": message.tool_index}
    return {"role": message.role, "name": message.name}


def _open_message(page: _Page, message: Message, options: ChatOptions) -> None:
    """``message`` up to the end of what it says, so that a model goes on from there."""
    where = page.where = f"message {message.index}"
    if message.tools or message.tool_calls or message.role == "tool":
        raise ChatError(
            f"{where} cannot be continued: it declares or calls tools, or is a result "
            "of one, which are complete. Use add_generation_prompt instead."
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


def _tool_call(page: _Page, number: int, call: ToolCall) -> None:
    page.where = call.where
    page.open("call", tool=call.name, index=number)
    if call.arguments is None:
        page.section("json", call.raw, type="object")
    else:
        for key, value in call.arguments.items():
            where = f"{call.where}, argument {key!r}"
            text = value if isinstance(value, str) else json_text(where, value)
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


def bare_tags() -> Iterable[tuple[Piece, ...]]:
    """Every opening and closing tag without attributes, as pieces."""
    for tag in TAGS:
        for first in (OPEN, CLOSE):
            yield first, Piece(tag), SEP
