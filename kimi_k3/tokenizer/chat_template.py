"""How an answer of Kimi K3 is told apart: reasoning, content and tool calls.

mlx-lm takes :data:`RESPONSE_FORMAT` for the state machine of its server and chat; it
walks over the answer's text and strips what makes it change its state. A regular answer
is

    …<|close|>think<|sep|><|open|>response<|sep|>…<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>…<|close|>call<|sep|>…

and the model also leaves sections without closing them, closes them without ``<|sep|>``,
or writes none. So every control id counts by itself, and the word after ``<|open|>`` or
``<|close|>`` says what follows, whatever was open before. Text that spells a marker
matches none of them, and names of control ids other than markers are left out of
reasoning and content; see ``decoded.py``. Attributes of ``think`` or ``response``, which
have none, are shown: they cannot be told from text that lacks the separator before it.

Each marker is an edge twice: as control id, and as the string for hosts that decode by
themselves.
"""

from collections.abc import Sequence
from typing import Any

from .call_tags import AROUND
from .decoded import OTHER_CONTROL, control_characters
from .options import chat_options
from .prompt import Piece, RenderedPrompt
from .xtml import CLOSE, END, OPEN, SEP, render

__all__ = ["RESPONSE_FORMAT", "apply_chat_template"]

Edges = list[tuple[Sequence[str], str]]

# mlx-lm's names: what it does with the text of these states. It drops that of others.
REASONING, CONTENT, CALL = "reasoning", "normal", "tool"

#: Between ``tools`` and a call, where nothing is to be shown.
TOOLS = "tools"

#: The tag opened → the state of what follows. Others are skipped up to ``<|sep|>``.
_OPENED = {"think": REASONING, "response": CONTENT, "tools": TOOLS, "call": CALL}

#: The same for tags closed. A call ends by an edge of its own.
_CLOSED = dict.fromkeys(("think", "response", "tools", "call", "message"), CONTENT)


def _transitions() -> dict[str, Edges]:
    transitions: dict[str, Edges] = {}
    for state in (REASONING, CONTENT, TOOLS):
        opening, closing = f"{state}: opened", f"{state}: closed"
        attributes = f"{state}: attributes"
        # A separator belongs to the tag before it, which has had its effect.
        marks = [
            *_edge(opening, OPEN),
            *_edge(closing, CLOSE),
            *_edge(state, SEP),
            *_edge(CONTENT, END),
        ]
        transitions[state] = [*marks, (OTHER_CONTROL, state)]
        # No tag goes on in another line: what began none hides no more than this one.
        marks = [*marks, ("\n", state)]
        transitions[attributes] = marks
        # Words in the values of attributes say nothing.
        transitions[opening] = [*marks, *_OPENED.items(), ('="', attributes)]
        # Nor has a closing tag attributes: what follows a space is text again.
        transitions[closing] = [*marks, *_CLOSED.items(), (" ", CONTENT)]
    transitions[CALL] = _end_of_call()
    return transitions


def _end_of_call() -> Edges:
    """What ends the text of a call: its own end, or that of anything around it.

    ``<|close|>`` stays in the text, so that the parser can tell a whole call from one
    that was cut. What is left of an irregular end is no argument, and so ignored.
    """
    edges = _edge(CONTENT, OPEN, Piece("response"), SEP)
    for tag in AROUND:
        edges += _edge(CONTENT, Piece(tag), SEP)
    return edges


def _edge(state: str, *pieces: Piece) -> Edges:
    """From ``pieces`` to ``state``, of DecodedText and of ordinary strings."""
    exact: list[str] = []
    for text, control in pieces:
        exact += control_characters(text) if control else text
    return [(tuple(exact), state), ("".join(piece.text for piece in pieces), state)]


#: What mlx-lm reads: state → edges (text, next state).
RESPONSE_FORMAT: dict[str, Any] = {"transitions": _transitions()}


def apply_chat_template(
    messages: Any,
    tools: Any = None,
    *,
    thinking: bool | None = None,
    **kwargs: Any,
) -> RenderedPrompt:
    """``messages`` as a prompt string that knows its ids, for hosts without ours.

    Options and errors are those of the tokenizer's own ``apply_chat_template``. mlx-lm
    asks here only for a checkpoint whose tokenizer config says ``chat_template_type``.
    """
    for option in ("tokenize", "return_dict"):
        kwargs.pop(option, None)
    return RenderedPrompt(
        render(messages, chat_options(thinking=thinking, tools=tools, **kwargs))
    )
