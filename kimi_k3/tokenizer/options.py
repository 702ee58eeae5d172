"""What a conversation is rendered with, beside its messages, as hosts pass it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ChatError

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation is rendered with, beside its messages.

    ``thinking_effort`` None leaves the note on effort out. ``continue_final_message``
    leaves the last message open: True its content (or its reasoning, if it has nothing
    else), or the name of the field to continue. It goes before
    ``add_generation_prompt``, which mlx-lm's server always asks for.
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

    ``enable_thinking`` is the name that other models have for ``thinking``, and
    ``reasoning_effort`` is OpenAI's, for which ``thinking_effort`` is preferred. Raises
    ChatError for what transformers can do with a template and this format cannot.
    """
    if thinking is None:
        thinking = kwargs.pop("enable_thinking", None)
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
    given = {name: value for name, value in kwargs.items() if name in known}
    return ChatOptions(thinking=thinking is None or bool(thinking), **given)


def _own_effort(given: Any) -> str | None:
    if not isinstance(given, str) or given not in REASONING_EFFORTS:
        raise ChatError(
            f"reasoning_effort is {given!r}; choose {', '.join(REASONING_EFFORTS)}."
        )
    return REASONING_EFFORTS[given]
