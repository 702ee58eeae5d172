"""How wrong a quantised matrix is, and whether its format explains that.

The yardstick is ``mx.quantize`` on the same matrix in the same format. A matrix made of
another one is wrong by about twice its own square, six times what the narrowest format
makes of it and more.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..checkpoint.stored_format import StoredFormat

#: In squared error, how many times that of ``mx.quantize`` is explained: errors that were
#: weighed with what a matrix reads are larger where they matter less.
ALLOWED = 3.0

#: Of a group's own square; what rounding of the sums comes to.
_ROUNDING = 1e-6

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
    found: mx.array, dense: mx.array, stored: StoredFormat, *, weighed: bool
) -> QuantisedError:
    """The error of ``found``, what a build's matrix stands for, to ``dense``.

    Args:
        found: (..., out, in), float32.
        dense: the source's values, of the same shape.
        stored: the format that the build has it in.
        weighed: whether groups may be worse than ``mx.quantize`` makes them, because
            errors were weighed. If not, each group is looked at by itself.
    """
    mine = _by_group(mx.square(found - dense.astype(mx.float32)), stored)
    usual = _by_group(mx.square(_requantised(dense, stored) - dense), stored)
    square = _by_group(mx.square(dense.astype(mx.float32)), stored)
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


def _requantised(dense: mx.array, stored: StoredFormat) -> mx.array:
    """``dense`` through ``mx.quantize`` with the scales of a build, bfloat16."""
    codes, scales, biases = mx.quantize(dense.astype(mx.bfloat16), **stored.parameters)
    return stored.dequantize(codes, scales, biases)


def _by_group(values: mx.array, stored: StoredFormat) -> np.ndarray:
    sums = values.reshape(-1, stored.group_size).sum(axis=-1)
    return np.array(sums, np.float64)
