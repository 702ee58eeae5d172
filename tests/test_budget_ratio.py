"""Bounds of rows that pay for a ratio, against trying everything."""

import itertools
import math

import numpy as np
import pytest

from kimi_k3.planning.budget_ratio import ratio_bounds

Row = tuple[np.ndarray, np.ndarray, float, int]


def random_row(seed: int) -> Row:
    """Prices (2, 1, N), frequencies (1, N), weight of the ratio, least items on."""
    rng = np.random.default_rng(seed)
    N = int(rng.integers(3, 6))
    frequency = rng.pareto(1.0, (1, N)) + 1e-3
    return (
        rng.normal(size=(2, 1, N)),
        frequency / frequency.sum(),
        float(rng.uniform(0, 3)),
        int(rng.integers(1, N)),
    )


def least_cost(row: Row) -> float:
    priced, frequency, weight, least = row
    best = math.inf
    for choice in itertools.product(range(3), repeat=frequency.size):
        states = np.array(choice)
        if (states > 0).sum() >= least:
            share = frequency[0][states == 2].sum() / frequency[0][states > 0].sum()
            cost = priced[0, 0][states == 1].sum() + priced[1, 0][states == 2].sum()
            best = min(best, cost + weight * share)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_no_row_costs_less(seed: int) -> None:
    row = random_row(seed)
    best = least_cost(row)
    (bound,) = ratio_bounds(*row, target=np.array([best + 1]))
    assert bound <= best + 1e-12
    assert ratio_bounds(*row, target=np.array([best - 1])) == best - 1


def test_the_bound_is_of_use() -> None:
    rows = [random_row(seed) for seed in range(40)]
    gaps = [
        least_cost(row) - ratio_bounds(*row, target=np.array([9.0]))[0] for row in rows
    ]
    assert np.median(gaps) < 0.02
    # Without the ratio, the cheapest states are a bound too; it is far worse.
    free = [least_cost((p, f, 0.0, n)) for p, f, _, n in rows]
    paid = [least_cost(row) for row in rows]
    assert np.mean(gaps) < 0.1 * np.mean(np.subtract(paid, free))


def test_a_wrong_bound_would_be_seen() -> None:
    rows = [random_row(seed) for seed in range(40)]
    heavier = [
        ratio_bounds(p, f, 1.5 * w, n, target=np.array([9.0]))[0] for p, f, w, n in rows
    ]
    best = [least_cost(row) for row in rows]
    assert any(bound > cost for bound, cost in zip(heavier, best, strict=True))
