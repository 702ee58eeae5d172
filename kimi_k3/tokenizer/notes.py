"""What the serving system tells Kimi K3 around a conversation, in the release's words.

Each note is the body of a system message of its own type: the tools there are, how much
to think, whether to call tools, and in which format to respond.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ChatError
from .tools import function_name

_NO_FENCE = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)

_TOOL_CHOICE = {
    "required": "MUST call tools",
    "none": "MUST NOT call any tools",
}


def tool_declaration(tools: Sequence[Any]) -> str:
    """The tools that are there from the start."""
    return (
        "# Tools\n"
        "Here are the available tools, described in JSONSchema.\n\n"
        f"```json\n{_sorted_json('tools', tools)}\n```"
    )


def later_tools(where: str, tools: Sequence[Any]) -> str:
    """Tools that the message ``where`` adds."""
    return (
        "## New Tools Available\n"
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n"
        f"```json\n{_sorted_json(f'{where}, tools', tools)}\n```"
    )


def effort_note(effort: str) -> str:
    """How much to think."""
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not "
        "including the response channel), supported values include `low`, `medium`, "
        "`high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


def tool_choice_note(choice: Any) -> str | None:
    """Whether to call tools; None if that is up to the model.

    K3 can be told to call tools, but not which. So OpenAI's object that names a
    function is a plain ``required``; :func:`check_choice` tells whether it may be.
    """
    if choice is None or choice == "auto":
        return None
    if _chosen(choice) is not None:
        choice = "required"
    if not isinstance(choice, str) or choice not in _TOOL_CHOICE:
        raise ChatError(
            f"tool_choice is {choice!r}; Kimi K3 knows 'auto', 'required' and 'none', "
            "and {'type': 'function', 'function': {'name': …}} of the only tool."
        )
    return (
        f"The system is invoked with `tool_choice={choice}`.\n"
        f"You {_TOOL_CHOICE[choice]} in the next message."
    )


def check_choice(choice: Any, tools: Iterable[Any]) -> None:
    """Raise ChatError if ``choice`` asks for what all the tools declared do not give."""
    declared = dict.fromkeys(function_name(tool) for tool in tools)
    if choice == "required" and not declared:
        raise ChatError(
            "tool_choice is 'required', and no tools are declared; pass tools, or leave "
            "tool_choice out."
        )
    name = _chosen(choice)
    if name is not None and [*declared] != [name]:
        raise ChatError(
            f"tool_choice names the function {name!r}, and the tools declared are "
            f"{', '.join(map(repr, declared)) or 'none'}. Kimi K3 can be told to call "
            "tools, but not which; pass only that tool, or tool_choice='required'."
        )


def _chosen(choice: Any) -> str | None:
    """The function that ``choice`` names, if it is OpenAI's object that names one."""
    names_one = isinstance(choice, Mapping) and choice.get("type") == "function"
    return function_name(choice) if names_one else None


def response_format_note(wanted: Any, schema: Any) -> str | None:
    """The format ``wanted``, as OpenAI writes it or by its name; None for text.

    ``schema`` is preferred to the one that comes with ``wanted``.
    """
    name = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if name in (None, "text"):
        return None
    if name not in ("json_object", "json_schema"):
        raise ChatError(
            f"response_format is {name!r}; Kimi K3 knows 'text', 'json_object' and "
            "'json_schema'."
        )
    body = f"The system is invoked with `response_format={name}`.\n{_NO_FENCE}"
    if name == "json_object":
        return body
    if schema is None:
        schema = _unwrapped(wanted)
    text = _sorted_json("response_format", schema)
    return (
        f"{body}\nThe JSON data must match the following schema:\n```json\n{text}\n```"
    )


def _unwrapped(wanted: Any) -> Any:
    """The schema itself, out of OpenAI's wrapping if it has one."""
    wrapped = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
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
    return json_text(where, value, sort_keys=True, separators=(",", ":"))


def json_text(where: str, value: Any, **style: Any) -> str:
    """JSON in which every character stands for itself; raises ChatError for ``where``."""
    try:
        return json.dumps(value, ensure_ascii=False, **style)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{where} cannot be written as JSON: {error}.") from None
