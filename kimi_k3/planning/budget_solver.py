"""Solves a :class:`~.budget_problem.Problem`: branch and bound over its large choices.

The items are many and small, so prices alone settle them to within one item; the large
choices are not, so the search splits on them (and then on items, where that is what the
bound lacks). Nothing depends on chance or on time: the same problem gives the same
answer.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from .budget_dual import Bound, Choices, Corner, Cut, Items, Restrictions, best_bound
from .budget_fill import Selection
from .budget_problem import Problem, Solution

#: Relative: a bound this close to the best found is not split further.
TOLERANCE = 1e-4

#: With more, the search does not split on items: one is too little to matter.
FEW_ITEMS = 4096


@dataclass(order=True)
class _Node:
    """A part of the search: what is still allowed, and what it can cost at least."""

    value: float
    number: int
    allowed: np.ndarray = field(compare=False)
    restrictions: Restrictions = field(compare=False)
    cuts: list[Cut] = field(compare=False)
    bound: Bound = field(compare=False)


def solve(
    problem: Problem, *, tolerance: float = TOLERANCE, nodes: int = 200
) -> Solution | None:
    """The selection of least cost, to ``tolerance`` or as far as ``nodes`` reach.

    Returns None if no selection was found that keeps to the limits.
    """
    return _Search(problem, tolerance, nodes).run()


class _Search:
    def __init__(self, problem: Problem, tolerance: float, nodes: int) -> None:
        self.problem, self.tolerance, self.nodes = problem, tolerance, nodes
        self.items, self.choices = Items(problem), Choices(problem)
        self.best: tuple[float, np.ndarray, tuple[int, ...]] | None = None
        self.small = problem.cost[0].size <= FEW_ITEMS
        self.made = 0
        self.tried: set[tuple[int, ...]] = set()
        self.closed = math.inf  # the least bound of what is not split further
        dearest = problem.cost.max(axis=0).sum()
        dearest += sum(max(o.cost for o in c) for c in problem.choices)
        self.dearest = float(dearest)
        limits = np.array(problem.limits, np.float64)
        self.prices = np.zeros_like(limits)  # of the whole, before any split
        self.start = max(self.dearest, 1e-300) / np.maximum(limits, 1.0)

    def run(self) -> Solution | None:
        everything = np.isfinite(self.choices.cost)
        queue: list[_Node] = []
        self._add(queue, -math.inf, everything, {}, [], self.start)
        while queue and self.made < self.nodes and self._worth(queue[0].value):
            node = heapq.heappop(queue)
            self._split(queue, node)
        if self.best is None:
            return None
        bound = min([self.closed, self.best[0], *(node.value for node in queue)])
        cost, states, picked = self.best
        # Rounding of sums of this many terms must not lift the bound above the truth.
        bound -= 1e-13 * self.dearest
        evaluations = self.items.evaluations
        return Solution(
            states,
            picked,
            cost,
            max(bound, 0.0),
            self.prices,
            self.made,
            evaluations,
        )

    def _worth(self, value: float) -> bool:
        """Whether a part with this bound can hold something better."""
        if self.best is None:
            return value < math.inf
        return value < self.best[0] - self.tolerance * abs(self.best[0])

    def _add(
        self,
        queue: list[_Node],
        floor: float,
        allowed: np.ndarray,
        restrictions: Restrictions,
        cuts: list[Cut],
        prices: np.ndarray,
    ) -> None:
        if not allowed.any(axis=1).all():
            return
        self.made += 1
        bound = self._bound(allowed, restrictions, cuts, prices)
        if self.made == 1:
            self.prices = bound.prices
        if bound.value > self.dearest * (1 + 1e-9):
            return
        self._try(bound, cuts, restrictions)
        value = max(floor, bound.value)
        if self._worth(value):
            node = _Node(value, self.made, allowed, restrictions, cuts, bound)
            heapq.heappush(queue, node)
        else:
            self.closed = min(self.closed, value)

    def _try(
        self, node_bound: Bound, cuts: list[Cut], restrictions: Restrictions
    ) -> None:
        """Make a selection: the choices of the heaviest corner, then the items anew."""
        bound = node_bound
        corner = max(bound.corners, key=lambda c: c.weight)
        if self._undecided(bound.corners) is not None:
            allowed = np.zeros(self.choices.cost.shape, bool)
            allowed[self.choices.rows, list(corner.picked)] = True
            if (key := corner.picked) in self.tried:
                return
            self.tried.add(key)
            bound = self._bound(allowed, restrictions, cuts, bound.prices)
        ranked = sorted(bound.corners, key=lambda c: -c.weight)
        for corner in ranked if self.small else ranked[:1]:
            selection = Selection(self.problem, corner.cut.states, corner.picked)
            if not selection.bring_within():
                continue
            selection.fill(bound.prices)
            picked = tuple(selection.picked)
            cost = self.problem.costs(selection.states, picked)
            if self.best is not None and cost >= self.best[0]:
                continue
            if self.problem.fits(selection.states, picked):
                self.best = cost, selection.states, picked

    def _bound(
        self,
        allowed: np.ndarray,
        restrictions: Restrictions,
        cuts: list[Cut],
        prices: np.ndarray,
    ) -> Bound:
        start = np.where(prices > 0, prices, self.start)
        exact = min(self.tolerance / 10, 1e-7)
        return best_bound(
            self.items, self.choices, allowed, restrictions, cuts, start, exact
        )

    def _split(self, queue: list[_Node], node: _Node) -> None:
        prices = node.bound.prices
        if (choice := self._undecided(node.bound.corners)) is not None:
            at, border = choice
            lower = np.arange(node.allowed.shape[1]) <= border
            for side in (lower, ~lower):
                allowed = node.allowed.copy()
                allowed[at] &= side
                self._add(
                    queue, node.value, allowed, node.restrictions, node.cuts, prices
                )
        elif self.small and (item := self._torn(node)) is not None:
            where, border = item
            old = node.restrictions.get(where, (True, True, True))
            for side in (range(border + 1), range(border + 1, 3)):
                may = tuple(s in side and old[s] for s in range(3))
                if not any(may):
                    continue
                restrictions = {**node.restrictions, where: may}
                cuts = [cut for cut in node.cuts if may[cut.states[where]]]
                self._add(queue, node.value, node.allowed, restrictions, cuts, prices)
        else:
            self.closed = min(self.closed, node.value)

    def _undecided(self, corners: tuple[Corner, ...]) -> tuple[int, int] | None:
        """The choice of which corners take most different options, and between which."""
        most, found = 0.0, None
        for at in range(len(self.problem.choices)):
            taken = sorted({corner.picked[at] for corner in corners})
            spread = np.ptp([self.choices.cost[at, option] for option in taken])
            if len(taken) > 1 and (found is None or spread > most):
                most, found = float(spread), (at, taken[0])
        return found

    def _torn(self, node: _Node) -> tuple[tuple[int, int], int] | None:
        """The item whose states differ most in cost between corners, and where to split."""
        states = np.stack([corner.cut.states for corner in node.bound.corners])
        differ = (states != states[0]).any(axis=0)
        if not differ.any():
            return None
        costs = np.take_along_axis(self.problem.cost, states.astype(np.intp), axis=0)
        spread = np.where(differ, np.ptp(costs, axis=0), -1)
        row, item = np.unravel_index(int(spread.argmax()), spread.shape)
        return (int(row), int(item)), int(states[:, row, item].min())
