"""How wrong a quantised matrix is, and whether its format explains that.

The yardstick is ``mx.quantize`` on the same matrix in the same format. A matrix made of
another one is wrong by about twice its own square, six times what the narrowest format
makes of it and more.

Where errors were weighed, a group may be far worse than that, but two things no weights
explain: every code is the nearest to its value that the group's scale and bias have, and
a group that is not zero has a scale that is not.
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

#: A code is as near as the nearest if it is within so much of it, in steps of the scale
#: and in parts of the values: two machines may round a tie in two ways.
_TIE_STEPS, _TIE_VALUES = 1e-2, 1e-5


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
    mine, usual, square, astray = np.concatenate(sums, axis=1)
    error, total = float(mine.sum()), float(square.sum())
    result = QuantisedError(error, total)
    whole = error <= ALLOWED * usual.sum() + _ROUNDING * total
    bad = ~(mine <= ALLOWED * usual + _ROUNDING * square) & (not weighed)
    impossible = astray != 0
    fault = None
    if bad.any() and (bad.mean() < _DAMAGED or whole):
        fault = (
            f"{_count(bad)} more than {ALLOWED:g} times as wrong as mx.quantize makes "
            "them"
        )
    elif not whole:
        fault = (
            f"a relative squared error of {result.relative:.3g}, more than {ALLOWED:g} "
            "times that of mx.quantize"
        )
    elif impossible.any():
        fault = (
            f"{_count(impossible)} with codes that are not the nearest to the source's "
            "values, or scales of zero"
        )
    return replace(result, fault=fault)


def _count(groups: np.ndarray) -> str:
    return f"{int(groups.sum()):,} of {groups.size:,} groups"


def _group_sums(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    dense: mx.array,
    stored: StoredFormat,
) -> np.ndarray:
    """Sums over each group, (4, groups).

    Squares of the error, of that of ``mx.quantize``, and of the values; then how many of
    its values no quantiser stores like this, whatever matters to it.
    """
    again = mx.quantize(dense.astype(mx.bfloat16), **stored.parameters)
    dense = dense.astype(mx.float32)
    found = stored.dequantize(codes, scales, biases)
    parts = (
        mx.square(found - dense),
        mx.square(stored.dequantize(*again) - dense),
        mx.square(dense),
        _astray(found, scales, biases, dense, stored),
    )
    sums = [part.reshape(-1, stored.group_size).sum(axis=-1) for part in parts]
    return np.array(mx.stack(sums), np.float64)


def _astray(
    found: mx.array,
    scales: mx.array,
    biases: mx.array,
    dense: mx.array,
    stored: StoredFormat,
) -> mx.array:
    """1 where a code is not the nearest, or no scale is stored for a value."""
    found, dense = (part.reshape(-1, stored.group_size) for part in (found, dense))
    scale, bias = (part.astype(mx.float32).reshape(-1, 1) for part in (scales, biases))
    steps = mx.where(scale == 0, 0, (dense - bias) / mx.where(scale == 0, 1, scale))
    nearest = mx.clip(mx.round(steps), 0, 2**stored.bits - 1)
    allowed = mx.abs(bias + nearest * scale - dense) + _TIE_STEPS * mx.abs(scale)
    allowed += _TIE_VALUES * (mx.abs(dense) + mx.abs(bias))
    # A NaN is never within it.
    near = mx.abs(found - dense) <= allowed
    # Below what has a square in float32, scales have none in bfloat16.
    nothing = (scale == 0) & (mx.square(dense) > 0)
    return (mx.logical_not(near) | nothing).astype(mx.float32)
