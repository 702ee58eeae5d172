"""The numerical part of the quantiser: scales and biases of many groups at once.

Alternates least squares and new codes from several starts, and keeps per group what is
best as it will be stored. Arrays are in units of their group, so that tiny and huge
weights are as good as any.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from ..kernels._common import compiled_on_gpu

#: Groups are worked on as multiples of a power of two, which is never below this one:
#: smaller weights have no scale in bfloat16.
_SMALLEST_UNIT = 2.0**-100

#: A scale of 0 has no nearest code; this one is below what float32 can tell from 0 here.
_LEAST_SCALE = 1e-12


@dataclass(frozen=True)
class _Effort:
    """How hard a fit is searched for.

    Attributes:
        ranges: starts, as shares of the range of the weights.
        deviations: starts, as scales in standard deviations.
        shifts: each of these starts is tried shifted by such parts of a step.
        kept: starts that go on.
        rounds: of least squares and new codes, for those.
        neighbours: bfloat16 scales that are tried on either side of the best: what
            rounding a scale costs grows with the largest code.
    """

    ranges: tuple[float, ...]
    deviations: tuple[float, ...]
    shifts: tuple[float, ...]
    kept: int
    rounds: int
    neighbours: int


_EFFORT = {
    2: _Effort((0.65, 0.9), (1.0,), (-0.4, -0.13, 0.13, 0.4), 2, 4, 0),
    3: _Effort((0.65, 0.75, 0.85, 0.95), (), (-0.4, -0.13, 0.13, 0.4), 2, 3, 0),
    4: _Effort((0.75, 0.85, 0.95, 1.05), (), (-0.3, 0.0, 0.3), 2, 4, 0),
    5: _Effort((0.85, 0.92, 1.0), (), (-0.3, 0.0, 0.3), 2, 3, 1),
    6: _Effort((0.9, 1.0), (), (-0.25, 0.25), 2, 3, 3),
    8: _Effort((1.0,), (), (-0.25, 0.25), 2, 2, 3),
}


@dataclass(frozen=True)
class Groups:
    """Weights of some rows, (R, G, g) float32, each group divided by its ``unit``.

    Attributes:
        unit: a power of two, (R, G, 1), so that the largest magnitude is in [1, 2).
        importance: (R, G, g), at most 1; None: all alike.
        total: Σ importance, (R, G, 1).
        bits: of a code.
    """

    values: mx.array
    unit: mx.array
    importance: mx.array | None
    total: mx.array
    bits: int

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def arrays(self) -> tuple[mx.array, mx.array | None, mx.array]:
        """Values, importance and total."""
        return self.values, self.importance, self.total


@dataclass(frozen=True)
class Fit:
    """Scale and bias of each group, in units, and the error that they leave; (R, G, 1)."""

    scale: mx.array
    bias: mx.array
    error: mx.array

    def sorted_with(self, other: "Fit") -> "tuple[Fit, Fit]":
        """Of each group the better and the worse of both; equal ones stay in order."""
        # A NaN is never smaller.
        swap = other.error < self.error
        pairs = list(zip(self.arrays, other.arrays, strict=True))
        better = Fit(*(mx.where(swap, theirs, mine) for mine, theirs in pairs))
        worse = Fit(*(mx.where(swap, mine, theirs) for mine, theirs in pairs))
        return better, worse

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Scale, bias and error."""
        return self.scale, self.bias, self.error


def best_fit(rows: mx.array, groups: Groups) -> Fit:
    """The best of all that is tried: as good as ``mx.quantize`` of ``rows`` or better.

    Args:
        rows: what ``groups`` was made of, (R, in).
    """
    best: Fit | None = None
    for fit in (*_their_fits(rows, groups), *_our_fits(groups)):
        best = fit if best is None else best.sorted_with(fit)[0]
        mx.eval(best.arrays)
    assert best is not None
    return best


def groups_of(
    rows: mx.array, bits: int, group_size: int, importance: mx.array | None
) -> Groups:
    """Rows (R, in) as groups; ``importance`` is (in,) float32, 0 or more."""
    values = rows.astype(mx.float32).reshape(rows.shape[0], -1, group_size)
    largest = mx.abs(values).max(axis=-1, keepdims=True)
    unit = mx.maximum(_power_of_two(largest), _SMALLEST_UNIT)
    values = values / unit
    total = mx.full(unit.shape, group_size, mx.float32)
    weights = None
    if importance is not None:
        weights = importance.reshape(1, -1, group_size)
        most = weights.max(axis=-1, keepdims=True)
        weights = mx.where(most > 0, weights / mx.where(most > 0, most, 1), 1)
        # A copy: MLX's CPU ops are slow on arrays whose first axis is repeated.
        weights = mx.contiguous(mx.broadcast_to(weights, values.shape))
        total = weights.sum(axis=-1, keepdims=True)
    groups = Groups(values, unit, weights, total, bits)
    mx.eval(values, unit, weights, total)
    return groups


def _their_fits(rows: mx.array, groups: Groups) -> Iterator[Fit]:
    """What ``mx.quantize`` finds, in bfloat16 as models are and in the given type."""
    for dtype in dict.fromkeys((mx.bfloat16, rows.dtype)):
        _, scales, biases = mx.quantize(
            rows.astype(dtype), group_size=groups.values.shape[-1], bits=groups.bits
        )
        scale, bias = (
            x[..., None].astype(mx.float32) / groups.unit for x in (scales, biases)
        )
        yield _stored_fit(groups, scale, bias)


