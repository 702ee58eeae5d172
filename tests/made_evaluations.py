"""Evaluations of made-up numbers: documents that differ, tokens that differ in them."""

from typing import Any

import numpy as np

from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.evaluation.spans import SPANS

ABOUT = {
    "direction": "KL(teacher || build)",
    "teacher": {
        **{"checkpoint": "t" * 64, "samples": "s" * 64, "tokenizer": "k" * 64},
        **{"dtype": "stored", "rows_per_step": 1, "tool": "kimi-k3 0", "mlx": "0"},
        **{"device": "cpu", "path": "teacher-folder"},
    },
    "build": {
        **{"checkpoint": "b" * 64, "samples": "s" * 64, "tokenizer": "k" * 64},
        **{"dtype": "stored", "rows_per_step": 1, "tool": "kimi-k3 0", "mlx": "0"},
        **{"device": "cpu", "path": "build-folder"},
    },
    "overlap": "not checked",
}


def made_evaluation(
    documents: int = 24,
    *,
    corpora: tuple[str, ...] = ("code", "chat", "chinese"),
    most_tokens: int = 40,
    seed: int = 0,
    worse: float = 1.0,
    samples_seed: int = 0,
    **about: Any,
) -> Evaluation:
    """Documents of 2 to ``most_tokens`` judged tokens each, in turn of the corpora.

    ``samples_seed`` decides documents and teacher, ``seed`` and ``worse`` the build.
    """
    random = np.random.default_rng([1, samples_seed])
    lengths = random.integers(2, most_tokens + 1, documents)
    document = np.repeat(np.arange(documents), lengths).astype(np.int32)
    hard = random.normal(0, 0.7, documents)[document]
    teacher = random.exponential(2.0, len(document)) * np.exp(hard / 2)
    span = random.integers(0, len(SPANS), len(document)).astype(np.int8)
    language = (document % 2).astype(np.int16)
    random = np.random.default_rng([2, seed])
    kl = worse * np.exp(hard - 4 + random.normal(0, 1.2, len(document)))
    change = random.normal(0, 1, len(document)) * np.sqrt(kl) + kl
    return Evaluation(
        kl=kl,
        teacher_nll=teacher,
        build_nll=np.maximum(teacher + change, 0),
        agrees=random.random(len(document)) > np.minimum(1, 2 * kl),
        corpus=(document % len(corpora)).astype(np.int16),
        document=document,
        span=span,
        language=language,
        position=np.concatenate([np.arange(1, n + 1) for n in lengths]).astype(
            np.int32
        ),
        corpora=corpora,
        languages=("Han", "Latin"),
        about={**ABOUT, **about},
    )


def in_order(evaluation: Evaluation, order: np.ndarray) -> Evaluation:
    """The same predictions in another order, or some of them."""
    names = (
        *("kl", "teacher_nll", "build_nll", "agrees", "corpus", "document", "span"),
        *("language", "position"),
    )
    return Evaluation(
        **{name: getattr(evaluation, name)[order] for name in names},
        corpora=evaluation.corpora,
        languages=evaluation.languages,
        about=evaluation.about,
    )
