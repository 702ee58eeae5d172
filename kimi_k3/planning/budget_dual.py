"""Lower bounds: the limits become prices, and each item then decides for itself.

For prices y ≥ 0 of the resources, min Σ cost + y·use − y·limits is below every cost that
can be reached (Lagrangian relaxation). The best prices are found by tangents: each
evaluation of the items gives a plane above the concave function that is to be maximised,
and the next prices are where the planes found so far are highest (Kelley's method).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .budget_problem import LARGE, OFF, SMALL, Problem

#: (row, item) → the states that it may have, as flags of off, small, large.
Restrictions = dict[tuple[int, int], tuple[bool, bool, bool]]


@dataclass(frozen=True, eq=False)
class Cut:
    """Items in the states that were best at some prices: cost, and use (K,)."""

    cost: float
    use: np.ndarray
    states: np.ndarray


@dataclass(frozen=True, eq=False)
class Corner:
    """One of the selections whose average, by ``weight``, meets the best prices."""

    weight: float
    cut: Cut
    picked: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Bound:
    """The best prices, and what they prove.

    Attributes:
        value: no selection costs less; infinite: none keeps to the limits.
        prices: (K,).
        corners: selections that are best at these prices.
    """

    value: float
    prices: np.ndarray
    corners: tuple[Corner, ...]


@dataclass(eq=False)
class Items:
    """Evaluates the items of a problem at prices, and counts how often."""

    problem: Problem
    evaluations: int = 0

    def __post_init__(self) -> None:
        cost = self.problem.cost
        self._gain = cost[1:] - cost[0]
        self._off = float(cost[0].sum())
        self._use = np.ascontiguousarray(self.problem.use)

    def best(self, prices: np.ndarray, limits: Restrictions) -> Cut | None:
        """The states that are cheapest at ``prices``; None if no states are allowed."""
        self.evaluations += 1
        problem = self.problem
        priced = self._gain  # (2, R, N)
        # One resource after the other: the order of a matrix product is not fixed.
        for price, use in zip(prices, self._use, strict=True):
            priced = priced + price * use
        must = np.zeros(problem.shape, bool)
        for (row, item), (off, small, large) in limits.items():
            priced[0, row, item] += 0 if small else np.inf
            priced[1, row, item] += 0 if large else np.inf
            must[row, item] = not off
        kept = np.minimum(priced[0], priced[1])
        on = (kept < 0) | must
        short = np.flatnonzero(on.sum(axis=1) < problem.least)
        for row in short:
            order = np.where(on[row], -np.inf, kept[row])
            on[row, np.argsort(order, kind="stable")[: problem.least]] = True
        if not np.isfinite(kept[on]).all():
            return None
        states = np.where(on, np.where(priced[1] < priced[0], LARGE, SMALL), OFF)
        states = states.astype(np.int8)
        taken = np.stack([states == SMALL, states == LARGE])
        cost = self._off + (self._gain * taken).sum()
        used = [float((use * taken).sum()) for use in self._use]
        return Cut(float(cost), np.array(used), states)


@dataclass(eq=False)
class Choices:
    """The large choices as arrays, padded with options of infinite cost."""

    problem: Problem

    def __post_init__(self) -> None:
        choices = self.problem.choices
        widest = max((len(options) for options in choices), default=1)
        self.cost = np.full((len(choices), widest), np.inf)
        self.use = np.zeros((len(choices), widest, len(self.problem.limits)))
        for at, options in enumerate(choices):
            for option, content in enumerate(options):
                self.cost[at, option] = content.cost
                self.use[at, option] = content.use
        self.rows = np.arange(len(choices))


#: One evaluation of a concave function: value, slope, and what it was reached by.
_Tangent = tuple[float, float, Any]
_Top = tuple[float, float, list[tuple[float, Any]]]
_MOST_STEPS = 200

#: No price is above its sensible size by more. What is reached there is a bound all the
#: same; it is beyond every cost if nothing keeps to the limits.
_DEAREST = 8.0**8


def _climb(evaluate: Callable[[float], _Tangent], start: float) -> _Top:
    """Maximise a concave, piecewise linear function over 0 ≤ x ≤ start × _DEAREST.

    Returns the maximum, where it is, and what it is reached by, weighted so that the
    slopes cancel (or, at an end, all of it).
    """
    low, x_low = evaluate(0.0), 0.0
    if low[1] <= 0:
        return low[0], 0.0, [(1.0, low[2])]
    x_high = start
    high = evaluate(x_high)
    while high[1] > 0 and x_high < start * _DEAREST:
        low, x_low, x_high = high, x_high, x_high * 8
        high = evaluate(x_high)
    for _ in range(_MOST_STEPS):
        if high[1] >= 0:
            return high[0], x_high, [(1.0, high[2])]
        rise = high[0] - high[1] * x_high - low[0] + low[1] * x_low
        x = rise / (low[1] - high[1])
        if not x_low < x < x_high:
            break
        meeting = low[0] + low[1] * (x - x_low)
        found = evaluate(x)
        if found[0] >= meeting - 1e-13 * abs(meeting):
            return _meet(found[0], x, low, high)
        if found[1] > 0:
            low, x_low = found, x
        else:
            high, x_high = found, x
    value, x = max((low[0], x_low), (high[0], x_high))
    return _meet(value, x, low, high)


def _meet(value: float, x: float, low: _Tangent, high: _Tangent) -> _Top:
    weight = -high[1] / (low[1] - high[1])
    return value, x, [(weight, low[2]), (1 - weight, high[2])]


class Master:
    """The upper envelope of the tangents known so far, and its highest point."""

    def __init__(self, choices: Choices, allowed: np.ndarray, cuts: list[Cut]) -> None:
        self.choices, self.cuts = choices, cuts
        self.limits = np.array(choices.problem.limits)
        self.cost = np.where(allowed, choices.cost, np.inf)
        self.cut_cost = np.array([cut.cost for cut in cuts])
        self.cut_use = np.array([cut.use for cut in cuts])

    def highest(
        self, start: np.ndarray
    ) -> tuple[float, np.ndarray, tuple[Corner, ...]]:
        """Value and prices there, and the corners that meet."""
        if len(self.limits) == 1:
            return self._along_first(0.0, start)

        def at_second(price: float) -> _Tangent:
            value, prices, corners = self._along_first(price, start)
            slope = sum(c.weight * self._slope(c)[1] for c in corners)
            return value, float(slope), (prices, corners)

        value, second, parts = _climb(at_second, float(start[1]))
        corners = tuple(
            Corner(weight * corner.weight, corner.cut, corner.picked)
            for weight, (_, inside) in parts
            for corner in inside
            if weight * corner.weight > 0
        )
        return value, self._along_first(second, start)[1], corners

    def value(self, prices: np.ndarray) -> float:
        """Of the envelope of the choices alone, less the price of the limits."""
        priced = self.cost + self.choices.use @ prices
        return float(priced.min(axis=1).sum() - prices @ self.limits)

    def _along_first(
        self, second: float, start: np.ndarray
    ) -> tuple[float, np.ndarray, tuple[Corner, ...]]:
        """The same with the price of the second resource fixed, if there is one."""
        K = len(self.limits)
        cost, use = self.cost, self.choices.use
        cut_cost, cut_use = self.cut_cost, self.cut_use[:, 0]
        base = 0.0
        if K == 2:
            cost = cost + second * use[..., 1]
            cut_cost = cut_cost + second * self.cut_use[:, 1]
            base = -second * self.limits[1]
        first, rows, limit = use[..., 0], self.choices.rows, self.limits[0]

        def at_first(price: float) -> _Tangent:
            lines = cut_cost + price * cut_use
            j = int(lines.argmin())
            options = cost + price * first
            picked = options.argmin(axis=1)
            value = lines[j] + options[rows, picked].sum() + base - price * limit
            slope = cut_use[j] + first[rows, picked].sum() - limit
            return float(value), float(slope), (j, picked)

        value, price, parts = _climb(at_first, float(start[0]))
        corners = tuple(
            Corner(weight, self.cuts[j], tuple(picked.tolist()))
            for weight, (j, picked) in parts
            if weight > 0
        )
        return value, np.array([price, second][:K]), corners

    def _slope(self, corner: Corner) -> np.ndarray:
        use = self.choices.use[self.choices.rows, list(corner.picked)].sum(axis=0)
        return corner.cut.use + use - self.limits


def best_bound(
    items: Items,
    choices: Choices,
    allowed: np.ndarray,
    restrictions: Restrictions,
    cuts: list[Cut],
    start: np.ndarray,
    tolerance: float,
    most: int = 100,
) -> Bound:
    """The highest bound for the options ``allowed`` and the states that items may have.

    Args:
        allowed: (C, W) bool.
        cuts: known tangents of the same restrictions; new ones are added.
        start: (K,) prices of a sensible size.
        tolerance: relative, how close to the highest.
        most: evaluations at most; the bound is one wherever it stops.
    """
    nothing = Bound(float("inf"), start, ())
    if not cuts:
        first = items.best(np.zeros_like(start), restrictions)
        if first is None:
            return nothing
        cuts.append(first)
    best, at, corners = float("-inf"), start, ()
    for _ in range(most):
        master = Master(choices, allowed, cuts)
        value, prices, corners = master.highest(start)
        cut = items.best(prices, restrictions)
        assert cut is not None
        reached = cut.cost + float(cut.use @ prices) + master.value(prices)
        if reached > best:
            best, at = reached, prices
        cuts.append(cut)
        if value - best <= tolerance * abs(value):
            break
    return Bound(best, at, corners)