def _our_fits(groups: Groups) -> Iterator[Fit]:
    """The best of all starts, alternated and rounded."""
    effort = _EFFORT[groups.bits]
    best: list[Fit] = []
    for scale, bias in _starts(groups, effort):
        fit = Fit(scale, bias, _error(*groups.arrays, scale, bias, groups.top))
        for at, kept in enumerate(best):
            best[at], fit = kept.sorted_with(fit)
        best = [*best, fit][: effort.kept]
        mx.eval([kept.arrays for kept in best])
    for fit in best:
        scale, bias = fit.scale, fit.bias
        for _ in range(effort.rounds):
            scale, bias = _refit(*groups.arrays, scale, bias, groups.top)
            mx.eval(scale, bias)
        for steps in range(-effort.neighbours, effort.neighbours + 1):
            near = _bfloat16_neighbour(scale, steps)
            # The scale turns about the middle of the codes.
            moved = bias + (scale - near) * (groups.top / 2)
            moved = _refit_bias(*groups.arrays, near, moved, groups.top)
            yield _stored_fit(groups, near, moved)


def _starts(groups: Groups, effort: "_Effort") -> Iterator[tuple[mx.array, mx.array]]:
    """Scales and biases, (R, G, 1), that the codes of a group may end up near.

    The range of the weights, shrunk, or a multiple of their deviation; each about the
    middle of the weights and shifted by part of a step.
    """
    values, importance, total = groups.arrays
    low = values.min(axis=-1, keepdims=True)
    high = values.max(axis=-1, keepdims=True)
    mean = _weigh(values, importance).sum(axis=-1, keepdims=True) / total
    square = mx.square(values - mean)
    square = _weigh(square, importance).sum(axis=-1, keepdims=True) / total
    deviation = mx.sqrt(square)
    bases = [
        (share * (high - low) / groups.top, mean + share * ((low + high) / 2 - mean))
        for share in effort.ranges
    ]
    bases += [(count * deviation, mean) for count in effort.deviations]
    for scale, middle in bases:
        scale = mx.maximum(scale, _LEAST_SCALE)
        for shift in effort.shifts:
            yield scale, middle + (shift - groups.top / 2) * scale


def _stored_fit(groups: Groups, scale: mx.array, bias: mx.array) -> Fit:
    """The fit as it is stored, with the error that is left then."""
    scale, bias = (
        to_bfloat16(x, groups.unit).astype(mx.float32) / groups.unit
        for x in (scale, bias)
    )
    error = _error(*groups.arrays, scale, bias, groups.top)
    return Fit(scale, bias, mx.where(mx.isnan(error), float("inf"), error))


def to_bfloat16(x: mx.array, unit: mx.array) -> mx.array:
    return (x * unit).astype(mx.bfloat16)


def _power_of_two(x: mx.array) -> mx.array:
    """The largest power of two that is not above ``x``, exactly; 0 for 0."""
    return mx.view(mx.view(x, mx.uint32) & 0x7F800000, mx.float32)


def _bfloat16_neighbour(x: mx.array, steps: int) -> mx.array:
    """The bfloat16 value so many ``steps`` farther from 0 than the nearest one."""
    bits = mx.view(x.astype(mx.bfloat16), mx.int16) + mx.array(steps, mx.int16)
    return mx.view(bits, mx.bfloat16).astype(mx.float32)


def _weigh(x: mx.array, importance: mx.array | None) -> mx.array:
    return x if importance is None else x * importance


def nearest(
    values: mx.array, scale: mx.array, bias: mx.array, top: int
) -> tuple[mx.array, mx.array]:
    """The nearest codes, as float32, and what they leave of the values."""
    usable = mx.abs(scale) >= _LEAST_SCALE
    inverse = mx.where(usable, 1 / mx.where(usable, scale, 1), 0)
    above = values - bias
    codes = mx.clip(mx.round(above * inverse), 0, top)
    return codes, above - codes * scale


@compiled_on_gpu
def _error(
    values: mx.array,
    importance: mx.array | None,
    total: mx.array,
    scale: mx.array,
    bias: mx.array,
    top: int,
) -> mx.array:
    """Σ h·(w - s·q - b)² of each group with the nearest codes, (R, G, 1)."""
    _, left = nearest(values, scale, bias, top)
    return _weigh(mx.square(left), importance).sum(axis=-1, keepdims=True)


@compiled_on_gpu
def _refit(
    values: mx.array,
    importance: mx.array | None,
    total: mx.array,
    scale: mx.array,
    bias: mx.array,
    top: int,
) -> tuple[mx.array, mx.array]:
    """The best scale and bias for the codes that are nearest now.

    A line is fitted to what is left of the values, which keeps sums small.
    """
    codes, left = nearest(values, scale, bias, top)
    weighted = _weigh(codes, importance)
    first = weighted.sum(axis=-1, keepdims=True)
    second = (weighted * codes).sum(axis=-1, keepdims=True)
    slope = (weighted * left).sum(axis=-1, keepdims=True)
    level = _weigh(left, importance).sum(axis=-1, keepdims=True)
    spread = total * second - mx.square(first)
    # One code for the whole group says nothing of the scale.
    known = spread > 1e-5 * total * second
    change = (total * slope - first * level) / mx.where(known, spread, 1)
    change = mx.where(known, change, 0)
    return scale + change, bias + (level - change * first) / total


@compiled_on_gpu
def _refit_bias(
    values: mx.array,
    importance: mx.array | None,
    total: mx.array,
    scale: mx.array,
    bias: mx.array,
    top: int,
) -> mx.array:
    """The best bias for the codes that are nearest now."""
    _, left = nearest(values, scale, bias, top)
    return bias + _weigh(left, importance).sum(axis=-1, keepdims=True) / total
