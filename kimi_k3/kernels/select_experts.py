"""Expert selection of Kimi K3's router, in float32."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from ._common import compiled_on_gpu

#: A lane marks which of its experts are taken in the bits of one uint.
MAX_EXPERTS = 32 * 32

#: Lane i keeps the i-th chosen expert.
MAX_TOP_K = 32

_SOURCE = """
    // One simdgroup a token; lane l holds experts l, l + 32, l + 64, ...
    constexpr int PER_LANE = (E + 31) / 32;
    constexpr uint NONE = 0xFFFFFFFF;
    uint lane = thread_index_in_simdgroup;
    uint token = threadgroup_position_in_grid.y;

    float ranking[PER_LANE];
    uint open = 0;
    for (int j = 0; j < PER_LANE; ++j) {
      uint e = j * 32 + lane;
      ranking[j] = -INFINITY;
      if (e < E) {
        float score = 1.0f / (1.0f + metal::exp(-logits[token * E + e]));
        float ranked = score + float(correction_bias[e]);
        ranking[j] = metal::isnan(ranked) ? -INFINITY : ranked;
        open |= 1u << j;
      }
    }

    uint chosen = 0;
    for (uint slot = 0; slot < TOP_K; ++slot) {
      float best = -INFINITY;
      uint best_id = NONE;
      for (int j = 0; j < PER_LANE; ++j) {
        bool better = best_id == NONE || ranking[j] > best;
        if ((open >> j & 1u) != 0 && better) {
          best = ranking[j];
          best_id = j * 32 + lane;
        }
      }
      float top = simd_max(best);
      uint winner = simd_min(best == top ? best_id : NONE);
      if (winner % 32 == lane) {
        open &= ~(1u << (winner / 32));
      }
      if (slot == lane) {
        chosen = winner;
      }
    }

    float score = 0.0f;
    if (lane < TOP_K) {
      score = 1.0f / (1.0f + metal::exp(-logits[token * E + chosen]));
    }
    float total = simd_sum(score);
    if (lane < TOP_K) {
      float weight = RENORMALIZE ? score / (total + 1e-20f) : score;
      ids[token * TOP_K + lane] = chosen;
      weights[token * TOP_K + lane] = weight * scale[0];
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_select_experts",
        input_names=["logits", "correction_bias", "scale"],
        output_names=["ids", "weights"],
        source=_SOURCE,
    )


@compiled_on_gpu
def select_experts_reference(
    logits: mx.array,
    correction_bias: mx.array,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[mx.array, mx.array]:
    """:func:`select_experts` in MLX ops; also takes gradients and groups."""
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


def select_experts(
    logits: mx.array,
    correction_bias: mx.array,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
    *,
    training: bool = False,
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
        training: take the form that has a gradient.

    Returns:
        Expert ids (..., top_k) uint32, in no particular order, and the *unbiased*
        sigmoid scores of the chosen as weights (..., top_k), float32. Of equally
        ranked experts the kernel takes the lower ids, the reference any.
    """
    experts = logits.shape[-1]
    fits = top_k <= min(MAX_TOP_K, experts) and experts <= MAX_EXPERTS
    if (
        training
        or groups > top_groups
        or not fits
        or not logits.size
        or not _common.can_run_metal()
    ):
        return select_experts_reference(
            logits, correction_bias, top_k, groups, top_groups, renormalize, scale
        )
    shape = (*logits.shape[:-1], top_k)
    ids, weights = _kernel()(
        inputs=[
            logits.astype(mx.float32),
            correction_bias,
            _common.constants(scale),
        ],
        template=[
            ("E", experts),
            ("TOP_K", top_k),
            ("RENORMALIZE", renormalize and top_k > 1),
        ],
        grid=(32, logits.size // experts, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.uint32, mx.float32],
    )
    return ids, weights


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token, 16 of 896 experts."""
    return {
        "logits": mx.array(rng.standard_normal((1, 1, 896), np.float32)),
        "correction_bias": mx.array(0.1 * rng.standard_normal(896, np.float32)),
        "top_k": 16,
        "groups": 1,
        "top_groups": 1,
        "renormalize": True,
        "scale": 1.0,
    }
