"""The mix of Attention Residuals: a softmax over stored residual blocks."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from ._common import compiled_on_gpu

#: The kernel's threads a token, at most.
MAX_THREADS = 512

#: More stored blocks take the reference: two sums of each fill a thread's registers.
MAX_BLOCKS = 8

_SOURCE = """
    // One threadgroup a token; blocks are (K, tokens, D), the other rows (tokens, D).
    constexpr int READS = 4;
    constexpr int SIMDGROUPS = THREADS / 32;
    constexpr int PER_THREAD = (D + THREADS * READS - 1) / (THREADS * READS) * READS;
    uint index = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    ulong tokens = threadgroups_per_grid.y;
    ulong token = threadgroup_position_in_grid.y;
    ulong at = token * D;

    // Per candidate its dot product with the weight, then its sum of squares.
    float sums[2 * (K + 1)];
    for (int i = 0; i < 2 * (K + 1); ++i) {
      sums[i] = 0.0f;
    }
    float running[PER_THREAD];
    for (uint i = 0; i < PER_THREAD; ++i) {
      uint d = (i / READS * THREADS + index) * READS + i % READS;
      running[i] = 0.0f;
      if (d < D) {
        float w = float(norm_weight[d]) * float(projection[d]);
        for (int k = 0; k < K; ++k) {
          float x = float(blocks[k * tokens * D + at + d]);
          sums[k] += x * w;
          sums[K + 1 + k] += x * x;
        }
        float x = float(prefix[at + d]);
        if (ADDED) {
          X sum = static_cast<X>(x + float(added[at + d]));
          prefix_out[at + d] = sum;
          x = float(sum);
        }
        running[i] = x;
        sums[K] += x * w;
        sums[2 * K + 1] += x * x;
      }
    }

    threadgroup float partial[2 * (K + 1) * SIMDGROUPS];
    threadgroup float partial_squares[SIMDGROUPS];
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

    float squares = 0.0f;
    for (uint i = 0; i < PER_THREAD; ++i) {
      uint d = (i / READS * THREADS + index) * READS + i % READS;
      if (d < D) {
        float mixed = shares[K] * running[i];
        for (int k = 0; k < K; ++k) {
          mixed += shares[k] * float(blocks[k * tokens * D + at + d]);
        }
        running[i] = float(static_cast<X>(mixed));
        squares += running[i] * running[i];
      }
    }
    float factor = 1.0f;
    if (NORMED) {
      float total = simd_sum(squares);
      if (lane == 0) {
        partial_squares[simdgroup] = total;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      total = simd_sum(lane < SIMDGROUPS ? partial_squares[lane] : 0.0f);
      factor = metal::rsqrt(total / float(D) + eps[1]);
    }
    for (uint i = 0; i < PER_THREAD; ++i) {
      uint d = (i / READS * THREADS + index) * READS + i % READS;
      if (d < D) {
        float y = NORMED ? running[i] * factor * float(output_weight[d]) : running[i];
        out[at + d] = static_cast<X>(y);
      }
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_attention_residual_mix",
        input_names=[
            "blocks",
            "prefix",
            "added",
            "norm_weight",
            "projection",
            "output_weight",
            "eps",
        ],
        output_names=["out", "prefix_out"],
        source=_SOURCE,
    )


@compiled_on_gpu
def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """``1 / sqrt(mean(x²) + eps)`` over the last axis, float32, without that axis."""
    x = x.astype(mx.float32)
    return mx.rsqrt(mx.mean(mx.square(x), axis=-1) + eps)


@compiled_on_gpu
def _mix(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    norm_weight: mx.array,
    projection: mx.array,
    eps: float,
) -> mx.array:
    weight = norm_weight.astype(mx.float32) * projection.astype(mx.float32)
    block_scores = (blocks.astype(mx.float32) @ weight) * blocks_inverse_rms
    prefix_score = (prefix.astype(mx.float32) @ weight) * inverse_rms(prefix, eps)
    scores = mx.concatenate([block_scores, prefix_score[None]], axis=0)
    probabilities = mx.softmax(scores, axis=0, precise=True)[..., None]
    mixed = (probabilities[:-1] * blocks).sum(axis=0) + probabilities[-1:] * prefix
    return mixed[0].astype(prefix.dtype)


def attention_residual_mix_reference(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    added: mx.array | None,
    norm_weight: mx.array,
    projection: mx.array,
    eps: float,
    output_weight: mx.array | None = None,
    output_eps: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """:func:`attention_residual_mix` in MLX ops; also takes gradients."""
    prefix = prefix if added is None else prefix + added
    out = _mix(blocks, blocks_inverse_rms, prefix, norm_weight, projection, eps)
    if output_weight is not None:
        out = mx.fast.rms_norm(out, output_weight, output_eps)
    return out, prefix


def attention_residual_mix(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    added: mx.array | None,
    norm_weight: mx.array,
    projection: mx.array,
    eps: float,
    output_weight: mx.array | None = None,
    output_eps: float = 0.0,
    *,
    training: bool = False,
) -> tuple[mx.array, mx.array]:
    """Weighted sum of the stored blocks and the running residual sum, and that sum.

    Args:
        blocks: stored residuals, (N, B, T, D).
        blocks_inverse_rms: :func:`inverse_rms` of them, (N, B, T), float32. Only the
            reference evaluates it: the kernel reads the blocks' rows anyway.
        prefix: the running residual sum, (B, T, D).
        added: what is added to it first, (B, T, D), or nothing.
        norm_weight: weight of the norm inside the score, (D,).
        projection: what scores a normed candidate, (D,).
        eps: epsilon of that norm.
        output_weight, output_eps: of an RMS norm of the result, (D,), or none.
        training: take the form that has a gradient.

    Returns:
        The mix (B, T, D) in ``prefix``'s dtype, and ``prefix + added``. A candidate's
        score is its RMS-normed self times ``projection``, in float32; the sum runs over
        un-normed candidates. More than 8 blocks, or several dtypes, take the reference.
    """
    count, D, dtype = blocks.shape[0], prefix.shape[-1], prefix.dtype
    alike = all(x is None or x.dtype == dtype for x in (added, output_weight))
    fits = alike and count <= MAX_BLOCKS and prefix.size > 0
    if training or not fits or not _common.can_run_metal():
        return attention_residual_mix_reference(
            blocks,
            blocks_inverse_rms,
            prefix,
            added,
            norm_weight,
            projection,
            eps,
            output_weight,
            output_eps,
        )
    threads = min(MAX_THREADS, -(-D // 128) * 32)
    unused = _common.constants(0.0)
    out, total = _kernel()(
        inputs=[
            blocks,
            prefix,
            unused if added is None else added,
            norm_weight,
            projection,
            unused if output_weight is None else output_weight,
            _common.constants(eps, output_eps),
        ],
        template=[
            ("X", dtype),
            ("K", count),
            ("D", D),
            ("THREADS", threads),
            ("ADDED", added is not None),
            ("NORMED", output_weight is not None),
        ],
        grid=(threads, prefix.size // D, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[prefix.shape, (1,) if added is None else prefix.shape],
        output_dtypes=[dtype, dtype],
    )
    return out, prefix if added is None else total


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token late in the network."""
    dims, eps = 7168, 1e-5

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32)).astype(mx.bfloat16)

    blocks = normal(8, 1, 1, dims)
    return {
        "blocks": blocks,
        "blocks_inverse_rms": inverse_rms(blocks, eps),
        "prefix": normal(1, 1, dims),
        "added": normal(1, 1, dims),
        "norm_weight": 1 + 0.1 * normal(dims),
        "projection": normal(dims) * dims**-0.5,
        "eps": eps,
        "output_weight": 1 + 0.1 * normal(dims),
        "output_eps": eps,
    }
