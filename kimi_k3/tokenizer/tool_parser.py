"""Tool calls in an answer's text, for mlx-lm's server and whoever else asks.

    <|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="string"<|sep|>…<|close|>argument<|sep|>
    <|close|>call<|sep|>

:func:`parse_tool_call` takes one call or several, a section with its tags, or what
mlx-lm's state machine leaves of a call: the text from behind ``<|open|>call`` up to
``<|close|>``, which proves that the call was not cut. A call is whole if all of its
arguments are closed and it is closed itself, or if another call or the end of the
section follows. Other calls, calls without a name and calls with an argument without a
key are left out; those beside them are not.

Arguments of type ``string`` are kept to the byte. Others are JSON, and the text itself
where it is no JSON that can be written again. A ``json`` block holds all arguments in
one object. If it holds other JSON, the call has one argument, its text: under the name
of the tool's only parameter, or under ``arguments``. What is no JSON drops the call.
Text of a call without any tag is read as if it stood in such a block, but must be an
object: without its arguments the call would be another one.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .call_tags import VALUES, Tag, attributes, read_tags
from .strict_json import read_json
from .tools import function_name, function_of

__all__ = ["parse_tool_call", "tool_call_end", "tool_call_start"]

#: mlx-lm asks where calls begin and end; "" leaves the end to ``chat_template.py``,
#: which keeps the proof that a call was whole.
tool_call_start = "<|open|>tools<|sep|>"
tool_call_end = ""

#: Of a ``json`` block that holds no object, where the tool does not say.
_SOLE_KEY = "arguments"


@dataclass
class _Call:
    """A call that is being read; ``arguments`` None once it cannot be used.

    ``bare`` is its text outside of tags, as long as there was no tag.
    """

    name: str
    bare: str = ""
    arguments: dict[str, Any] | None = field(default_factory=dict)

    def put(self, key: str | None, value: Any) -> None:
        if key is None:
            self.arguments = None
        elif self.arguments is not None:
            self.arguments[key] = value


def parse_tool_call(text: str, tools: Any | None = None) -> list[dict[str, Any]]:
    """The calls in ``text``, each ``{"name": …, "arguments": {…}}``, in order.

    ``tools`` is what was offered, in OpenAI's form. Raises ValueError if there is no
    call that can be used, and nothing else whatever the text.
    """
    calls = [
        {"name": call.name, "arguments": call.arguments}
        for call in _calls(text, tools)
        if call.name and call.arguments is not None
    ]
    if not calls:
        raise ValueError(f"no whole tool call in {text[:80]!r}")
    return calls


def _calls(text: str, tools: Any) -> Iterator[_Call]:
    """Whole calls of ``text``, usable or not."""
    call: _Call | None = None
    for tag in read_tags(text):
        if tag.name in VALUES:
            if call is not None:
                _read_argument(call, tag, tools)
            continue
        if call is not None:
            _read_bare(call)
            yield call
        call = None
        if tag.opens and tag.name == "call":
            call = _Call(attributes(tag.header).get("tool", ""), tag.body or "")


def _read_bare(call: _Call) -> None:
    if call.bare.strip():
        call.arguments = None
        with suppress(ValueError):
            value = read_json(call.bare)
            call.arguments = value if isinstance(value, dict) else None


def _read_argument(call: _Call, tag: Tag, tools: Any) -> None:
    call.bare = ""
    if tag.body is None:
        call.arguments = None
    elif tag.name == "argument":
        given = attributes(tag.header)
        value: Any = tag.body
        if given.get("type", "string") != "string":
            with suppress(ValueError):
                value = read_json(value)
        call.put(given.get("key"), value)
    else:
        try:
            value = read_json(tag.body)
        except ValueError:
            call.arguments = None
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                call.put(key, inner)
        else:
            call.put(_sole_parameter(call.name, tools), tag.body)


def _sole_parameter(name: str, tools: Any) -> str:
    for tool in tools if isinstance(tools, list | tuple) else ():
        if function_name(tool) == name:
            parameters = _mapping(function_of(tool).get("parameters"))
            declared = _mapping(parameters.get("properties"))
            keys = [key for key in declared if isinstance(key, str)]
            return keys[0] if len(keys) == 1 else _SOLE_KEY
    return _SOLE_KEY


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
