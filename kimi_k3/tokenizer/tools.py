"""Tools and calls as hosts write them, in either of OpenAI's forms.

    {"type": "function", "function": {"name": …, "parameters": …}}
    {"type": "function", "name": …, "parameters": …}

A call has ``arguments`` in place of ``parameters``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ChatError


def check_tools(where: str, tools: Any) -> Sequence[Mapping[str, Any]]:
    """``tools`` if it is a list of dictionaries, else ChatError; none for None."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise ChatError(
            f"{where} is {type(tools).__name__}; pass a list of dictionaries."
        )
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatError(
                f"{where}, entry {number} is {type(tool).__name__}; a tool is a "
                "dictionary, {'type': 'function', 'function': {'name': …}}."
            )
    return tools


def function_of(entry: Any) -> Mapping[str, Any]:
    """What describes the function of a tool, a call or a choice; empty if nothing."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def function_name(entry: Any) -> str | None:
    """The name in ``function_of(entry)``, if it is a string with something in it."""
    name = function_of(entry).get("name")
    return name if isinstance(name, str) and name else None
