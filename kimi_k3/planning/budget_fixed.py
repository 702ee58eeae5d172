"""Plans by rule at given widths of the classes, as states: what a budget plan must beat."""

from collections.abc import Iterator, Mapping

import numpy as np

from ..build.retention import round_half_up
from .budget_problem import LARGE, OFF, SMALL
from .damage import Damage
from .fixed_plans import HIGH_SHARE, best_overall
from .scores import ranking

#: Shares of the high bank in graded plans; 0 stores every kept expert at the low width.
HIGH_SHARES = (0.0, 0.25, HIGH_SHARE, 0.5, 0.75)


def fixed_states(
    damage: Damage, room: int, low_bytes: int, high_bytes: int, least: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and states (L, E) int8 of the largest plans whose experts fit into ``room``.

    Experts rank by the damage of dropping them. Kinds that do not fit are left out.
    """
    layers, experts = damage.drop.shape
    order = ranking(damage.drop)
    rank = np.argsort(order, axis=1, kind="stable")
    keep = min(experts, room // (layers * high_bytes))
    if keep >= least:
        yield "uniform", np.where(rank < keep, LARGE, OFF).astype(np.int8)
        total = min(layers * experts, room // high_bytes)
        kept = best_overall(damage.drop, total, least)
        yield "global", np.where(kept, LARGE, OFF).astype(np.int8)
    for share in HIGH_SHARES:
        high = [round_half_up(share * n) for n in range(experts + 1)]
        fitting = (
            n
            for n in range(experts, least - 1, -1)
            if layers * (high[n] * high_bytes + (n - high[n]) * low_bytes) <= room
        )
        if (keep := next(fitting, None)) is not None:
            states = np.where(rank < keep, SMALL, OFF)
            states[rank < high[keep]] = LARGE
            name = f"graded, {share:.0%} high" if share else "all low"
            yield name, states.astype(np.int8)


def width_sets(
    classes: Mapping[str, Mapping[int, int]], own: Mapping[str, int]
) -> list[dict[str, int]]:
    """Classes → bits to make fixed plans at: ``own``, then each width for all.

    Args:
        classes: class → bits it may have → bytes.
    """
    widths = sorted(
        {bits for found in classes.values() for bits in found}, reverse=True
    )
    sets = [dict(own)]
    for width in widths:
        bits = {
            name: width if width in found else max(found)
            for name, found in classes.items()
        }
        if bits not in sets:
            sets.append(bits)
    return sets
