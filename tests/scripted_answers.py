"""Answers that are made up, so that what is to be found in them is known exactly."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kimi_k3.answers.loops import Token
from kimi_k3.build.samples import load_tokenizer
from kimi_k3.nano import NANO_FOLDER

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "benchmarks" / "nano" / "samples"

TOKENIZER = load_tokenizer(NANO_FOLDER)


def ids_of(text: str) -> list[int]:
    """Ids of ``text``, in which nothing is a control id."""
    return TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)


def marked(text: str) -> list[int]:
    """Ids of ``text``, in which every control name is its id."""
    return TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=False)


def tokens_of(ids: Sequence[int]) -> list[Token]:
    return [Token.of(TOKENIZER.bytes_of([i])) for i in ids]


def sample_texts(name: str) -> Iterator[str]:
    """Documents of a corpus that the nano was not trained on."""
    for line in (SAMPLES / f"{name}.jsonl").read_text("utf-8").splitlines():
        value = json.loads(line)
        if "text" in value:
            yield value["text"]
        else:
            yield "\n".join(str(message["content"]) for message in value["messages"])


@dataclass(frozen=True)
class Looping:
    """A text that goes over into a loop, and where: ``start`` ids are before it."""

    ids: list[int]
    start: int
    period: int


def looping(seed: int, period: int, start: int, tokens: int) -> Looping:
    """``start`` ids of prose, then ``tokens`` that repeat a phrase of ``period`` ids.

    The phrase repeats nothing within itself, and prose and phrase meet in such a way
    that the loop begins at ``start`` and not before.
    """
    draw = random.Random(seed)
    prose, words = _prose()
    phrase = draw.sample(words, period)
    at = draw.randrange(len(prose) - start)
    before = prose[at : at + start]
    if before and before[-1] == phrase[-1]:
        before[-1] = ids_of(".")[0]
    repeated = phrase * (tokens // period + 1)
    return Looping(before + repeated[:tokens], start, period)


@cache
def _prose() -> tuple[list[int], list[int]]:
    """Ids of English prose, and those among them that are letters only."""
    prose = ids_of(" ".join(sample_texts("english"))[:40_000])
    return prose, sorted(
        {i for i in prose if TOKENIZER.bytes_of([i]).strip().isalpha()}
    )


def conversation(question: str, tools: Any = None) -> dict[str, Any]:
    """A line of a chats file that asks ``question``."""
    line: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    return line if tools is None else {**line, "tools": tools}


def write_chats(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class ScriptedModel(nn.Module):
    """A model that says what it is given to say, through mlx-lm's own generation.

    ``script`` is a prompt's ids → the ids of its answer; then it stays at the last.
    """

    def __init__(self, script: Mapping[tuple[int, ...], Sequence[int]], vocab: int):
        super().__init__()
        self._script = script
        self._vocab = vocab
        self.calls = 0
        #: After so many calls the user presses Ctrl-C.
        self.stops_at: int | None = None

    def make_cache(self) -> list["_Read"]:
        return [_Read()]

    def __call__(self, inputs: mx.array, cache: list["_Read"]) -> mx.array:
        if self.calls == self.stops_at:
            raise KeyboardInterrupt
        self.calls += 1
        (read,) = cache
        read.ids += [int(i) for i in np.array(inputs[0])]
        asked = next(
            (p for p in self._script if p == tuple(read.ids[: len(p)])), tuple(read.ids)
        )
        said = self._script.get(asked, [0])
        place = min(max(len(read.ids) - len(asked), 0), len(said) - 1)
        next_id = mx.arange(self._vocab) == said[place]
        logits = mx.where(next_id, 0.0, -1e9)
        return mx.broadcast_to(logits, (*inputs.shape, self._vocab))


class _Read:
    """What the scripted model has read, in the place of a cache."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        return []
