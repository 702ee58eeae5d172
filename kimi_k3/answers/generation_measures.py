"""What is measured of each answer: pairs that means are made of.

A measure of some answers is the sum of its numerators over the sum of its denominators.
An answer that a measure says nothing about, such as tool calls where no tool is offered,
has no pair for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Answer
from .drift import drifts
from .generation_prompts import Prompt
from .generation_sections import THINK, Markers
from .loops import Loop, Token, compression_ratio, find_loop, repeated_share
from .stops import LENGTH, Stop, stop_of
from .tool_calls import ToolCalls, ToolChecker, calls_begun, judge_calls

#: Names of measures, and what they are.
MEASURES = {
    "loops": "answers that repeat themselves until they end",
    "first_loop": "tokens before the loop, of answers that loop",
    "repeated": "share of 4-grams of tokens that the answer had before",
    "compression": "bytes of the text / bytes of it compressed",
    "ends_by_itself": "answers that end on an end id, of conversations",
    "open_section": "answers that end in an open section, of conversations",
    "calls_tools": "answers that call a tool, where tools are offered",
    "calls_unoffered": "answers that call a tool, where none is offered",
    "tool_call_parses": "calls that the host's parser gives, where tools are offered",
    "tool_call_known": "calls of a tool that is offered",
    "tool_call_valid": "calls whose arguments satisfy the tool's schema",
    "language_drift": "responses that leave the scripts of the question",
    "think_drift": "thinking that leaves the scripts of the question",
}

#: Those that are no share.
NO_SHARES = ("first_loop", "repeated", "compression")


@dataclass(frozen=True)
class Measured:
    """What one answer is.

    Attributes:
        pairs: measure → numerator and denominator.
        stop, loop, calls: what they are made of.
    """

    pairs: Mapping[str, tuple[float, float]]
    stop: Stop
    loop: Loop | None
    calls: ToolCalls


class Measurer:
    """Measures answers of a model with ``tokenizer``, mlx-lm's wrapper."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._markers = Markers(tokenizer)
        self._tokens: dict[int, Token] = {}
        self._checkers: dict[str, ToolChecker] = {}

    def measure(self, answer: Answer, prompt: Prompt) -> Measured:
        """``prompt`` is the one that ``answer`` answers."""
        ids = list(answer.ids)
        end = None if answer.stop == LENGTH else answer.stop
        sections = self._markers.sections(ids, prompt.begins_in)
        stop = stop_of(end, sections)
        loop = self._loop(ids, stop)
        reasoning, content, called = self._said(ids, prompt)
        calls = self._calls(ids, called, prompt)
        pairs = {
            "loops": _share(loop is not None),
            **_told("repeated", repeated_share(ids)),
            **_told("compression", compression_ratio(answer.text)),
            **_told("language_drift", drifts(prompt.question, content)),
            **_told("think_drift", drifts(prompt.question, reasoning)),
        }
        if loop is not None:
            pairs["first_loop"] = float(loop.start), 1.0
        if prompt.is_conversation:
            pairs["ends_by_itself"] = _share(stop.by_itself)
            pairs["open_section"] = _share(stop.open_section is not None)
            offered = "calls_tools" if prompt.tools else "calls_unoffered"
            pairs[offered] = _share(calls.began > 0)
        if prompt.tools and calls.began:
            pairs["tool_call_parses"] = calls.parsed, calls.began
            pairs["tool_call_known"] = calls.known, calls.began
            pairs["tool_call_valid"] = calls.valid, calls.began
        return Measured(pairs, stop, loop, calls)

    def _loop(self, ids: list[int], stop: Stop) -> Loop | None:
        if stop.by_itself:
            ids = list(self._markers.without_closing(ids))
        return find_loop(ids, [self._token(i) for i in ids], ended=stop.by_itself)

    def _token(self, token_id: int) -> Token:
        if token_id not in self._tokens:
            content = self._tokenizer.bytes_of([token_id])
            self._tokens[token_id] = Token.of(content)
        return self._tokens[token_id]

    def _said(self, ids: list[int], prompt: Prompt) -> tuple[str, str, list[Any]]:
        """Reasoning, content and calls; a raw completion is content."""
        from ..tokenizer.answer import read_answer

        if not prompt.is_conversation:
            return "", self._tokenizer.decode(ids), []
        thinking = prompt.begins_in == THINK
        said = read_answer(self._tokenizer, ids, thinking=thinking, tools=prompt.tools)
        return said.reasoning, said.content, said.tool_calls

    def _calls(self, ids: list[int], calls: list[Any], prompt: Prompt) -> ToolCalls:
        if not prompt.is_conversation:
            return ToolCalls()
        key = json.dumps(prompt.tools, sort_keys=True)
        if key not in self._checkers:
            self._checkers[key] = ToolChecker(prompt.tools, prompt.corpus)
        began = calls_begun(ids, self._markers)
        return judge_calls(calls, began, self._checkers[key])


def _share(is_so: bool) -> tuple[float, float]:
    return float(is_so), 1.0


def _told(name: str, value: float | None) -> dict[str, tuple[float, float]]:
    return {} if value is None else {name: (float(value), 1.0)}
