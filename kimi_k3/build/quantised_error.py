"""How wrong a quantised matrix is, and whether its format explains that.

The yardstick is ``mx.quantize`` on the same matrix in the same format. A matrix made of
another one is wrong by about twice its own square, six times what the narrowest format
makes of it and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..checkpoint.stored_format import StoredFormat

#: In squared error, how many times that of ``mx.quantize`` is explained: errors that were
#: weighed with what a matrix reads are larger where they matter less.
ALLOWED = 3.0

#: Of a group's own square; what rounding of the sums comes to.
_ROUNDING = 1e-6

#: Values of a matrix that are dense at a time.
_VALUES = 1 << 24

#: Up to this share of wrong groups a matrix is damaged; above, it is another matrix.
_DAMAGED = 0.5


@dataclass(frozen=True)
class QuantisedError:
    """One matrix against the dense one that it stands for.

    Attributes:
        error: Σ(difference²).
        square: Σ(dense²).
        fault: what its format does not explain, in words; None if there is nothing.
    """

    error: float
    square: float
    fault: str | None = None

    @property
    def relative(self) -> float:
        return self.error / self.square if self.square else self.error


def quantised_error(
    packed: Sequence[mx.array], dense: mx.array, stored: StoredFormat, *, weighed: bool
) -> QuantisedError:
    """The error of ``packed``, a matrix of a build, to the source's ``dense``.

    A part of the rows is made dense at a time, whatever the size of the matrix.

    Args:
        packed: codes, scales and biases of ``stored``, each (..., out, ·).
        dense: (..., out, in).
        weighed: whether groups may be worse than ``mx.quantize`` makes them, because
            errors were weighed. If not, each group is looked at by itself.
    """
    columns = dense.shape[-1]
    codes, scales, biases = (part.reshape(-1, part.shape[-1]) for part in packed)
    dense = dense.reshape(-1, columns)
    step = max(1, _VALUES // columns)
    sums = [
        _group_sums(codes[rows], scales[rows], biases[rows], dense[rows], stored)
        for rows in (slice(at, at + step) for at in range(0, dense.shape[0], step))
    ]
    mine, usual, square = np.concatenate(sums, axis=1)
    error, total = float(mine.sum()), float(square.sum())
    result = QuantisedError(error, total)
    bad = ~(mine <= ALLOWED * usual + _ROUNDING * square)
    if not weighed and bad.any() and bad.mean() < _DAMAGED:
        return replace(
            result,
            fault=f"{int(bad.sum()):,} of {bad.size:,} groups more than {ALLOWED:g} "
            "times as wrong as mx.quantize makes them",
        )
    if not error <= ALLOWED * usual.sum() + _ROUNDING * total:
        return replace(
            result,
            fault=f"a relative squared error of {result.relative:.3g}, more than "
            f"{ALLOWED:g} times that of mx.quantize",
        )
    return result


def _group_sums(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    dense: mx.array,
    stored: StoredFormat,
) -> np.ndarray:
    """Squares in each group, (3, groups): error, that of ``mx.quantize``, the values."""
    again = mx.quantize(dense.astype(mx.bfloat16), **stored.parameters)
    dense = dense.astype(mx.float32)
    squares = (
        mx.square(stored.dequantize(codes, scales, biases) - dense),
        mx.square(stored.dequantize(*again) - dense),
        mx.square(dense),
    )
    sums = [part.reshape(-1, stored.group_size).sum(axis=-1) for part in squares]
    return np.array(mx.stack(sums), np.float64)
