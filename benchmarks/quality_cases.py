"""The builds of benchmarks/quality.py, part by part."""

from collections.abc import Callable, Iterator
from typing import Any

from quality_subject import (
    BEST_WAY,
    BOTH,
    ERRORS,
    KEPT,
    PROBES,
    Case,
    Subject,
    random_layers,
)

from kimi_k3.errors import PlanError
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.fixed_plans import (
    all_classes,
    global_plan,
    graded_plan,
    uniform_plan,
)
from kimi_k3.planning.probed_damage import probed

FIXED = ("uniform", "global", "graded", "all low")

#: Ways that budget plans are made by; some are judged last.
CHOSEN_BY = ("reap_sum", ERRORS, BOTH + PROBES, "reap_sum" + PROBES, BEST_WAY)
JUDGED_LAST, JUDGED_FIRST = CHOSEN_BY[:3], CHOSEN_BY[3:]
BUDGET = f"budget by {BEST_WAY}"

#: The size at which noise, quantisers and domains are looked at.
MIDDLE = KEPT[1]

RANDOM_PLANS, DRAWS = 10, 3
DOMAINS = {"code": {"python": 1.0, "c": 1.0}, "chinese": {"chinese": 1.0}}

#: Share of the reference's bytes a token: begun between, tried so often.
SPEED_RANGE, SPEED_FIRST, SPEED_STEPS = (0.4, 1.0), 0.7, 5

#: A case, and more that its row of the results says.
Found = tuple[Case, dict[str, Any]]


def fixed_plans(subject: Subject, memory: int) -> dict[str, ExpertPlan]:
    """Plans by rule for ``memory`` bytes, other matrices as they are."""
    common: dict[str, Any] = {"sizes": subject.sizes, "memory": memory}
    table = subject.table
    return {
        "uniform": uniform_plan(table, **common),
        "global": global_plan(table, **common),
        "graded": graded_plan(table, **common),
        "all low": graded_plan(table, high=0, **common),
    }


def sizes(subject: Subject) -> Iterator[Found]:
    """Plans by rule, and budget's by two ways, at three sizes."""
    for keep, memory in subject.limits.items():
        for name, plan in fixed_plans(subject, memory).items():
            yield Case("sizes", str(keep), name, plan), {"limit": memory}
        yield from _budgets(subject, keep, JUDGED_FIRST)


def other_ways(subject: Subject) -> Iterator[Found]:
    """More of :func:`sizes`: budget's plans by further ways."""
    for keep in subject.limits:
        yield from _budgets(subject, keep, JUDGED_LAST)


def _budgets(subject: Subject, keep: int, ways: tuple[str, ...]) -> Iterator[Found]:
    memory = subject.limits[keep]
    for name in ways:
        way = subject.ways[name]
        result = subject.budget(way, memory)
        subject.assert_best(result, way, memory)
        more = {"limit": memory, "damage": result.damage, "bound": result.bound}
        yield Case("sizes", str(keep), f"budget by {name}", result.plan), more


def speed(subject: Subject) -> Iterator[Found]:
    """Graded with other matrices at 8 bits, then budget with ever fewer bytes a token."""
    middle = fixed_plans(subject, subject.limits[MIDDLE])["graded"].about
    graded = graded_plan(
        subject.table,
        high=int(middle["high"]),
        low=int(middle["low"]),
        sizes=subject.sizes,
        bits=all_classes(subject.sizes, 8),
    )
    memory = subject.sizes.plan_bytes(graded)
    tokens = subject.sizes.bytes_per_token(graded, subject.frequency)
    case = Case("speed", "8 bits", "graded", graded)
    yield case, {"limit": memory}
    reference = subject.judge(case)
    (low, high), ratio = SPEED_RANGE, SPEED_FIRST
    for _ in range(SPEED_STEPS):
        try:
            result = subject.budget(
                subject.ways[BEST_WAY],
                memory,
                bytes_per_token=int(ratio * tokens),
                frequency=subject.frequency,
                fixed_bits={},
            )
        except PlanError:
            low = ratio
        else:
            case = Case("speed", f"{ratio:.4f}", BUDGET, result.plan)
            yield case, {"limit": memory, "share_of_bytes": ratio}
            found = subject.judge(case)
            if found is None or reference is None:
                return
            if found.kl.mean() <= reference.kl.mean():
                high = ratio
            else:
                low = ratio
        ratio = (low + high) / 2


def domains(subject: Subject) -> Iterator[Found]:
    """Plans for one domain, and for all, in the same bytes."""
    memory = subject.limits[MIDDLE]
    for name, weights in DOMAINS.items():
        uniform = uniform_plan(subject.table, keep=MIDDLE, weights=weights)
        way = Damage.of_criterion(subject.table, "reap_sum", weights, subject.sizes)
        budget = subject.budget(probed(way, subject.probes, weights), memory).plan
        for kind, plan in (
            ("uniform", uniform),
            ("budget by reap_sum" + PROBES, budget),
        ):
            case = Case("domains", str(MIDDLE), f"{kind} for {name}", plan)
            yield case, {"kind": kind, "domain": name}


def quantisers(subject: Subject) -> Iterator[Found]:
    """Builds with a low bank, quantised as ``mx.quantize`` does."""
    memory = subject.limits[MIDDLE]
    plans = fixed_plans(subject, memory)
    plans[BUDGET] = subject.budget(subject.ways[BEST_WAY], memory).plan
    for name in ("graded", "all low", BUDGET):
        yield Case("quantisers", str(MIDDLE), name, plans[name], plain=True), {}


def random_plans(subject: Subject) -> Iterator[Found]:
    """The uniform plan's counts with experts drawn at random."""
    uniform = uniform_plan(subject.table, keep=MIDDLE)
    for number in range(RANDOM_PLANS):
        plan = random_layers(uniform, subject.seed, number)
        yield Case("random", str(MIDDLE), f"random {number}", plan), {}


def draws(subject: Subject) -> Iterator[Found]:
    """Plans made, and quantised, by other calibrations; the probes are the same."""
    memory = subject.limits[MIDDLE]
    for number in range(1, DRAWS + 1):
        folder = f"draw{number}"
        try:
            table, errors = subject.calibrated(folder)
        except FileNotFoundError:
            return
        way = probed(Damage.of_measured(errors), subject.probes)
        common: dict[str, Any] = {"sizes": subject.sizes, "memory": memory}
        for name, plan in (
            ("uniform", uniform_plan(table, **common)),
            ("graded", graded_plan(table, **common)),
            (BUDGET, subject.budget(way, memory).plan),
        ):
            yield Case("draws", str(MIDDLE), name, plan, folder), {"draw": number}


#: In the order in which they are judged: what matters most comes first.
PARTS: dict[str, Callable[[Subject], Iterator[Found]]] = {
    "sizes": sizes,
    "speed": speed,
    "random": random_plans,
    "domains": domains,
    "draws": draws,
    "quantisers": quantisers,
    "other ways": other_ways,
}
