"""Fewer experts for tokens whose router is sure: the option ``expert_top_p``."""

import mlx.core as mx


def keep_top_p(weights: mx.array, p: float) -> mx.array:
    """Keep the fewest slots of a token whose weights make up a share ``p`` of its sum.

    Args:
        weights: combine weights of the chosen experts, (..., K), float32, in any order.
        p: share, above 0 and at most 1.

    Returns:
        (..., K): 0 in the slots left out, which then cost nothing, and the others
        scaled up so that each token's sum stays what it was.
    """
    order = mx.argsort(-weights, axis=-1)
    heaviest_first = mx.take_along_axis(weights, order, axis=-1)
    total = weights.sum(axis=-1, keepdims=True)
    before = mx.cumsum(heaviest_first, axis=-1) - heaviest_first
    kept = mx.where(before < p * total, heaviest_first, 0.0)
    kept = kept * (total / kept.sum(axis=-1, keepdims=True))
    return mx.put_along_axis(mx.zeros_like(weights), order, kept, axis=-1)
