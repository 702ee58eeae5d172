"""Lower bounds where a row also pays for a ratio: how much of what is on is large.

The price of bytes per token makes every row (layer) minimise

    Σ priced(item) + weight × F_large / F_on

where F sums the frequency of items. That is no sum over items. The share s = F_large /
F_on is cut into intervals. Where it lies in [a, b], F_large − b·F_on ≤ 0 may be added at
any rate, and the ratio is at least a + (F_large − a·F_on), because F_on ≤ 1: a sum over
items again, whose minimum is below the row's. Intervals are halved until that is enough.
"""

import numpy as np

#: Rates tried, as multiples of the ratio's slope.
_RATES = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)

_ROUNDS = 7
_FIRST = 8
_BATCH = 512


def ratio_bounds(
    priced: np.ndarray,
    frequency: np.ndarray,
    weight: float,
    least: int,
    target: np.ndarray,
) -> np.ndarray:
    """(R,): no row costs less.

    Args:
        priced: (2, R, N), of each item that is small, large; off costs nothing.
        frequency: (R, N) of row sum 1.
        weight: of the ratio, 0 or more.
        least: items of every row that are not off.
        target: (R,), where a row's bound is good enough; above it none is looked for.
    """
    rows = np.repeat(np.arange(len(target)), _FIRST)
    edges = np.linspace(0, 1, _FIRST + 1)
    low, high = np.tile(edges[:-1], len(target)), np.tile(edges[1:], len(target))
    bounds = target.copy()
    for number in range(_ROUNDS):
        found = np.concatenate(
            [
                _interval_bounds(priced, frequency, weight, least, *part)
                for part in zip(
                    *(
                        np.array_split(a, -(-len(a) // _BATCH))
                        for a in (rows, low, high)
                    ),
                    strict=True,
                )
            ]
        )
        open_ = found < target[rows]
        if number == _ROUNDS - 1:
            np.minimum.at(bounds, rows[open_], found[open_])
        rows, low, high = rows[open_], low[open_], high[open_]
        if not len(rows):
            break
        middle = (low + high) / 2
        rows = np.concatenate([rows, rows])
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    return bounds


def _interval_bounds(
    priced: np.ndarray,
    frequency: np.ndarray,
    weight: float,
    least: int,
    rows: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> np.ndarray:
    """(M,): no choice of row ``rows[m]`` whose share lies between low and high is below."""
    chosen = frequency[rows]  # (M, N)
    # What a small and a large item add: weight × (F_large − a·F_on), and the rate's part.
    small = priced[0, rows] - weight * low[:, None] * chosen
    large = priced[1, rows] + weight * (1 - low)[:, None] * chosen
    best = np.full(len(rows), -np.inf)
    for rate in _RATES:
        extra = rate * weight * chosen
        on = np.minimum(
            small - high[:, None] * extra, large + (1 - high)[:, None] * extra
        )
        first = np.partition(on, least - 1, axis=1)[:, :least] if least else on[:, :0]
        # The least ones are on whatever they cost; of the others those that are below 0.
        total = np.minimum(on, 0).sum(axis=1) + np.maximum(first, 0).sum(axis=1)
        best = np.maximum(best, total + weight * low)
    return best
