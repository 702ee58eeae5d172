"""A whole answer in its parts, for those who generate in Python.

mlx-lm's server does the same while an answer arrives, with the same state machine.
"""

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .chat_template import CALL, CONTENT, REASONING


@dataclass(frozen=True)
class Answer:
    """What a model said: its reasoning, its content, the calls that it asks for.

    A call is ``{"name": …, "arguments": {…}}``. Markers are in none of the parts.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def read_answer(
    tokenizer: TokenizerWrapper, ids: list[int], *, thinking: bool = True
) -> Answer:
    """The parts of ``ids``, an answer without its end id, as the server tells them.

    ``thinking`` says how the prompt ended: with ``think`` open, or ``response``. Calls
    that were cut or cannot be read are left out.
    """
    machine = make_text_state_machine(tokenizer)
    state = machine.make_state(REASONING if thinking else CONTENT)
    state, segments = TextStateMachine.split(state, tokenizer.decode(ids))
    _, rest, last = TextStateMachine.flush(state)
    texts = {REASONING: "", CONTENT: "", CALL: ""}
    calls: list[dict[str, Any]] = []
    for name, text in [*segments, (last, rest), (CONTENT, "")]:
        if name == CONTENT and texts[CALL]:
            calls += _calls(tokenizer, texts[CALL])
            texts[CALL] = ""
        if name in texts:
            texts[name] += text
    return Answer(texts[REASONING], texts[CONTENT], calls)


def _calls(tokenizer: TokenizerWrapper, text: str) -> list[dict[str, Any]]:
    try:
        return tokenizer.tool_parser(text, None)
    except ValueError:
        return []
