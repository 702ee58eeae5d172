"""A whole answer in its parts, for those who generate in Python.

mlx-lm's server does the same while an answer arrives, with the same transitions and the
same parser of tool calls. One thing differs: of an answer that ends inside a section,
the server leaves out last characters that could have begun a marker, such as ``<``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine

from .chat_template import CALL, CONTENT, REASONING, RESPONSE_FORMAT
from .decoded import DecodedText
from .tool_parser import parse_tool_call


@dataclass(frozen=True)
class Answer:
    """What a model said: its reasoning, its content, the calls that it asks for.

    A call is ``{"name": …, "arguments": {…}}``. Markers are in none of the parts.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def read_answer(
    tokenizer: Any,
    answer: Sequence[int] | str,
    *,
    thinking: bool = True,
    tools: Sequence[Any] | None = None,
) -> Answer:
    """The parts of ``answer``, its ids or the text that mlx-lm gives for them.

    >>> text = mlx_lm.generate(model, tokenizer, prompt)  # doctest: +SKIP
    >>> read_answer(tokenizer, text).tool_calls  # doctest: +SKIP
    [{'name': 'get_weather', 'arguments': {'city': 'Tokyo'}}]

    Args:
        tokenizer: Kimi K3's, as ``load`` gives it.
        answer: with or without its end id. Text that went through something else than
            ``+``, slices and strips is an ordinary string: markers that the model only
            spelled are then taken for its structure.
        thinking: how the prompt ended: with ``think`` open, or ``response``.
        tools: what the prompt offered.

    Calls that were cut or cannot be read are left out.
    """
    text = _without_ends(tokenizer, answer)
    machine = TextStateMachine(RESPONSE_FORMAT["transitions"])
    state = machine.make_state(REASONING if thinking else CONTENT)
    state, segments = TextStateMachine.split(state, text)
    _, rest, last = TextStateMachine.flush(state)
    said: dict[str, list[str]] = {REASONING: [], CONTENT: []}
    call = ""
    calls: list[dict[str, Any]] = []
    for name, part in [*segments, (last, rest), (CONTENT, "")]:
        if name == CALL:
            call += part
        elif name in said:
            said[name].append(part)
        if name == CONTENT and call:
            calls += _calls(call, tools)
            call = ""
    return Answer("".join(said[REASONING]), "".join(said[CONTENT]), calls)


def _without_ends(tokenizer: Any, answer: Sequence[int] | str) -> str:
    """Text of ``answer`` up to its end id."""
    ends = tokenizer.end_ids
    if not isinstance(answer, str):
        ids = [int(token_id) for token_id in answer]
        stop = next((i for i, token_id in enumerate(ids) if token_id in ends), len(ids))
        return tokenizer.decode(ids[:stop])
    if isinstance(answer, DecodedText):
        names = [tokenizer.decode([end]) for end in ends]
        content = answer.plain()
        for start, stop in answer.controls:
            if content[start:stop] in names:
                return answer[:start]
    return answer


def _calls(text: str, tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    try:
        return parse_tool_call(text, tools)
    except ValueError:
        return []
