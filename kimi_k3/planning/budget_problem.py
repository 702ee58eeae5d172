"""The choice that a budget leaves, as numbers alone: small items and large ones.

Items stand in rows. Each is off (0), small (1) or large (2); off uses nothing. Every row
has at least ``least`` items that are not off. Beside them are a few large choices, each
with options of its own. Everything costs, everything uses one or two limited resources,
and the costs are to be as low as they can be.
"""

from dataclasses import dataclass

import numpy as np

#: States of an item; of an expert: dropped, in the low bank, in the high one.
OFF, SMALL, LARGE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Option:
    """One option of a large choice: its cost, 0 or more, and what it uses, (K,)."""

    cost: float
    use: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """Minimise costs within limits.

    Attributes:
        cost: (3, R, N) float64, of each state of each item; 0 or more.
        use: (K, 2, R, N) float64 (or what broadcasts to it), of small and of large.
        choices: the options of each large choice.
        least: items of every row that are not off.
        limits: (K,) of each resource, K = 1 or 2.
    """

    cost: np.ndarray
    use: np.ndarray
    choices: tuple[tuple[Option, ...], ...]
    least: int
    limits: tuple[float, ...]

    def __post_init__(self) -> None:
        states, rows, items = self.cost.shape
        wanted = (len(self.limits), 2, rows, items)
        if states != 3 or not 1 <= len(self.limits) <= 2:
            raise ValueError(f"{states} states and {len(self.limits)} limits")
        object.__setattr__(self, "use", np.broadcast_to(self.use, wanted))
        if not 0 <= self.least <= items:
            raise ValueError(f"{self.least} of {items} items cannot be kept")
        if not (np.isfinite(self.cost).all() and np.isfinite(self.use).all()):
            raise ValueError("a cost or a use is not finite")
        costs = [option.cost for choice in self.choices for option in choice]
        if (self.cost < 0).any() or min(costs, default=0) < 0:
            raise ValueError("a cost is below 0")

    @property
    def shape(self) -> tuple[int, int]:
        """(R, N)."""
        return self.cost.shape[1], self.cost.shape[2]

    def used(self, states: np.ndarray, picked: tuple[int, ...]) -> np.ndarray:
        """(K,) that items in ``states`` (R, N) and the options ``picked`` use."""
        total = [
            float(small[states == SMALL].sum() + large[states == LARGE].sum())
            for small, large in self.use
        ]
        options = [c[at].use for c, at in zip(self.choices, picked, strict=True)]
        return np.array(total) + np.array(options).reshape(-1, len(total)).sum(axis=0)

    def costs(self, states: np.ndarray, picked: tuple[int, ...]) -> float:
        """What they cost."""
        items = np.take_along_axis(self.cost, states[None].astype(np.intp), axis=0)
        return float(items.sum()) + sum(
            c[at].cost for c, at in zip(self.choices, picked, strict=True)
        )

    def fits(self, states: np.ndarray, picked: tuple[int, ...]) -> bool:
        """Whether they keep to every limit and to ``least``."""
        kept = (states != OFF).sum(axis=1).min(initial=self.least)
        within = self.used(states, picked) <= np.array(self.limits)
        return bool(within.all() and kept >= self.least)


@dataclass(frozen=True, eq=False)
class Solution:
    """The best choice that was found, and how good any can be.

    Attributes:
        states: (R, N) int8. picked: option of each large choice.
        cost: of both.
        bound: no choice that keeps to the limits costs less.
        prices: (K,) of each resource, about what one unit more of it would save.
        nodes: parts into which the search was split.
        evaluations: how often all items were gone through.
    """

    states: np.ndarray
    picked: tuple[int, ...]
    cost: float
    bound: float
    prices: np.ndarray
    nodes: int
    evaluations: int

    @property
    def gap(self) -> float:
        """(cost − bound) / cost; 0 for a proven optimum, up to rounding."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0
