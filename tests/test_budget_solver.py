"""The solver finds the true optimum, and no bound of it is above that."""

import math
from dataclasses import replace

import numpy as np
import pytest
from oracle_budget import brute_force, by_table, random_problem

from kimi_k3.planning.budget_dual import Choices, Items, best_bound
from kimi_k3.planning.budget_fill import Selection
from kimi_k3.planning.budget_problem import Option, Problem
from kimi_k3.planning.budget_solver import solve

CLOSE = 1e-9  # relative: rounding of sums


def check(problem: Problem, best: float, tolerance: float) -> None:
    """``solve`` agrees with the optimum ``best``, to ``tolerance``."""
    found = solve(problem, tolerance=tolerance, nodes=5000)
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert problem.fits(found.states, found.picked)
    assert found.cost == pytest.approx(
        problem.costs(found.states, found.picked), rel=CLOSE
    )
    assert found.bound <= best * (1 + 1e-12) + 1e-12
    assert best - CLOSE <= found.cost <= best + tolerance * found.cost + CLOSE
    assert found.gap <= tolerance + 1e-6


@pytest.mark.parametrize("resources", [1, 2])
@pytest.mark.parametrize("seed", range(16))
def test_optimum_is_that_of_trying_everything(seed: int, resources: int) -> None:
    problem = random_problem(seed, resources)
    check(problem, brute_force(problem), tolerance=0)


@pytest.mark.parametrize("tolerance", [0, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_optimum_is_that_of_a_table(seed: int, tolerance: float) -> None:
    problem = random_problem(seed, 1, rows=5, items=12, choices=6)
    check(problem, by_table(problem), tolerance)


def test_the_oracles_agree() -> None:
    for seed in range(12):
        problem = random_problem(seed, 1)
        assert by_table(problem) == pytest.approx(brute_force(problem), rel=CLOSE)


def test_without_search_the_optimum_is_missed() -> None:
    problems = [random_problem(seed, 2) for seed in range(16)]
    first = [solve(problem, tolerance=0, nodes=1) for problem in problems]
    missed = [
        found is None or found.cost > brute_force(problem) * (1 + CLOSE)
        for found, problem in zip(first, problems, strict=True)
    ]
    assert any(missed)
    assert all(f is None or f.gap > 0 for f, m in zip(first, missed, strict=True) if m)


def test_bounds_hold_at_any_prices_and_stop() -> None:
    for seed in range(8):
        problem = random_problem(seed, 2)
        best = brute_force(problem)
        choices = Choices(problem)
        allowed = np.isfinite(choices.cost)
        for most in (1, 3):
            for start in (1e-3, 1e3):
                prices = np.full(2, start)
                bound = best_bound(
                    Items(problem), choices, allowed, {}, [], prices, 1e-9, most
                )
                assert bound.value <= best + CLOSE


@pytest.mark.parametrize("seed", range(6))
def test_where_prices_settle_everything_the_bound_is_the_optimum(seed: int) -> None:
    problem = random_problem(seed, 2, rows=2, items=4, choices=0)
    prices = np.array([0.05, 0.03])
    cut = Items(problem).best(prices, {})
    assert cut is not None
    settled = replace(problem, limits=tuple(cut.use.tolist()))
    choices = Choices(settled)
    bound = best_bound(
        Items(settled), choices, np.isfinite(choices.cost), {}, [], prices, 1e-12
    )
    assert bound.value == pytest.approx(cut.cost, rel=CLOSE)
    assert brute_force(settled) == pytest.approx(cut.cost, rel=CLOSE)


def test_a_selection_is_brought_within_and_keeps_the_least() -> None:
    cost = np.stack([np.full((2, 4), 0.1), np.full((2, 4), 5.0), np.zeros((2, 4))])
    use = np.array([2.0, 3.0])[None, :, None, None]
    problem = Problem(cost, use, (), 3, (19.0,))
    selection = Selection(problem, np.full((2, 4), 2, np.int8), ())
    assert selection.bring_within()
    assert problem.fits(selection.states, ())
    assert (selection.states != 0).sum(axis=1).tolist() == [3, 3]
    assert (selection.left == problem.limits - problem.used(selection.states, ())).all()
    assert not Selection(
        replace(problem, limits=(11.0,)), selection.states, ()
    ).bring_within()


def test_more_to_spend_never_costs_more() -> None:
    problem = random_problem(1, 1, rows=3, items=8, choices=4)
    costs, bounds = [], []
    for limit in range(60, 300, 12):
        found = solve(replace(problem, limits=(limit,)), tolerance=0, nodes=5000)
        costs.append(np.inf if found is None else found.cost)
        bounds.append(np.inf if found is None else found.bound)
    assert np.isfinite(costs[-1])
    assert costs == sorted(costs, reverse=True)
    assert np.diff(np.array(bounds)[np.isfinite(bounds)]).max() <= CLOSE


def test_the_same_answer_each_time() -> None:
    problem = random_problem(3, 2, rows=4, items=30, choices=5)
    one, two = solve(problem), solve(problem)
    assert one is not None
    assert two is not None
    assert (one.states == two.states).all()
    assert (one.picked, one.cost, one.bound) == (two.picked, two.cost, two.bound)


def test_nothing_fits() -> None:
    problem = random_problem(0, 1, rows=2, items=4, choices=2)
    cheapest = sum(min(o.use[0] for o in c) for c in problem.choices) + 2 * 5 * 3
    problem = replace(problem, least=3)
    assert solve(replace(problem, limits=(cheapest - 1.0,))) is None
    assert solve(replace(problem, limits=(float(cheapest),))) is not None


def test_items_of_no_cost_are_left_off() -> None:
    cost = np.zeros((3, 2, 5))
    found = solve(Problem(cost, np.ones((1, 2, 2, 5)), (), 2, (100.0,)))
    assert found is not None
    assert (found.states != 0).sum(axis=1).tolist() == [2, 2]
    assert (found.cost, found.gap) == (0, 0)


def test_a_choice_can_be_worth_more_than_items() -> None:
    cost = np.stack([np.ones((1, 4)), np.full((1, 4), 0.5), np.zeros((1, 4))])
    use = np.array([1.0, 2.0])[None, :, None, None]
    wide, narrow = Option(0.0, (6.0,)), Option(5.0, (2.0,))
    found = solve(Problem(cost, use, ((wide, narrow),), 1, (8.0,)))
    assert found is not None
    assert found.picked == (0,)
    assert found.cost == pytest.approx(3)


@pytest.mark.parametrize(
    "changes",
    [
        {"least": 9},
        {"cost": np.full((3, 1, 2), np.nan)},
        {"cost": np.full((3, 1, 2), -1.0)},
        {"limits": (1.0, 1.0, 1.0), "use": np.ones((3, 2, 1, 2))},
    ],
)
def test_what_is_no_problem(changes: dict) -> None:
    problem = Problem(np.zeros((3, 1, 2)), np.ones((1, 2, 1, 2)), (), 0, (1.0,))
    with pytest.raises(ValueError, match=r"\w"):
        replace(problem, **changes)
