"""budget_plan: for every expert and every class of matrices the width that loses least.

Experts are dropped, stored at the low width or kept as MXFP4; classes get one of their
widths; a build and, if wanted, what a token reads stay within limits. Minimised is the
predicted :class:`~.damage.Damage`. docs/budget.md tells how.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..build.saliency import TOOL
from .budget_choice import Choice, Limits
from .budget_fixed import fixed_states, width_sets
from .budget_problem import LARGE, Solution
from .budget_proof import proven_bound
from .budget_solver import TOLERANCE, solve
from .budget_tokens import TokenForm, frequencies
from .damage import Damage
from .expert_plan import ExpertPlan
from .matrix_classes import CLASS_BITS
from .plan_sizes import SourceSizes

#: Rounds of taking what a token reads as a sum around the last choice.
_ROUNDS = 8

#: Relative: from here on a second bound is tried.
_LARGE_GAP = 5e-3

#: Of the search in each round.
_NODES = 50

#: A round that misses the limit on bytes per token by less than this (relative), or comes
#: so late, may miss it for good: the next aims lower by as much.
_SMALL_EXCESS, _TURNS = 3e-4, 2


@dataclass(frozen=True)
class BudgetResult:
    """The plan of least predicted damage that was found, and what is known about it.

    Attributes:
        plan: within the limits.
        damage: predicted, :meth:`Damage.of_plan`.
        bound: no plan within the limits has less.
        gap: (damage − bound) / damage.
        solver_gap: the same of the last problem that the solver was given, in which what
            a token reads is a sum (:mod:`.budget_tokens`).
        memory: bytes of the build. bytes_per_token: that a decoded token reads.
        fixed: plans by rule at the same widths of the classes → their damage; those that
            break a limit are left out.
        nodes, evaluations, seconds: what the search took.
    """

    plan: ExpertPlan
    damage: float
    bound: float
    gap: float
    solver_gap: float
    memory: int
    bytes_per_token: int
    fixed: Mapping[str, float]
    nodes: int
    evaluations: int
    seconds: float


def budget_plan(
    damage: Damage,
    sizes: SourceSizes,
    *,
    memory: int | None = None,
    bytes_per_token: int | None = None,
    frequency: Mapping[int, np.ndarray] | None = None,
    least: int | None = None,
    low_bits: int | None = None,
    allowed_bits: Collection[int] = CLASS_BITS,
    fixed_bits: Mapping[str, int] | None = None,
    candidates: Sequence[ExpertPlan] = (),
    tolerance: float = TOLERANCE,
) -> BudgetResult:
    """The plan of least predicted damage within the limits.

    Args:
        memory: bytes of the build (:meth:`SourceSizes.plan_bytes`); None: any.
        bytes_per_token: that a decoded token may read
            (:meth:`SourceSizes.bytes_per_token`); None: any.
        frequency: layer → (E,), how often each expert is chosen; None: alike.
        least: experts that every layer keeps; None: top-k.
        low_bits: of the low bank; None, or what ``damage`` is for.
        allowed_bits: that classes may have; 16 for those that have none of them.
        fixed_bits: class → its bits, whatever is allowed.
        candidates: other plans; the result is never worse than those within the limits.
        tolerance: relative gap at which the search may stop.

    Raises PlanError if nothing keeps to the limits, with the least that would do.
    """
    started = time.perf_counter()
    choice = Choice.of(damage, sizes, least, low_bits, allowed_bits, fixed_bits or {})
    limits = Limits(memory, bytes_per_token, frequency)
    frequencies(damage, frequency)
    choice.check_possible(limits)
    found = _Found(choice, limits)
    found.offer(*choice.smallest())
    search = _search(choice, limits, found, tolerance)
    fixed = _offer_fixed(choice, found)
    for plan in candidates:
        damage.check_plan(plan)
        found.offer(choice.states_of(plan), plan.bits)
    lost, states, bits = found.best
    bound = min(search.bound, lost)
    about = {
        "kind": "budget",
        "criterion": damage.criterion,
        "measured": damage.measured,
        **damage.origin,
        "memory": memory,
        "bytes_per_token": bytes_per_token,
        "least": choice.least,
        "damage": lost,
        "bound": bound,
        "tool": TOOL,
    }
    plan = choice.plan(states, bits, about)
    return BudgetResult(
        plan=plan,
        damage=lost,
        bound=bound,
        gap=(lost - bound) / lost if lost else 0.0,
        solver_gap=search.solver_gap,
        memory=sizes.plan_bytes(plan),
        bytes_per_token=sizes.bytes_per_token(plan, frequency),
        fixed=fixed,
        nodes=search.nodes,
        evaluations=search.evaluations,
        seconds=time.perf_counter() - started,
    )


class _Found:
    """The best choice within the limits so far; nothing else is let in."""

    def __init__(self, choice: Choice, limits: Limits) -> None:
        self.choice, self.limits = choice, limits
        self.best: tuple[float, np.ndarray, dict[str, int]]
        self._lost = float("inf")

    def offer(self, states: np.ndarray, bits: Mapping[str, int]) -> bool:
        """Take it if it loses less and keeps to the limits; whether it keeps to them."""
        fits = self.fits(states, bits)
        lost = self.choice.damage.of_states(states, bits)
        if fits and lost < self._lost:
            self._lost, self.best = lost, (lost, states, dict(bits))
        return fits

    def fits(self, states: np.ndarray, bits: Mapping[str, int]) -> bool:
        memory, tokens = self.limits.memory, self.limits.bytes_per_token
        if memory is not None and self.choice.bytes_of(states, bits) > memory:
            return False
        return tokens is None or self.read(states, bits) <= tokens

    def read(self, states: np.ndarray, bits: Mapping[str, int]) -> int:
        """Bytes that a token reads."""
        plan = self.choice.plan(states, bits, {})
        return self.choice.sizes.bytes_per_token(plan, self.limits.frequency)


@dataclass
class _Search:
    """What solving told: bounds, and what it took."""

    bound: float = 0.0
    solver_gap: float = 0.0
    nodes: int = 0
    evaluations: int = 0

    def count(self, solution: Solution, gap: float | None = None) -> None:
        self.solver_gap = solution.gap if gap is None else gap
        self.nodes += solution.nodes
        self.evaluations += solution.evaluations


def _search(choice: Choice, limits: Limits, found: _Found, tolerance: float) -> _Search:
    """Offer what the solver finds, with memory as the only limit, then with both."""
    result = _Search()
    states = np.full(choice.damage.drop.shape, LARGE, np.int8)
    if limits.memory is not None:
        solution = solve(choice.problem(limits.memory, None), tolerance=tolerance)
        if solution is not None:
            result.count(solution)
            # With one limit more, no plan can lose less.
            result.bound = solution.bound
            states = solution.states
            if found.offer(states, choice.bits_of(solution.picked)):
                return result
    if limits.bytes_per_token is not None:
        frequency = frequencies(choice.damage, limits.frequency)
        _search_rounds(choice, limits, found, tolerance, frequency, states, result)
    return result


def _search_rounds(
    choice: Choice,
    limits: Limits,
    found: _Found,
    tolerance: float,
    frequency: np.ndarray,
    states: np.ndarray,
    result: _Search,
) -> None:
    """The same with what a token reads as a sum around ``states``, and around the next."""
    assert limits.bytes_per_token is not None
    limit = limits.bytes_per_token - 1  # what is read is rounded
    before, prices = 0.0, None
    for number in range(_ROUNDS):
        form = TokenForm.around(states, frequency, choice.sizes, choice.damage.low_bits)
        problem = choice.problem(limits.memory, (limit, form))
        solution = solve(problem, tolerance=tolerance, nodes=_NODES)
        if solution is None:
            if states is found.best[1]:
                break
            # Around what keeps to the limits, the sum does too.
            states, limit = found.best[1], limits.bytes_per_token - 1
            continue
        result.count(solution)
        prices = solution.prices
        states, bits = solution.states, choice.bits_of(solution.picked)
        fits = found.offer(states, bits)
        if fits and abs(solution.cost - before) <= tolerance * before:
            break
        before = solution.cost
        over = found.read(states, bits) - limits.bytes_per_token
        if number >= _TURNS or 0 < over <= _SMALL_EXCESS * limits.bytes_per_token:
            limit = min(limit - over, limits.bytes_per_token - 1)
    if prices is not None:
        proven = proven_bound(choice, limits, prices, states, frequency)
        result.bound = max(result.bound, proven)
    if found.best[0] - result.bound > _LARGE_GAP * found.best[0]:
        form = TokenForm.below(frequency, choice.sizes, choice.damage.low_bits)
        problem = choice.problem(limits.memory, (limits.bytes_per_token + 0.5, form))
        solution = solve(problem, tolerance=tolerance, nodes=_NODES)
        if solution is not None:
            result.count(solution, result.solver_gap)
            result.bound = max(result.bound, solution.bound)


def _offer_fixed(choice: Choice, found: _Found) -> dict[str, float]:
    """Offer plans by rule; the damage of those at the widths found so far."""
    own = found.best[2]
    memory = found.limits.memory
    low, high = choice.pair
    named: dict[str, float] = {}
    for bits in width_sets(choice.classes, own):
        decided = choice.bytes_of(np.zeros(0), bits)
        most = choice.damage.drop.size * high
        room = most if memory is None else memory - decided
        for name, states in fixed_states(choice.damage, room, low, high, choice.least):
            lost = choice.damage.of_states(states, bits)
            if bits == own and found.fits(states, bits):
                named[name] = lost
            if lost < found.best[0]:
                found.offer(states, bits)
    return named
