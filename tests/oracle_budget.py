"""The true optimum of small problems: every selection is tried, or a table filled."""

import itertools
import math

import numpy as np

from kimi_k3.planning.budget_problem import Option, Problem


def random_problem(
    seed: int, resources: int, rows: int = 0, items: int = 0, choices: int = -1
) -> Problem:
    """Heavy-tailed costs, whole uses (of the second resource also below 0).

    Sizes that are 0 (of choices: below 0) are drawn, small enough to try everything.
    """
    rng = np.random.default_rng(seed)
    R, N = rows or int(rng.integers(1, 4)), items or int(rng.integers(2, 5))
    drop = rng.pareto(1.5, (R, N))
    drop[0, 0] *= seed % 3  # an item that may be dropped for nothing
    low = drop * rng.uniform(0, 0.9, (R, N))
    use = np.zeros((resources, 2, R, N))
    use[0] = rng.integers(1, 20, (2, R, N)) if seed % 2 else [[[5]], [[9]]]
    if resources == 2:
        use[1] = rng.integers(-3, 12, (2, R, N))
    options = []
    for _ in range(choices if choices >= 0 else int(rng.integers(0, 5))):
        uses = -np.sort(-rng.integers(5, 60, (resources, 4)), axis=1)
        costs = [0.0, *np.sort(rng.uniform(0, 2, 3)).tolist()]
        options.append(
            tuple(
                Option(cost, tuple(map(float, used)))
                for cost, used in zip(costs, uses.T, strict=True)
            )
        )
    most = [
        sum(max(o.use[k] for o in choice) for choice in options)
        + float(use[k].max(axis=0).sum())
        for k in range(resources)
    ]
    return Problem(
        cost=np.stack([drop, low, np.zeros((R, N))]),
        use=use,
        choices=tuple(options),
        least=int(rng.integers(0, min(N, 4))),
        limits=tuple(float(int(m * rng.uniform(0.2, 0.9))) for m in most),
    )


def brute_force(problem: Problem) -> float:
    """The least cost within the limits, by trying everything; infinite if nothing fits."""
    R, N = problem.shape
    K = len(problem.limits)
    parts: list[list[tuple[float, ...]]] = []
    for row in range(R):
        found = []
        for states in itertools.product(range(3), repeat=N):
            if sum(s > 0 for s in states) < problem.least:
                continue
            cost = sum(problem.cost[s, row, n] for n, s in enumerate(states))
            used = [
                sum(problem.use[k, s - 1, row, n] for n, s in enumerate(states) if s)
                for k in range(K)
            ]
            found.append((float(cost), *map(float, used)))
        parts.append(found)
    parts += [[(o.cost, *o.use) for o in options] for options in problem.choices]
    best = np.zeros((1, K + 1))
    for part in parts:
        sums = (best[:, None] + np.array(part)[None]).reshape(-1, K + 1)
        best = _undominated(sums[np.lexsort(sums.T[::-1])])
    fitting = best[(best[:, 1:] <= problem.limits).all(axis=1), 0]
    return float(fitting.min(initial=math.inf))


def by_table(problem: Problem) -> float:
    """The same for one limit and whole uses: a table over everything that can be used."""
    size = int(problem.limits[0]) + 1
    total = np.full(size, np.inf)
    total[0] = 0
    for row in range(problem.shape[0]):
        total = _sum_of(total, _row_table(problem, row, size))
    for options in problem.choices:
        table = np.full(size, np.inf)
        for option in options:
            used = int(option.use[0])
            if used < size:
                table[used] = min(table[used], option.cost)
        total = _sum_of(total, table)
    return float(total.min())


def _row_table(problem: Problem, row: int, size: int) -> np.ndarray:
    """(size,): least cost of a row that uses exactly so much, enough items on."""
    table = np.full((problem.least + 1, size), np.inf)  # (items on, used)
    table[0, 0] = 0
    for item in range(problem.shape[1]):
        new = table + problem.cost[0, row, item]
        for state in (1, 2):
            used = int(problem.use[0, state - 1, row, item])
            for on in range(problem.least + 1):
                into = min(on + 1, problem.least)
                moved = table[on, : size - used] + problem.cost[state, row, item]
                new[into, used:] = np.minimum(new[into, used:], moved)
        table = new
    return table[problem.least]


def _sum_of(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    total = np.full(one.shape, np.inf)
    for used in np.flatnonzero(np.isfinite(other)):
        moved = one[: len(one) - used] + other[used]
        total[used:] = np.minimum(total[used:], moved)
    return total


def _undominated(sums: np.ndarray) -> np.ndarray:
    """Those of ``sums``, sorted by cost, that no cheaper one is below in every use."""
    kept = np.empty_like(sums)
    n = 0
    for total in sums:
        if not (kept[:n, 1:] <= total[1:]).all(axis=1).any():
            kept[n] = total
            n += 1
    return kept[:n]
