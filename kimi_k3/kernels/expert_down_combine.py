"""Down projection, routing weight and sum over a token's experts, in one launch."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ._common import can_run_metal
from ._quantized_rows import (
    EXAMPLE_EXPERTS,
    FLOATS,
    HEADER,
    LEAST_BUFFER,
    BankedMatrix,
    example_matrix,
    example_slots,
    scalar,
    slot_template,
)
from ._tuned import Tiling, best_tiling

_INPUTS = ["hidden", "ids", "weights", "split"]
_MATRICES = [
    f"{bank}_down{part}" for bank in ("hi", "lo") for part in ("", "_scales", "_biases")
]

#: The simdgroups of a threadgroup share out the slots of one token, and add up at the
#: end, in the order of the simdgroups.
_SOURCE = """
    threadgroup float partial[SIMDGROUPS * ROWS];
    uint token = threadgroup_position_in_grid.z;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    uint row0 = threadgroup_position_in_grid.y * ROWS;

    float totals[ROWS];
    for (int r = 0; r < ROWS; ++r) totals[r] = 0.0f;
    for (uint k = simdgroup; k < uint(TOP_K); k += SIMDGROUPS) {
      uint slot = token * TOP_K + k;
      float weight = weights[slot];
      if (weight != 0.0f) {
        float sums[ROWS];
        for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
        const device float* row = hidden + ulong(slot) * INNER;
        int expert = int(ids[slot]);
        if (expert < split) {
          kimi_k3_rows<HI_MODE, HI_BITS, HI_GROUP, INNER, ROWS>(
              row, hi_down, hi_down_scales, hi_down_biases, ulong(expert), row0, uint(WIDTH), lane, sums);
        } else {
          kimi_k3_rows<LO_MODE, LO_BITS, LO_GROUP, INNER, ROWS>(
              row, lo_down, lo_down_scales, lo_down_biases, ulong(expert - split), row0, uint(WIDTH), lane, sums);
        }
        for (int r = 0; r < ROWS; ++r) totals[r] += weight * sums[r];
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      float total = simd_sum(totals[r]);
      if (lane == 0) partial[simdgroup * ROWS + r] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint r = thread_index_in_threadgroup;
    if (r < uint(ROWS) && row0 + r < uint(WIDTH)) {
      float total = 0.0f;
      for (int s = 0; s < SIMDGROUPS; ++s) total += partial[s * ROWS + r];
      y[ulong(token) * WIDTH + row0 + r] = T(total);
    }
"""

#: Where no measurement of the chip at hand says otherwise.
TILING = Tiling(rows=4, simdgroups=8)


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_expert_down_combine",
        input_names=[*_INPUTS, *_MATRICES],
        output_names=["y"],
        source=_SOURCE,
        header=HEADER,
    )


def expert_down_combine_reference(
    hidden: mx.array,
    ids: mx.array,
    weights: mx.array,
    down: BankedMatrix,
    dtype: mx.Dtype,
    *,
    tiling: Tiling | None = None,
) -> mx.array:
    """:func:`expert_down_combine` in MLX ops."""
    routed = down.multiply(hidden[..., None, :], ids).squeeze(-2)
    return (routed * weights[..., None]).sum(axis=-2).astype(dtype)


def expert_down_combine(
    hidden: mx.array,
    ids: mx.array,
    weights: mx.array,
    down: BankedMatrix,
    dtype: mx.Dtype,
    *,
    tiling: Tiling | None = None,
) -> mx.array:
    """``Σ weight · down(hidden)`` over the slots of every token.

    Args:
        hidden: of :func:`expert_gate_up`, (tokens, K, inner), float32.
        ids: expert ids, (tokens, K).
        weights: routing weights, (tokens, K), float32; a slot of weight 0 reads nothing.
        down: (experts, width, inner) in two banks, or in one.
        dtype: of the result.
        tiling: how the kernel divides its rows, by default as measured on this chip;
            changes no value of float32 but by the order of the sum.

    Returns:
        (tokens, width), summed in float32.
    """
    arguments = hidden, ids, weights, down, dtype
    if not (can_run_metal() and reads_down(down, dtype)):
        return expert_down_combine_reference(*arguments, tiling=tiling)
    tiling = tiling or best_tiling("expert_down_combine", TILING)
    tokens, per_token = ids.shape
    simdgroups = min(tiling.simdgroups, per_token)
    inputs = [hidden, ids, weights, scalar(down.split)]
    inputs += [array for matrix in down.both() for array in matrix.buffers()]
    return _kernel()(
        inputs=inputs,
        template=[
            ("T", dtype),
            ("WIDTH", down.rows),
            ("INNER", down.columns),
            ("TOP_K", per_token),
            ("ROWS", tiling.rows),
            ("SIMDGROUPS", simdgroups),
            *slot_template(ids, weights),
            *down.template(),
        ],
        grid=(32, -(-down.rows // tiling.rows) * simdgroups, tokens),
        threadgroup=(32, simdgroups, 1),
        output_shapes=[(tokens, down.rows)],
        output_dtypes=[dtype],
    )[0]


def reads_down(down: BankedMatrix, dtype: mx.Dtype) -> bool:
    """Whether the kernel takes these: known widths of enough values."""
    return down.readable() and dtype in FLOATS and down.columns >= LEAST_BUFFER


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token, 16 experts of 3072 → 3584."""
    width, inner = 3584, 3072
    hidden = rng.standard_normal((1, EXAMPLE_EXPERTS, inner), np.float32)
    return {
        "hidden": mx.array(hidden),
        **example_slots(rng),
        "down": example_matrix(rng, width, inner),
        "dtype": mx.bfloat16,
    }
