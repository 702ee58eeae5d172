"""Judges a build by its teacher: both distributions of every prediction, side by side."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..build.samples import load_tokenizer
from ..errors import EvaluationError
from .divergence import Divergences, divergences
from .evaluation import Evaluation
from .final_states import FinalStates
from .scored import Scored

#: What the divergence is of, in this order.
DIRECTION = "KL(teacher || build)"

#: Predictions for which a head is brought to float32 once: at Kimi K3's size that moves a
#: tenth of the time that its products take, and the logits of both models are 1.3 GB.
BLOCK = 1024

#: Predictions whose distributions are compared at once: 21 arrays of their logits.
PART = 64

#: Told how many predictions of how many are judged.
Judged = Callable[[int, int], None]


def compare(
    teacher: FinalStates,
    build: FinalStates,
    about: dict[str, Any] | None = None,
    *,
    tokenizer: str | Path | None = None,
    judged: Judged | None = None,
) -> Evaluation:
    """Judge ``build`` by ``teacher``, which are of the same samples.

    The whole vocabulary is looked at, some predictions at a time.

    Args:
        about: what the result says of itself; default: the direction alone.
        tokenizer: folder of the tokenizer; default: the build's checkpoint.

    Raises EvaluationError for other samples or another vocabulary, and for states or a
    head that give NaN or infinity.
    """
    if teacher.conditions.samples != build.conditions.samples:
        raise EvaluationError("teacher and build were run on other samples.")
    check_vocab(teacher.head.vocab, build.head.vocab)
    scored = Scored.of(teacher.samples, load_tokenizer(tokenizer or build.path))
    joined: dict[str, list[np.ndarray]] = {f.name: [] for f in fields(Divergences)}
    done, total = 0, len(scored.rows)
    for part in _parts(teacher, build, scored):
        for name, found in joined.items():
            found.append(getattr(part, name))
        done += len(part.kl)
        if judged is not None:
            judged(done, total)
    return Evaluation(
        **{name: np.concatenate(found) for name, found in joined.items()},
        corpus=scored.corpus,
        document=scored.document,
        span=scored.span,
        language=scored.language,
        position=scored.position,
        corpora=scored.corpora,
        languages=scored.languages,
        about=about or {"direction": DIRECTION},
    )


def check_vocab(teacher: int, build: int) -> None:
    """Refuse distributions over another number of tokens; EvaluationError."""
    if teacher != build:
        raise EvaluationError(
            f"the teacher tells {teacher} tokens apart and the build {build}; their "
            "distributions cannot be compared."
        )


def _parts(
    teacher: FinalStates, build: FinalStates, scored: Scored
) -> Iterator[Divergences]:
    """The predictions of ``scored`` in their order, :data:`PART` at a time.

    Both the rows of a matrix product and the places of a prediction among them are the
    same however many predictions there are, so that the last bits of a prediction do not
    depend on others beside it.
    """
    for start in range(0, len(scored.rows), BLOCK):
        block = slice(start, start + BLOCK)
        rows, columns = scored.rows[block], scored.columns[block]
        targets, count = scored.targets[block], len(rows)
        wanted = teacher.head.logits(_padded(_gathered(teacher, rows, columns)))
        got = build.head.logits(_padded(_gathered(build, rows, columns)))
        for first in range(0, count, PART):
            last = min(first + PART, count)
            yield divergences(wanted[first:last], got[first:last], targets[first:last])


def _gathered(
    states: FinalStates, rows: np.ndarray, columns: np.ndarray
) -> list[mx.array]:
    """Final states (n, D) of predictions in the order of rows, an array a row."""
    found: list[mx.array] = []
    for row in np.unique(rows):
        found.append(states.row(int(row))[mx.array(columns[rows == row])])
    return found


def _padded(parts: list[mx.array]) -> mx.array:
    """(BLOCK, D), zeros after the last of ``parts``."""
    missing = BLOCK - sum(len(part) for part in parts)
    if missing:
        parts = [*parts, mx.zeros((missing, parts[0].shape[1]), parts[0].dtype)]
    return mx.concatenate(parts)
