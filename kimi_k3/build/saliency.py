"""SaliencyTable: what a calibration recorded of every expert, as one checked value.

Sums are kept per corpus, so corpora can be weighted and combined afterwards, and tables
of the same source can be merged, without running the model again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from .. import __version__
from ..errors import SaliencyError
from .saliency_checks import REPLACE, STATISTICS, Outline, check_statistics
from .sealed_npz import digest_of, read_sealed, write_sealed

#: Name of the file in the folder that a calibration fills.
FILE_NAME = "saliency.npz"
KIND, VERSION = "a saliency table", 1
TOOL = f"kimi-k3-mlx {__version__}"

#: How experts can be ranked; every score is an average over tokens, weighted by corpus.
CRITERIA = {
    "reap_sum": "router weight × norm of the expert's output, per token of text",
    "reap_mean": "the same per token that chose the expert (REAP's own score)",
    "relative": "share of the layer's routed output, per token of text",
    "frequency": "how often the expert is chosen, per token of text",
    "gate": "router weight, per token of text",
}

#: The statistic that a criterion averages over tokens.
_AVERAGED = {
    "reap_sum": "reap_sum",
    "relative": "relative_sum",
    "frequency": "count",
    "gate": "gate_sum",
}
_SAMPLES_KEYS = ("fingerprint", "tokenizer", "document_hashes")


@dataclass(frozen=True, eq=False)
class SaliencyTable(Outline):
    """Sums over calibration tokens, (C, L, E): corpora, MoE layers, experts.

    A layer with fewer than E experts is padded with zeros; ``exists`` tells which are
    real. Arrays cannot be written to. Compare tables by ``digest``.

    Attributes:
        corpora, tokens, layers, experts, top_k: see :class:`Outline`.
        count: int64, tokens that chose the expert.
        gate_sum: Σ g, where g is the weight that multiplies the expert's output e (after
            renormalisation and scaling), never the biased score it is selected by.
        gate_square_sum: Σ g².
        reap_sum: Σ g·‖e‖₂, e in the latent space.
        relative_sum: Σ ‖g·e‖ / ‖Σ g·e‖; the sum is over the experts of the token.
        contribution_max: max of g·‖e‖.
        source: what was calibrated: fingerprints of its config and weights.
        samples: on what: ``fingerprint``, ``tokenizer``, ``document_hashes`` and more.
        tool: name and version of what made the table.

    Raises SaliencyError for anything that no calibration can give, wherever a table
    comes from: made, merged or loaded.
    """

    count: np.ndarray
    gate_sum: np.ndarray
    gate_square_sum: np.ndarray
    reap_sum: np.ndarray
    relative_sum: np.ndarray
    contribution_max: np.ndarray
    source: Mapping[str, Any]
    samples: Mapping[str, Any]
    tool: str = TOOL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_statistics(self, self.statistics)
        if not self.source:
            raise SaliencyError(
                f"the table does not say what was calibrated. {REPLACE}"
            )
        if absent := [key for key in _SAMPLES_KEYS if key not in self.samples]:
            raise SaliencyError(f"samples lack {', '.join(absent)}. {REPLACE}")
        for name in ("tokens", "layers", "experts", *STATISTICS):
            array = getattr(self, name)
            if array.flags.writeable:
                array = array.copy()
                array.flags.writeable = False
                object.__setattr__(self, name, array)
        for name in ("source", "samples"):
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))

    @classmethod
    def from_layers(
        cls,
        layers: Mapping[int, Mapping[str, np.ndarray]],
        *,
        corpora: Sequence[str],
        tokens: Sequence[int] | np.ndarray,
        top_k: int,
        source: Mapping[str, Any],
        samples: Mapping[str, Any],
    ) -> Self:
        """Put the layers of a calibration together.

        Args:
            layers: decoder layer index → statistic → (C, experts of that layer). Values
                of ``count`` are int64, of the others float64.
            tokens: tokens of each corpus.
        """
        indices = sorted(layers)
        if not indices:
            raise SaliencyError("no layer has experts: there is nothing to calibrate.")
        tables = [layers[index] for index in indices]
        for index, table in zip(indices, tables, strict=True):
            if absent := [name for name in STATISTICS if name not in table]:
                raise SaliencyError(
                    f"layer {index} lacks {', '.join(absent)}. {REPLACE}"
                )
        experts = [table["count"].shape[-1] for table in tables]
        stacked: dict[str, Any] = {
            name: np.zeros((len(corpora), len(tables), max(experts)), dtype)
            for name, dtype in STATISTICS.items()
        }
        for at, (index, table) in enumerate(zip(indices, tables, strict=True)):
            for name, dtype in STATISTICS.items():
                array, shape = np.asarray(table[name]), (len(corpora), experts[at])
                if array.shape != shape or array.dtype != dtype:
                    raise SaliencyError(
                        f"layer {index}: {name} is of shape {array.shape} and type "
                        f"{array.dtype}; wanted {shape} and {np.dtype(dtype)}. {REPLACE}"
                    )
                stacked[name][:, at, : experts[at]] = array
        return cls(
            corpora=tuple(corpora),
            tokens=np.array(tokens, np.int64),
            layers=np.array(indices, np.int64),
            experts=np.array(experts, np.int64),
            top_k=int(top_k),
            **stacked,
            source=source,
            samples=samples,
        )

    @property
    def statistics(self) -> dict[str, np.ndarray]:
        """Every statistic by its name, (C, L, E)."""
        return {name: getattr(self, name) for name in STATISTICS}

    @property
    def digest(self) -> str:
        """SHA-256 over the whole content, as hex."""
        return digest_of(self._arrays())

    def shares(self, weights: Mapping[str, float] | None = None) -> np.ndarray:
        """(C,) float64 of sum 1: what share of the text each corpus stands for.

        Args:
            weights: corpus → weight, of any sum; a corpus that is not named has none.
                None: as many as it has tokens.
        """
        if weights is None:
            return self.tokens / self.tokens.sum()
        if unknown := sorted(set(weights) - set(self.corpora)):
            raise SaliencyError(
                f"the table has no corpus {unknown[0]}; it has {', '.join(self.corpora)}."
            )
        given = np.array([float(weights.get(name, 0)) for name in self.corpora])
        if (given < 0).any() or not 0 < sum(given.tolist()) < float("inf"):
            raise SaliencyError(
                f"weights are {dict(weights)}; wanted 0 or more, and not 0 for all."
            )
        return given / given.sum()

    def score(
        self, criterion: str, weights: Mapping[str, float] | None = None
    ) -> np.ndarray:
        """(L, E) float64: how much each expert matters, 0 where there is none.

        Averages over tokens, as if the calibration had seen the corpora in the shares
        given by ``weights`` (see :meth:`shares`): "70 % code, 30 % Chinese". Scores of
        one layer compare; those of two layers only as far as their outputs do.

        Args:
            criterion: a key of ``CRITERIA``.
        """
        if criterion not in CRITERIA:
            raise SaliencyError(
                f"no criterion is called {criterion!r}; there are {', '.join(CRITERIA)}."
            )
        if criterion != "reap_mean":
            return self._average(_AVERAGED[criterion], weights)
        chosen = self._average("count", weights)
        total = self._average("reap_sum", weights)
        return np.divide(total, chosen, out=np.zeros_like(total), where=chosen > 0)

    def _average(
        self, statistic: str, weights: Mapping[str, float] | None
    ) -> np.ndarray:
        """(L, E): the statistic per token of the weighted corpora."""
        sums = getattr(self, statistic)
        if weights is None:
            return sums.sum(axis=0) / self.tokens.sum()
        # One corpus after the other: the order of a matrix product is not fixed.
        total = np.zeros(sums.shape[1:])
        for factor, of_corpus in zip(
            self.shares(weights) / self.tokens, sums, strict=True
        ):
            total += factor * of_corpus
        return total

    def merge(self, other: "SaliencyTable") -> Self:
        """One table with the corpora of both, which were recorded on the same source.

        Raises SaliencyError if sources or tokenizers differ, or a corpus is in both.
        """
        for name in ("source", "top_k", "layers", "experts"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if not np.array_equal(mine, theirs):
                raise SaliencyError(
                    f"tables of different checkpoints cannot be merged: {name} is "
                    f"{_short(mine)} in one, {_short(theirs)} in the other. Calibrate the "
                    "same source on both samples."
                )
        if self.samples["tokenizer"] != other.samples["tokenizer"]:
            raise SaliencyError(
                "tables cannot be merged: their samples were made with different "
                "tokenizers. Make both with the source's own."
            )
        if both := sorted(set(self.corpora) & set(other.corpora)):
            raise SaliencyError(
                f"corpus {both[0]} is in both tables; its tokens would count twice. "
                "Calibrate it once, or under another name."
            )
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in ("tokens", *STATISTICS)
        }
        return type(self)(
            corpora=self.corpora + other.corpora,
            layers=self.layers,
            experts=self.experts,
            top_k=self.top_k,
            **joined,
            source=self.source,
            samples=_merged_samples(self.samples, other.samples),
        )

    def save(self, path: str | Path) -> Path:
        """Write the table to the file ``path``, or into the folder ``path``; where."""
        path = _file(path)
        write_sealed(path, KIND, VERSION, self._arrays())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a table: a file of :meth:`save`, or the folder it lies in."""
        path = _file(path)
        arrays = read_sealed(path, KIND, VERSION, SaliencyError, REPLACE)
        values: dict[str, Any] = dict(arrays)
        try:
            values |= {name: json.loads(str(arrays[name])) for name in _TEXTS}
            values["corpora"] = tuple(values["corpora"])
            values["top_k"] = int(arrays["top_k"])
            return cls(**values)
        except SaliencyError as error:
            raise SaliencyError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise SaliencyError(
                f"{path} does not hold what {KIND} holds: {error}. {REPLACE}"
            ) from error

    def _arrays(self) -> dict[str, np.ndarray]:
        texts = {
            name: np.array(json.dumps(getattr(self, name), sort_keys=True))
            for name in _TEXTS
        }
        numbers = ("top_k", "tokens", "layers", "experts")
        return {
            **texts,
            **{name: np.asarray(getattr(self, name)) for name in numbers},
            **self.statistics,
        }


#: Attributes that a file holds as JSON.
_TEXTS = ("corpora", "source", "samples", "tool")


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def _merged_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of two sets of samples together, whichever comes first."""
    prints = sorted(
        {p for s in (one, other) for p in s.get("merged_from", [s["fingerprint"]])}
    )
    same = {
        key: one[key] for key in one.keys() & other.keys() if one[key] == other[key]
    }
    documents = {*one["document_hashes"], *other["document_hashes"]}
    return {
        **same,
        "fingerprint": hashlib.sha256("\n".join(prints).encode()).hexdigest(),
        "document_hashes": sorted(documents),
        "merged_from": prints,
    }
