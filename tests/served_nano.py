"""The nano in float32, served and by itself: what an answer of the server must be.

In bfloat16 a row's roundings depend on the rows beside it; in float32 they are too small
to change what a greedy answer says.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import convert, stream_generate
from serving import READ_FILE

import kimi_k3
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.tokenizer.answer import Answer

TOOLS = [READ_FILE]

ADD, NOTES = (
    "Write a Python function that adds two numbers.",
    "What does notes.txt say?",
)

#: An answer without control ids is text that goes on to ``max_tokens``.
NO_CONTROL_IDS: Any = {str(i): -1000.0 for i in range(768, 1024)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def float32_nano(folder: Path) -> Path:
    """A float32 copy of the nano in ``folder``, as stock ``mlx_lm.convert`` makes it."""
    convert(str(NANO_FOLDER), str(folder), dtype="float32")
    return folder


class Alone:
    """Greedy answers without server, cache or company, each prompt read at once."""

    def __init__(self, build: Path):
        self.build = build
        self._known: dict[tuple[int, ...], list[Any]] = {}

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return kimi_k3.load(str(self.build))

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    def prompt(self, messages: Sequence[Any], **options: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, **options
        )

    def tokens(self, prompt: Sequence[int], limit: int = 400) -> list[Any]:
        """mlx-lm's own responses, the end id's included."""
        model, tokenizer = self._loaded
        known = self._known.get(tuple(prompt), [])
        if len(known) < limit and not (known and known[-1].finish_reason == "stop"):
            known = list(
                stream_generate(model, tokenizer, list(prompt), max_tokens=limit)
            )
            self._known[tuple(prompt)] = known
        return known[:limit]

    def ids(self, prompt: Sequence[int], limit: int = 400) -> list[int]:
        return [response.token for response in self.tokens(prompt, limit)]

    def logprobs(self, prompt: Sequence[int], limit: int) -> list[float]:
        """Of each id that :meth:`ids` gives."""
        found = [r.logprobs[r.token] for r in self.tokens(prompt, limit)]
        values: Any = mx.stack(found).tolist()
        return values

    def answer(
        self, messages: Sequence[Any], limit: int = 400, **options: Any
    ) -> Answer:
        ids = self.ids(self.prompt(messages, **options), limit)
        thinking = options.get("thinking", True)
        return kimi_k3.read_answer(self.tokenizer, ids, thinking=thinking)


def said(message: Any) -> Answer:
    """What a reply of the server holds."""
    calls = [
        {"name": c.function.name, "arguments": json.loads(c.function.arguments)}
        for c in message.tool_calls or ()
    ]
    return Answer(getattr(message, "reasoning", "") or "", message.content or "", calls)


def joined(chunks: Iterable[Any]) -> tuple[Answer, str]:
    """What a stream says when it is put together, and how it finished."""
    whole, finish = Answer(), ""
    for chunk in chunks:
        for choice in chunk.choices:
            part = said(choice.delta)
            whole = Answer(
                whole.reasoning + part.reasoning,
                whole.content + part.content,
                whole.tool_calls + part.tool_calls,
            )
            finish = choice.finish_reason or finish
    return whole, finish
