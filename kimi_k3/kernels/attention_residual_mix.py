"""The mix of Attention Residuals: a softmax over stored residual blocks."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from ._common import compiled_on_gpu

#: The kernel's threads a token, at most; 18 sums a thread still fit its registers.
MAX_THREADS = 512

#: More candidates than this, the running sum included, take the reference.
MAX_BLOCKS = 16

_SOURCE = """
    // One threadgroup a token; blocks are (K, tokens, D), prefix is (tokens, D).
    constexpr int READS = 4;
    constexpr int SIMDGROUPS = THREADS / 32;
    uint index = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    ulong tokens = threadgroups_per_grid.y;
    ulong token = threadgroup_position_in_grid.y;
    ulong own = token * D;

    // Per candidate its dot product with the weight, then its sum of squares.
    float sums[2 * (K + 1)];
    for (int i = 0; i < 2 * (K + 1); ++i) {
      sums[i] = 0.0f;
    }
    for (uint start = index * READS; start < D; start += THREADS * READS) {
      for (uint d = start; d < start + READS; ++d) {
        if (D % READS == 0 || d < D) {
          float w = float(norm_weight[d]) * float(projection[d]);
          for (int k = 0; k < K; ++k) {
            float x = float(blocks[k * tokens * D + own + d]);
            sums[k] += x * w;
            sums[K + 1 + k] += x * x;
          }
          float x = float(prefix[own + d]);
          sums[K] += x * w;
          sums[2 * K + 1] += x * x;
        }
      }
    }

    threadgroup float partial[2 * (K + 1) * SIMDGROUPS];
    for (int i = 0; i < 2 * (K + 1); ++i) {
      float total = simd_sum(sums[i]);
      if (lane == 0) {
        partial[i * SIMDGROUPS + simdgroup] = total;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Every simdgroup adds up for itself, which saves a second barrier.
    for (int i = 0; i < 2 * (K + 1); ++i) {
      sums[i] = simd_sum(lane < SIMDGROUPS ? partial[i * SIMDGROUPS + lane] : 0.0f);
    }
    float shares[K + 1];
    float largest = -INFINITY;
    for (int k = 0; k <= K; ++k) {
      shares[k] = sums[k] * metal::rsqrt(sums[K + 1 + k] / float(D) + eps[0]);
      largest = metal::max(largest, shares[k]);
    }
    float denominator = 0.0f;
    for (int k = 0; k <= K; ++k) {
      shares[k] = metal::exp(shares[k] - largest);
      denominator += shares[k];
    }
    for (int k = 0; k <= K; ++k) {
      shares[k] /= denominator;
    }

    for (uint start = index * READS; start < D; start += THREADS * READS) {
      for (uint d = start; d < start + READS; ++d) {
        if (D % READS == 0 || d < D) {
          float mixed = shares[K] * float(prefix[own + d]);
          for (int k = 0; k < K; ++k) {
            mixed += shares[k] * float(blocks[k * tokens * D + own + d]);
          }
          out[own + d] = static_cast<X>(mixed);
        }
      }
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_attention_residual_mix",
        input_names=["blocks", "prefix", "norm_weight", "projection", "eps"],
        output_names=["out"],
        source=_SOURCE,
    )


@compiled_on_gpu
def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """``1 / sqrt(mean(x²) + eps)`` over the last axis, float32, without that axis."""
    x = x.astype(mx.float32)
    return mx.rsqrt(mx.mean(mx.square(x), axis=-1) + eps)


@compiled_on_gpu
def attention_residual_mix_reference(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    norm_weight: mx.array,
    projection: mx.array,
    eps: float,
) -> mx.array:
    """:func:`attention_residual_mix` in MLX ops; also takes gradients."""
    weight = norm_weight.astype(mx.float32) * projection.astype(mx.float32)
    block_scores = (blocks.astype(mx.float32) @ weight) * blocks_inverse_rms
    prefix_score = (prefix.astype(mx.float32) @ weight) * inverse_rms(prefix, eps)
    scores = mx.concatenate([block_scores, prefix_score[None]], axis=0)
    probabilities = mx.softmax(scores, axis=0, precise=True)[..., None]
    mixed = (probabilities[:-1] * blocks).sum(axis=0) + probabilities[-1] * prefix
    return mixed.astype(prefix.dtype)


def attention_residual_mix(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    norm_weight: mx.array,
    projection: mx.array,
    eps: float,
    *,
    training: bool = False,
) -> mx.array:
    """Weighted sum of the stored blocks and the running residual sum.

    Args:
        blocks: stored residuals, (N, B, T, D).
        blocks_inverse_rms: :func:`inverse_rms` of them, (N, B, T), float32. Only the
            reference evaluates it: the kernel reads the blocks' rows anyway.
        prefix: the running residual sum, (B, T, D).
        norm_weight: weight of the norm inside the score, (D,).
        projection: what scores a normed candidate, (D,).
        eps: epsilon of that norm.
        training: take the form that has a gradient.

    Returns:
        (B, T, D) in ``prefix``'s dtype. A candidate's score is its RMS-normed self
        times ``projection``, in float32; the sum runs over un-normed candidates.
    """
    count, D = blocks.shape[0], prefix.shape[-1]
    if training or count > MAX_BLOCKS or not prefix.size or not _common.can_run_metal():
        return attention_residual_mix_reference(
            blocks, blocks_inverse_rms, prefix, norm_weight, projection, eps
        )
    threads = min(MAX_THREADS, -(-D // 128) * 32)
    return _kernel()(
        inputs=[blocks, prefix, norm_weight, projection, _common.constants(eps)],
        template=[("X", prefix.dtype), ("K", count), ("D", D), ("THREADS", threads)],
        grid=(threads, prefix.size // D, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[prefix.shape],
        output_dtypes=[prefix.dtype],
    )[0]


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token late in the network."""
    dims, eps = 7168, 1e-5
    blocks = mx.array(rng.standard_normal((8, 1, 1, dims), np.float32))
    blocks = blocks.astype(mx.bfloat16)
    return {
        "blocks": blocks,
        "blocks_inverse_rms": inverse_rms(blocks, eps),
        "prefix": mx.array(rng.standard_normal((1, 1, dims), np.float32)).astype(
            mx.bfloat16
        ),
        "norm_weight": mx.array(1 + 0.1 * rng.standard_normal(dims, np.float32)),
        "projection": mx.array(rng.standard_normal(dims, np.float32) * dims**-0.5),
        "eps": eps,
    }
