"""A lower bound of the damage where bytes per token are limited, as the ratio they are.

The solver's bound is for a sum over experts in their place (:mod:`.budget_tokens`). This
one holds for every plan within the limits: with prices of both, layers and classes decide
for themselves, and :func:`~.budget_ratio.ratio_bounds` bounds the layers.
"""

import numpy as np

from .budget_choice import Choice, Limits
from .budget_problem import LARGE, OFF, SMALL
from .budget_ratio import ratio_bounds

#: Relative to the damage: how much of it the intervals of the layers may cost.
_LEFT_OPEN = 3e-4


def proven_bound(
    choice: Choice,
    limits: Limits,
    prices: np.ndarray,
    states: np.ndarray,
    frequency: np.ndarray,
) -> float:
    """No plan within ``limits`` has less damage, whatever the prices.

    Args:
        prices: of a byte of memory (if that is limited) and of a byte per token.
        states: (L, E) of a good plan; they only tell where looking closer pays.
        frequency: (L, E) of row sum 1.
    """
    assert limits.bytes_per_token is not None
    sizes, damage = choice.sizes, choice.damage
    of_memory = float(prices[0]) if limits.memory is not None else 0.0
    of_token = float(prices[-1])
    low, high = choice.pair
    top_k = sizes.args.text_config.num_experts_per_token
    row = of_token * sizes.router_bytes
    priced = np.stack(
        [
            damage.low - damage.drop + of_memory * low + row,
            -damage.drop + of_memory * high + row,
        ]
    )
    # A token reads top_k × (low + share × (high − low)) of matrices in every layer.
    weight = of_token * top_k * (high - low)
    read = top_k * (low - sizes.router_bytes) * len(states)
    if weight < 0:
        read, weight = read + top_k * (high - low) * len(states), 0.0
    small, large = states == SMALL, states == LARGE
    share = (frequency * large).sum(axis=1) / (frequency * (states != OFF)).sum(axis=1)
    reached = (priced[0] * small + priced[1] * large).sum(axis=1) + weight * share
    lost = damage.of_states(states, {})
    target = reached - _LEFT_OPEN * lost / len(states)
    total = (
        damage.drop.sum()
        + ratio_bounds(priced, frequency, weight, choice.least, target).sum()
    )
    for name, found in choice.classes.items():
        total += min(
            damage.classes[name][bits]
            + of_memory * nbytes
            + of_token * choice.read_of(name, nbytes)
            for bits, nbytes in found.items()
        )
    text = sizes.rest - sizes.vision
    # What is read is rounded to whole bytes.
    total += of_token * (text + read - limits.bytes_per_token - 0.5)
    if limits.memory is not None:
        total += of_memory * (sizes.rest - limits.memory)
    return float(total) * (1 - 1e-12)
