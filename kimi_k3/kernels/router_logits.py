"""The router's matmul for a few tokens: float32 sums of a weight of any float type."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from ._tuned import Tiling, best_tiling

#: More tokens take the reference: the kernel keeps all of them in registers.
MAX_TOKENS = 8

_SOURCE = """
    // A simdgroup computes the logits of ROWS experts for all N tokens.
    constexpr int READS = 4;
    uint lane = thread_index_in_simdgroup;
    uint first = (threadgroup_position_in_grid.x * SIMDGROUPS
        + simdgroup_index_in_threadgroup) * ROWS;

    float sums[ROWS * N];
    for (int i = 0; i < ROWS * N; ++i) {
      sums[i] = 0.0f;
    }
    for (uint start = lane * READS; start < D; start += 32 * READS) {
      float inputs[N * READS];
      for (int n = 0; n < N; ++n) {
        for (int j = 0; j < READS; ++j) {
          bool inside = D % READS == 0 || start + j < D;
          inputs[n * READS + j] = inside ? float(x[n * D + start + j]) : 0.0f;
        }
      }
      for (int row = 0; row < ROWS; ++row) {
        // A row past the last expert repeats that one and is not written.
        uint e = metal::min(first + row, uint(E - 1));
        for (int j = 0; j < READS; ++j) {
          bool inside = D % READS == 0 || start + j < D;
          float w = inside ? float(weight[e * D + start + j]) : 0.0f;
          for (int n = 0; n < N; ++n) {
            sums[row * N + n] += w * inputs[n * READS + j];
          }
        }
      }
    }
    for (int row = 0; row < ROWS; ++row) {
      for (int n = 0; n < N; ++n) {
        float total = simd_sum(sums[row * N + n]);
        if (lane == 0 && first + row < E) {
          logits[n * E + first + row] = total;
        }
      }
    }
"""

#: Until `kimi-k3 doctor --kernels` has measured better ones.
TILING = Tiling(rows=2, simdgroups=2)


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_router_logits",
        input_names=["x", "weight"],
        output_names=["logits"],
        source=_SOURCE,
    )


def router_logits_reference(x: mx.array, weight: mx.array) -> mx.array:
    """:func:`router_logits` in MLX ops; also takes gradients."""
    return x.astype(mx.float32) @ weight.astype(mx.float32).T


def router_logits(
    x: mx.array,
    weight: mx.array,
    *,
    training: bool = False,
    tiling: Tiling | None = None,
) -> mx.array:
    """Products and sums in float32, whatever dtypes come in.

    Args:
        x: (..., D).
        weight: (E, D). The kernel reads it once, as it is stored; the reference
            makes a float32 copy, which only many tokens pay for.
        training: take the form that has a gradient.
        tiling: experts a simdgroup, and simdgroups a threadgroup; else the measured.

    Returns:
        Logits (..., E), float32.
    """
    experts, dims = weight.shape
    tokens = x.size // dims
    if training or not 0 < tokens <= MAX_TOKENS or not _common.can_run_metal():
        return router_logits_reference(x, weight)
    rows, simdgroups = tiling or best_tiling("router_logits", TILING)
    threads = 32 * simdgroups
    groups = -(-experts // (rows * simdgroups))
    return _kernel()(
        inputs=[x, weight],
        template=[
            ("E", experts),
            ("D", dims),
            ("N", tokens),
            ("ROWS", rows),
            ("SIMDGROUPS", simdgroups),
        ],
        grid=(threads * groups, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], experts)],
        output_dtypes=[mx.float32],
    )[0]


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token, 896 experts."""
    experts, dims = 896, 7168
    weight = mx.array(rng.standard_normal((experts, dims), np.float32) * dims**-0.5)
    x = mx.array(rng.standard_normal((1, 1, dims), np.float32))
    return {"x": x.astype(mx.bfloat16), "weight": weight.astype(mx.bfloat16)}
