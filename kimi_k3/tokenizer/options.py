"""What a conversation is rendered with, beside its messages, as hosts pass it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ChatError
from .tools import check_tools

logger = logging.getLogger(__name__)

THINKING_EFFORTS = ("low", "high", "max")

#: OpenAI's efforts → the model's own; None turns thinking off.
REASONING_EFFORTS = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}

#: Moonshot's form of ``thinking`` → ours.
_THINKING_TYPES = {"enabled": True, "disabled": False}

_CONTINUED = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation is rendered with, beside its messages.

    ``thinking_effort`` None leaves the note on effort out. ``continue_final_message``
    leaves the last message open: True its content (or its reasoning, if it has nothing
    else), or the name of the field to continue. It goes before
    ``add_generation_prompt``, which mlx-lm's server always asks for. Raises ChatError
    for values that mean nothing; of ``tool_choice`` and formats, notes.py does.
    """

    tools: Sequence[Any] = ()
    thinking: bool = True
    thinking_effort: str | None = "max"
    tool_choice: Any = None
    response_format: Any = None
    response_schema: Any = None
    add_generation_prompt: bool = False
    continue_final_message: bool | str = False

    def __post_init__(self) -> None:
        check_tools("tools", self.tools)
        if self.thinking_effort not in (None, *THINKING_EFFORTS):
            raise ChatError(
                f"thinking_effort is {self.thinking_effort!r}; choose "
                f"{', '.join(THINKING_EFFORTS)}, or thinking=False for none. OpenAI's "
                "efforts go into reasoning_effort."
            )
        field = self.continue_final_message
        if not isinstance(field, bool) and field not in _CONTINUED:
            raise ChatError(
                f"continue_final_message is {field!r}; pass true or false, 'content' or "
                "'reasoning_content'."
            )


#: Options of transformers that mean nothing here: markers in messages never count.
_IGNORED = ("sanitize_control_tokens", "tokenizer_kwargs")
_REFUSED = ("chat_template", "documents", "return_assistant_tokens_mask")

#: Options of transformers about the shape of an encoding.
_LAYOUT = ("padding", "truncation", "max_length", "return_tensors")


def take_layout(kwargs: dict[str, Any], *, bare: bool) -> dict[str, Any]:
    """Take what shapes an encoding out of ``kwargs``.

    ``bare`` says that the encoding is a list of ids. That is the whole conversation, so
    any such option is a ChatError: mlx-lm's server takes them from requests, and would
    end on an array or on no ids.
    """
    given = {key: kwargs.pop(key) for key in _LAYOUT if key in kwargs}
    layout = {
        key: value
        for key, value in given.items()
        if value is not None and value is not False
    }
    if bare and layout:
        raise ChatError(
            f"a list of ids is the whole conversation and has no {', '.join(layout)}; "
            "leave that out, or pass return_dict=True."
        )
    return layout


def chat_options(*, thinking: Any = None, **kwargs: Any) -> ChatOptions:
    """Options as hosts pass them: unknown ones are logged and ignored.

    ``enable_thinking`` is the name that other models have for ``thinking``, and
    ``reasoning_effort`` is OpenAI's, for which ``thinking_effort`` is preferred. None is
    an option's default, but for ``thinking_effort``. Raises ChatError for values that
    mean nothing, and for what transformers can do with a template and this format
    cannot.
    """
    if thinking is None:
        thinking = kwargs.pop("enable_thinking", None)
    thinking = thinking is None or _enabled(thinking)
    if (given := kwargs.pop("reasoning_effort", None)) is not None:
        effort = _own_effort(given)
        if "thinking_effort" not in kwargs:
            kwargs["thinking_effort"] = effort
            # mlx-lm passes thinking=True whatever its user said.
            thinking = thinking if effort else False
    for name in _REFUSED:
        if kwargs.pop(name, None):
            raise ChatError(f"Kimi K3's chat format has no {name}; leave it out.")
    known = {field.name for field in fields(ChatOptions)}
    for name in kwargs.keys() - known - {*_IGNORED}:
        logger.warning("Kimi K3's chat format has no option %r; ignored.", name)
    values: dict[str, Any] = {
        name: value
        for name, value in kwargs.items()
        if name in known and (value is not None or name == "thinking_effort")
    }
    return ChatOptions(thinking=thinking, **values)


def _enabled(thinking: Any) -> bool:
    """``thinking`` as a boolean, which it is or in the form of Moonshot's API."""
    if isinstance(thinking, bool):
        return thinking
    for name, value in _THINKING_TYPES.items():
        if thinking == {"type": name}:
            return value
    raise ChatError(
        f"thinking is {thinking!r}; pass true or false, or {{'type': 'enabled'}} or "
        "'disabled' as in Moonshot's API."
    )


def _own_effort(given: Any) -> str | None:
    if not isinstance(given, str) or given not in REASONING_EFFORTS:
        raise ChatError(
            f"reasoning_effort is {given!r}; choose {', '.join(REASONING_EFFORTS)}."
        )
    return REASONING_EFFORTS[given]
