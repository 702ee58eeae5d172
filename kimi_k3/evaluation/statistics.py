"""How sure a mean over predictions is: documents drawn again, within each corpus.

Predictions of one document depend on each other, so what is drawn is the document, with
all of its predictions. The same draws serve every measure and every build, which is what
makes a difference between two builds of the same samples surer than either of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..errors import EvaluationError

DRAWS, SEED, LEVEL = 2000, 0, 0.95

#: Documents drawn at a time over all draws: bounds the memory of large samples.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that its documents leave; None where there is none.

    Raises EvaluationError for what is not finite, or half an interval.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        whole = [self.value]
        if self.low is not None or self.high is not None:
            whole += [self.low, self.high]
        if any(part is None or not np.isfinite(part) for part in whole):
            raise EvaluationError(
                f"{self.value} ({self.low} to {self.high}) is no estimate: it needs a "
                "finite value, and both ends of an interval or neither."
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise EvaluationError(
                f"the interval {self.low} to {self.high} is reversed."
            )

    def to_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave; EvaluationError for anything else."""
        try:
            value, low, high = (content[name] for name in ("value", "low", "high"))
            return cls(
                float(value),
                None if low is None else float(low),
                None if high is None else float(high),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"{content} is no estimate.") from error


#: Documents that an interval needs: of two, half of all draws are the one or the other
#: alone, and what lies between them is no measure of anything.
LEAST = 5


class Bootstrap:
    """Draws the documents of N predictions again and again, with replacement.

    Of a corpus of n documents each draw takes n − 1, and each of them counts n/(n − 1)
    times: with n of n the spread of a few documents comes out too small, by (n − 1)/n
    (McCarthy and Snowden, 1985). A corpus of one document is taken as it is. The draws
    depend on ``seed`` and the numbers of documents alone, not on the order of the
    predictions.

    Attributes:
        unit: (N,) the document of each prediction, counted over all corpora.
        units: documents in all.
        draws: how often they are drawn.
    """

    def __init__(
        self,
        documents: np.ndarray,
        strata: np.ndarray,
        draws: int = DRAWS,
        seed: int = SEED,
    ):
        """``documents`` and ``strata``, the corpora: (N,) numbers, of each prediction.

        Documents of one number in two corpora are two. Raises EvaluationError for no
        predictions or draws, or arrays of other shapes.
        """
        documents, strata = np.asarray(documents), np.asarray(strata)
        if documents.ndim != 1 or documents.shape != strata.shape or not documents.size:
            raise EvaluationError(
                f"documents of shape {documents.shape} and corpora of {strata.shape} "
                "cannot be drawn; both are (N,) of at least one prediction."
            )
        if draws < 1:
            raise EvaluationError(f"draws is {draws}; draw at least once.")
        self.draws, self.seed = draws, seed
        _, document = np.unique(documents, return_inverse=True)
        _, stratum = np.unique(strata, return_inverse=True)
        # Sorted by corpus, then document.
        pairs, self.unit = np.unique(
            stratum.astype(np.int64) * (int(document.max()) + 1) + document,
            return_inverse=True,
        )
        self.units = len(pairs)
        owners = pairs // (int(document.max()) + 1)
        ends = np.flatnonzero(np.diff(owners)) + 1
        bounds = [0, *ends.tolist(), self.units]
        self._strata = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]

    def totals(
        self, values: np.ndarray | None, which: np.ndarray | None = None
    ) -> np.ndarray:
        """Sum of ``values`` (N,), or of ones, over the predictions of each document.

        ``which`` (N,) are the ones that count. Gives (units,) float64.
        """
        unit = self.unit if which is None else self.unit[which]
        if values is not None:
            values = (values if which is None else values[which]).astype(np.float64)
        return np.bincount(unit, values, self.units).astype(np.float64)

    def drawn(self, totals: np.ndarray) -> np.ndarray:
        """Sums over the documents of each draw: totals (units, M) → (draws, M)."""
        result = np.zeros((self.draws, totals.shape[1]))
        for number, part in enumerate(self._strata):
            mine = totals[part]
            columns = np.flatnonzero(mine.any(axis=0))
            if not len(columns):
                continue
            mine = mine[:, columns]
            for rows, weights in self._weights(number, len(mine)):
                result[rows, columns] += weights @ mine
        return result

    def sums(
        self, values: np.ndarray | None, which: np.ndarray | None = None
    ) -> np.ndarray:
        """Sum of ``values`` over ``which`` in each draw, (draws,); see :meth:`totals`."""
        return self.drawn(self.totals(values, which)[:, None])[:, 0]

    def mean(
        self,
        values: np.ndarray,
        which: np.ndarray | None = None,
        level: float = LEVEL,
    ) -> Estimate:
        """The mean of ``values`` (N,) over ``which``, with an interval.

        Raises EvaluationError if ``which`` are none.
        """
        totals = np.stack([self.totals(values, which), self.totals(None, which)], 1)
        return self.ratio(totals, level)

    def ratio(self, totals: np.ndarray, level: float = LEVEL) -> Estimate:
        """The ratio of two sums: totals (units, 2), numerator first."""
        above, below = totals.sum(axis=0)
        if not below:
            raise EvaluationError("a mean of no predictions.")
        if not self.varies(totals[:, 1]):
            return Estimate(float(above / below))
        return interval(above / below, ratios(*self.drawn(totals).T), level)

    def varies(self, totals: np.ndarray) -> bool:
        """Whether draws tell how sure a mean over documents of ``totals`` (units,) is.

        They do not if fewer than :data:`LEAST` documents have part in it, or one that
        is all of its corpus: no draw could be without it.
        """
        present = totals != 0
        alone = any(
            part.stop - part.start == 1 and present[part].any() for part in self._strata
        )
        return int(present.sum()) >= LEAST and not alone

    def _weights(self, stratum: int, count: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Which draws, and how often each of ``count`` documents counts, (·, count)."""
        if count == 1:
            yield slice(0, self.draws), np.ones((self.draws, 1))
            return
        random = np.random.default_rng([self.seed, stratum])
        step = max(1, _AT_ONCE // count)
        for start in range(0, self.draws, step):
            rows = min(step, self.draws - start)
            picks = random.integers(0, count, (rows, count - 1))
            picks += np.arange(rows)[:, None] * count
            times = np.bincount(picks.reshape(-1), minlength=rows * count)
            weights = times.reshape(rows, count) * (count / (count - 1))
            yield slice(start, start + rows), weights


def ratios(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """``above / below``; NaN where a draw holds nothing of what is asked for."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def interval(value: float, drawn: np.ndarray, level: float = LEVEL) -> Estimate:
    """``value`` with the middle ``level`` of ``drawn`` (draws,).

    Draws that are NaN tell nothing and are left out.
    """
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return Estimate(float(value))
    outside = (1 - level) / 2
    low, high = np.quantile(drawn, [outside, 1 - outside])
    return Estimate(float(value), float(low), float(high))
