"""Evaluation: what every prediction of a build was worth, beside those of its teacher.

    OUT/predictions.npz    this value, sealed

Everything that is told of a build is computed from it: tables, intervals, pictures, and
what lies between two builds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..build.sealed_npz import digest_of, read_sealed, write_sealed
from ..errors import EvaluationError
from .spans import SPANS

FILE_NAME = "predictions.npz"
KIND, VERSION = "an evaluation", 1

#: Bytes of a file among which its kind is.
_HEAD = 4096

_REMEDY = "Make it again with `kimi-k3 evaluate`."

_ARRAYS = {
    "kl": np.float64,
    "teacher_nll": np.float64,
    "build_nll": np.float64,
    "agrees": np.bool_,
    "corpus": np.int16,
    "document": np.int32,
    "span": np.int8,
    "language": np.int16,
    "position": np.int32,
}

#: Ways to group predictions, and the array that does it.
GROUPINGS = ("corpus", "span", "language", "position")

#: Lower bounds of the groups of positions: what the model has seen of the document.
POSITIONS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """N judged predictions, (N,) each, in the order of the samples.

    Attributes:
        kl: KL(teacher ‖ build) of the whole distribution, nats.
        teacher_nll, build_nll: −log p of the token that follows, nats.
        agrees: whether teacher and build find the same token the likeliest.
        corpus, document, span, language, position: what it is of, as in
            :class:`~kimi_k3.evaluation.scored.Scored`.
        corpora, languages: names.
        about: teacher and build (:class:`~kimi_k3.evaluation.final_states.Conditions` and
            paths), direction, and more; plain JSON values.

    Raises EvaluationError where these contradict each other.
    """

    kl: np.ndarray
    teacher_nll: np.ndarray
    build_nll: np.ndarray
    agrees: np.ndarray
    corpus: np.ndarray
    document: np.ndarray
    span: np.ndarray
    language: np.ndarray
    position: np.ndarray
    corpora: tuple[str, ...]
    languages: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (len(self.kl),):
                raise EvaluationError(
                    f"{name} is {array.dtype} of shape {array.shape}; an evaluation has "
                    f"{np.dtype(dtype)} of shape ({len(self.kl)},). {_REMEDY}"
                )
            array = array.copy()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        # In one order, whether it was just made or read back.
        about = json.loads(json.dumps(dict(self.about), sort_keys=True))
        object.__setattr__(self, "about", about)
        if not len(self.kl):
            raise EvaluationError(f"an evaluation of no predictions. {_REMEDY}")
        for name, names in (
            ("corpus", self.corpora),
            ("span", SPANS),
            ("language", self.languages),
        ):
            array = getattr(self, name)
            if array.min() < 0 or array.max() >= len(names):
                raise EvaluationError(f"{name} points beyond its names. {_REMEDY}")
        for name in ("kl", "teacher_nll", "build_nll"):
            if not np.isfinite(getattr(self, name)).all():
                raise EvaluationError(f"{name} holds NaN or infinity. {_REMEDY}")

    @cached_property
    def digest(self) -> str:
        """SHA-256, as hex, of all that this is."""
        return digest_of(self._content())

    def groups(self, grouping: str) -> dict[str, np.ndarray]:
        """Name → which predictions (N,) bool, of one of :data:`GROUPINGS`.

        In the order of the corpora, spans, names or positions; empty ones left out.
        """
        if grouping == "position":
            bounds = (*POSITIONS, None)
            found = {
                _position_text(low, high): (self.position >= low)
                & (self.position < (high or np.inf))
                for low, high in zip(bounds[:-1], bounds[1:], strict=True)
                if low is not None
            }
        else:
            names = {
                "corpus": self.corpora,
                "span": SPANS,
                "language": self.languages,
            }[grouping]
            array = getattr(self, grouping)
            found = {name: array == number for number, name in enumerate(names)}
        return {name: which for name, which in found.items() if which.any()}

    def save(self, folder: str | Path) -> None:
        """Write ``folder/predictions.npz``, whole or not at all."""
        write_sealed(Path(folder) / FILE_NAME, KIND, VERSION, self._content())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What :meth:`save` wrote: its folder or file. EvaluationError otherwise."""
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        arrays = read_sealed(path, KIND, VERSION, EvaluationError, _REMEDY)
        try:
            about = json.loads(str(arrays["about"]))
            return cls(
                **{name: arrays[name] for name in _ARRAYS},
                corpora=tuple(about.pop("corpora")),
                languages=tuple(about.pop("languages")),
                about=about,
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, EvaluationError):
                raise EvaluationError(f"{path}: {error}") from error
            raise EvaluationError(f"{path} lacks {error}. {_REMEDY}") from error

    def _content(self) -> dict[str, np.ndarray]:
        about = {**self.about, "corpora": self.corpora, "languages": self.languages}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {**arrays, "about": np.array(json.dumps(about, sort_keys=True))}


def is_evaluation(path: Path) -> bool:
    """Whether the file ``path`` was written by :meth:`Evaluation.save`, damaged or not."""
    with path.open("rb") as file:
        return np.array(KIND).tobytes() in file.read(_HEAD)


def _position_text(low: int, high: int | None) -> str:
    return f"{low} to {high - 1}" if high else f"{low} on"
