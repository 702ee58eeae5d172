"""From a selection that is nearly within its limits to a good one that is.

First the cheapest changes that bring it within, then the best that still fit.
"""

from dataclasses import dataclass

import numpy as np

from .budget_problem import LARGE, OFF, SMALL, Problem

_STATES = (OFF, SMALL, LARGE)
_MOST_PASSES = 20
_MOST_TRIED = 5_000


@dataclass(frozen=True, eq=False)
class _Changes:
    """Changes of single items: which item, to what, its loss, what it uses more (M, K)."""

    at: np.ndarray
    new: np.ndarray
    loss: np.ndarray
    use: np.ndarray

    def of(self, which: np.ndarray) -> "_Changes":
        """Those that a mask or indices say."""
        return _Changes(
            self.at[which], self.new[which], self.loss[which], self.use[which]
        )


class Selection:
    """States of the items that can be changed one by one, with what is left to spend.

    Args:
        states: (R, N). picked: option of each large choice.
    """

    def __init__(
        self, problem: Problem, states: np.ndarray, picked: tuple[int, ...]
    ) -> None:
        self.problem, self.states, self.picked = problem, states.copy(), list(picked)
        self.left = np.array(problem.limits) - problem.used(states, picked)
        self.kept = (states != OFF).sum(axis=1)
        K = len(problem.limits)
        nothing = np.zeros((K, 1, states.size))
        self._use = np.concatenate([nothing, problem.use.reshape(K, 2, -1)], axis=1)

    def bring_within(self) -> bool:
        """Change items until every limit is kept; whether few changes were enough."""
        scale = 1 / np.maximum(np.abs(self.problem.limits), 1.0)
        for _ in range(_MOST_PASSES):
            if (self.left >= 0).all():
                return True
            changes = self._changes()
            relief = np.minimum(-changes.use, np.maximum(-self.left, 0)) @ scale
            # What brings one resource within must not push the other out.
            helps = (relief > 0) & (changes.use <= np.maximum(self.left, 0)).all(axis=1)
            changes, relief = changes.of(helps), relief[helps]
            order = np.argsort(changes.loss / relief, kind="stable")
            if not self._apply(changes.of(order), until_within=True):
                return False
        return bool((self.left >= 0).all())

    def fill(self, prices: np.ndarray) -> None:
        """Spend what is left, where a cost falls most for the price of what it takes."""
        for _ in range(_MOST_PASSES):
            changes = self._changes()
            changes = changes.of(
                (changes.loss < 0) & (changes.use <= self.left).all(axis=1)
            )
            price = np.maximum(changes.use @ prices, 0)
            worth = np.full(price.shape, -np.inf)
            np.divide(changes.loss, price, out=worth, where=price > 0)
            order = np.argsort(worth, kind="stable")
            if not self._apply(changes.of(order), until_within=False):
                break
        self._fill_choices()

    def _fill_choices(self) -> None:
        for at, options in enumerate(self.problem.choices):
            now = options[self.picked[at]]
            for number, option in enumerate(options):
                more = np.array(option.use) - np.array(now.use)
                if option.cost < now.cost and (more <= self.left).all():
                    self.left = self.left - more
                    self.picked[at], now = number, option

    def _changes(self) -> _Changes:
        """Every change of one item."""
        problem, states = self.problem, self.states.ravel()
        cost = problem.cost.reshape(3, -1)
        items = np.arange(states.size)
        spare = np.repeat(self.kept > problem.least, problem.shape[1])
        found = []
        for new in _STATES:
            at = items[(states != new) & (spare if new == OFF else True)]
            old = states[at]
            use = self._use[:, new, at] - self._use[:, old, at]
            loss = cost[new, at] - cost[old, at]
            found.append((at, np.full(at.size, new), loss, use.T))
        return _Changes(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _apply(self, changes: _Changes, until_within: bool) -> int:
        """Make those changes, in order, that can be made; each item's first. How many."""
        made = 0
        touched: set[int] = set()
        for at, new, use in zip(
            changes.at[:_MOST_TRIED].tolist(),
            changes.new.tolist(),
            changes.use,
            strict=False,
        ):
            if until_within and (self.left >= 0).all():
                break
            if at in touched or not (until_within or (use <= self.left).all()):
                continue
            row, item = divmod(at, self.problem.shape[1])
            if new == OFF and self.kept[row] <= self.problem.least:
                continue
            self.kept[row] += int(new != OFF) - int(self.states[row, item] != OFF)
            self.states[row, item] = new
            self.left = self.left - use
            touched.add(at)
            made += 1
        return made
