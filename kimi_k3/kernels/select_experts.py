"""Expert selection of Kimi K3's router, in float32."""

import mlx.core as mx

from ._common import compiled_on_gpu


@compiled_on_gpu
def select_experts(
    logits: mx.array,
    correction_bias: mx.array,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[mx.array, mx.array]:
    """Pick ``top_k`` experts a token and their combine weights.

    Args:
        logits: router outputs, (..., E), float32.
        correction_bias: (E,); added to the scores for the choice only.
        top_k: experts a token.
        groups, top_groups: with ``groups > top_groups`` only experts of the best
            groups can be chosen; a group's score is the sum of its best two.
        renormalize: divide the chosen scores by their sum, if more than one is chosen.
        scale: factor on the weights, after renormalising.

    Returns:
        Expert ids (..., top_k) uint32, in no particular order, and the *unbiased*
        sigmoid scores of the chosen as weights (..., top_k), float32.
    """
    scores = mx.sigmoid(logits.astype(mx.float32))
    ranking = scores + correction_bias.astype(mx.float32)
    if groups > top_groups:
        ranking = _keep_best_groups(ranking, groups, top_groups)
    ids = mx.argpartition(-ranking, kth=top_k - 1, axis=-1)[..., :top_k]
    ids = mx.stop_gradient(ids)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scale


def _keep_best_groups(ranking: mx.array, groups: int, top_groups: int) -> mx.array:
    """``ranking`` with the experts of all but the best groups set to 0, (..., E)."""
    grouped = mx.unflatten(ranking, -1, (groups, -1))
    group_scores = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
    dropped = mx.argpartition(group_scores, kth=groups - top_groups - 1, axis=-2)
    dropped = mx.stop_gradient(dropped[..., : groups - top_groups, :])
    grouped = mx.put_along_axis(grouped, dropped, mx.array(0.0), axis=-2)
    return grouped.flatten(-2, -1)
