"""Tool calls of an answer, as the host that serves the build would give them.

Calls are what ``read_answer`` finds, which is what mlx-lm's server gives. A call's name
must then be one of the tools that the prompt offered, and its arguments must satisfy
that tool's JSON schema. Of the calls that an answer began, n,

    parses = (calls that the host gives) / n
    known  = (those of an offered tool) / n
    valid  = (those whose arguments satisfy its schema) / n

so each is part of the one before. A tools section without a call counts as one that
fails.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EvaluationError, MissingPackageError
from ..tokenizer.tools import function_name, function_of
from .generation_sections import THINK, TOOLS, Markers


@dataclass(frozen=True)
class ToolCalls:
    """Calls of one answer: how many it began, and how many of them are how good."""

    began: int = 0
    parsed: int = 0
    known: int = 0
    valid: int = 0


class ToolChecker:
    """Judges calls by the tools that a prompt offers, a list as chat APIs take it.

    Raises EvaluationError for tools that nothing can be judged by, MissingPackageError
    without jsonschema.
    """

    def __init__(self, tools: Sequence[Any], where: str):
        self._validators = {}
        for tool in tools:
            name = function_name(tool)
            schema = function_of(tool).get("parameters") or {}
            if name is None or not isinstance(schema, Mapping):
                raise EvaluationError(
                    f"{where} offers {json.dumps(tool)[:80]}, which is no tool with a "
                    "name and a schema of its parameters; mend or remove it."
                )
            self._validators[name] = _validator(schema, f"{where}, tool {name!r}")

    def knows(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._validators

    def accepts(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether ``arguments`` are as the tool wants them."""
        try:
            return self._validators[name].is_valid(arguments)
        except Exception:
            # What cannot be judged, such as a number too large or a schema that names
            # itself, is no valid call; the other answers are still to be counted.
            return False


def calls_begun(ids: Sequence[int], markers: Markers) -> int:
    """Calls that an answer began, a tools section without any being one."""
    empty = sum(
        section.name == TOOLS and not _call_tags(section.ids, markers)
        for section in markers.sections(ids, THINK)
    )
    return empty + _call_tags(ids, markers)


def judge_calls(
    calls: Sequence[Mapping[str, Any]], began: int, checker: ToolChecker
) -> ToolCalls:
    """``calls`` as ``read_answer`` gives them, of an answer that began ``began``."""
    good = [call for call in calls if checker.knows(call["name"])]
    valid = [call for call in good if checker.accepts(call["name"], call["arguments"])]
    return ToolCalls(began, len(calls), len(good), len(valid))


def _call_tags(ids: Sequence[int], markers: Markers) -> int:
    tags = (
        markers.tag_at(ids, place)
        for place, token in enumerate(ids)
        if token == markers.open
    )
    return sum(tag is not None and tag[0] == "call" for tag in tags)


def _validator(schema: Mapping[str, Any], where: str) -> Any:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry, Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012
    except ImportError as missing:
        raise MissingPackageError(
            "judging tool calls by their schemas needs jsonschema, which is not "
            "installed. Run: pip install 'kimi-k3-mlx[evaluate]'"
        ) from missing
    schema = dict(schema)
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        resolver = Registry().with_resource("", resource).resolver()
        for reference in _inner_references(schema):
            resolver.lookup(reference)
    except (SchemaError, Unresolvable, TypeError, ValueError) as error:
        told = error.message if isinstance(error, SchemaError) else str(error)
        raise EvaluationError(
            f"{where}: its parameters are no JSON schema: {told}. Mend it."
        ) from error
    # An empty registry: nothing that a schema names is fetched from anywhere.
    return kind(schema, registry=Registry())


def _inner_references(schema: Any) -> Iterator[str]:
    """Every reference to another place of the same schema."""
    if isinstance(schema, Mapping):
        found = schema.get("$ref")
        if "$id" in schema:
            return  # another base: what it refers to is not found from here
        if isinstance(found, str) and found.startswith("#"):
            yield found
        for inner in schema.values():
            yield from _inner_references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _inner_references(inner)
