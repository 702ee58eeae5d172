"""A teacher, a build of it and samples that an evaluation takes a moment for."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import oracle_divergence as oracle
from calibration_cases import THREE_LAYERS
from tiny_k3 import write_t1, write_tk

from kimi_k3.build.samples import Samples, load_tokenizer, tokenizer_fingerprint
from kimi_k3.conversion.convert import convert
from kimi_k3.evaluation.scored import Scored
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

CORPORA = ("code", "prose")


@dataclass(frozen=True)
class Case:
    """Folders of a source and of a build that keeps ten of its sixteen experts."""

    source: Path
    build: Path
    samples: Samples


def write_case(folder: Path, **about: Any) -> Case:
    """``about`` is what the build's plan says of itself."""
    source = write_t1(folder / "source", tokenizer=True, **THREE_LAYERS)
    plan = ExpertPlan(
        experts=16,
        top_k=4,
        layers={layer: LayerPlan(tuple(range(3, 13))) for layer in (1, 2)},
        about={"kind": "uniform", **about},
    )
    convert(source, folder / "build", plan)
    return Case(source, folder / "build", samples_for(source))


def samples_for(source: Path, rows: int = 5, length: int = 16) -> Samples:
    """Random tokens of documents of 9 and 12 tokens, packed; the last row is padded."""
    rng = np.random.default_rng(3)
    count = rows * length - 5
    tokens = np.zeros(rows * length, np.int32)
    documents = np.full(rows * length, -1, np.int32)
    tokens[:count] = rng.integers(0, 256, count)
    ends = np.cumsum([9, 12] * count)
    documents[:count] = np.searchsorted(ends, np.arange(count), side="right")
    return samples_of(source, tokens.reshape(rows, -1), documents.reshape(rows, -1))


def samples_of(
    source: Path, tokens: np.ndarray, documents: np.ndarray, part: str = "held_out"
) -> Samples:
    """Samples of these tokens, (rows, length); documents are of the corpora in turn."""
    names = CORPORA[: min(2, int(documents.max()) + 1)]
    labels = np.where(documents < 0, -1, documents % 2)
    return Samples(
        tokens.astype(np.int32),
        labels.astype(np.int16),
        documents.astype(np.int32),
        names,
        tuple(f"{i:032x}" for i in range(int(documents.max()) + 1)),
        tokenizer_fingerprint(load_tokenizer(source)),
        part,
    )


def with_tokenizer(folder: Path, target: Path) -> Path:
    """A copy of the checkpoint ``folder`` with tokenizer files, which it lacks."""
    shutil.copytree(folder, target)
    write_tk(target)
    return target


def logits_of(model: Any, samples: Samples) -> np.ndarray:
    """(rows, length, vocab) of the whole model, a row at a time."""
    rows = [np.array(model(mx.array(row[None]))[0]) for row in samples.tokens]
    return np.stack(rows)


def loops(
    samples: Samples, tokenizer: Any, teacher: np.ndarray, build: np.ndarray
) -> dict[str, np.ndarray]:
    """KL, log-likelihoods and agreement of all predictions, one after the other."""
    found: dict[str, list[Any]] = {
        "kl": [],
        "teacher_nll": [],
        "build_nll": [],
        "agrees": [],
    }
    scored = Scored.of(samples, tokenizer)
    for row, column in zip(scored.rows, scored.columns, strict=True):
        a, b = teacher[row, column].tolist(), build[row, column].tolist()
        target = int(samples.tokens[row, column + 1])
        found["kl"].append(oracle.kl(a, b))
        found["teacher_nll"].append(oracle.nll(a, target))
        found["build_nll"].append(oracle.nll(b, target))
        found["agrees"].append(oracle.likeliest(a) == oracle.likeliest(b))
    return {name: np.array(values) for name, values in found.items()}
