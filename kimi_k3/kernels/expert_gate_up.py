"""Gate, up and SiTU of the routed experts of a few tokens, in one launch."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ._common import can_run_metal, constants, runs_on_cpu
from ._quantized_rows import (
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
from .situ import situ

_INPUTS = ["x", "ids", "weights", "split", "betas"]
_MATRICES = [
    f"{bank}_{matrix}{part}"
    for bank in ("hi", "lo")
    for matrix in ("gate", "up")
    for part in ("", "_scales", "_biases")
]

#: A threadgroup has one routed pair, so its whole branch is one bank's.
_SOURCE = """
    uint slot = threadgroup_position_in_grid.z;
    uint lane = thread_index_in_simdgroup;
    uint row0 = (threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROWS;
    if (row0 >= uint(INNER)) return;

    float gate[ROWS];
    float up[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      gate[r] = 0.0f;
      up[r] = 0.0f;
    }
    if (weights[slot] != 0.0f) {
      const device T* row = x + ulong(slot / TOP_K) * WIDTH;
      int expert = int(ids[slot]);
      if (expert < split) {
        kimi_k3_two_rows<HI_MODE, HI_BITS, HI_GROUP, WIDTH, ROWS>(
            row, hi_gate, hi_gate_scales, hi_gate_biases, hi_up, hi_up_scales, hi_up_biases,
            ulong(expert), row0, uint(INNER), lane, gate, up);
      } else {
        kimi_k3_two_rows<LO_MODE, LO_BITS, LO_GROUP, WIDTH, ROWS>(
            row, lo_gate, lo_gate_scales, lo_gate_biases, lo_up, lo_up_scales, lo_up_biases,
            ulong(expert - split), row0, uint(INNER), lane, gate, up);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      float g = simd_sum(gate[r]);
      float u = simd_sum(up[r]);
      if (LINEAR) u = betas[1] * metal::precise::tanh(u / betas[1]);
      g = betas[0] * metal::precise::tanh(g / betas[0]) / (1.0f + metal::precise::exp(-g));
      if (lane == 0 && row0 + r < uint(INNER)) hidden[ulong(slot) * INNER + row0 + r] = g * u;
    }
"""

#: Where no measurement of the chip at hand says otherwise.
TILING = Tiling(rows=4, simdgroups=2)


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_expert_gate_up",
        input_names=[*_INPUTS, *_MATRICES],
        output_names=["hidden"],
        source=_SOURCE,
        header=HEADER,
    )


def expert_gate_up_reference(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    gate: BankedMatrix,
    up: BankedMatrix,
    *,
    beta: float,
    linear_beta: float | None,
    tiling: Tiling | None = None,
) -> mx.array:
    """:func:`expert_gate_up` in MLX ops."""
    if runs_on_cpu():
        x = x.astype(mx.float32)
    rows = x[:, None, None, :]
    hidden = situ(
        gate.multiply(rows, ids).astype(mx.float32),
        up.multiply(rows, ids).astype(mx.float32),
        beta,
        linear_beta,
    )
    return mx.where(weights[..., None] != 0, hidden.squeeze(-2), 0.0)


def expert_gate_up(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    gate: BankedMatrix,
    up: BankedMatrix,
    *,
    beta: float,
    linear_beta: float | None,
    tiling: Tiling | None = None,
) -> mx.array:
    """``SiTU(gate(x), up(x))`` of every routed pair.

    Args:
        x: what the experts read, (tokens, width).
        ids: expert ids, (tokens, K).
        weights: routing weights, (tokens, K), float32; a slot of weight 0 reads nothing.
        gate, up: (experts, inner, width) in two banks, or in one.
        beta, linear_beta: of :func:`situ`.
        tiling: how the kernel divides its rows, by default as measured on this chip;
            changes no value.

    Returns:
        (tokens, K, inner), float32; 0 in slots of weight 0.
    """
    arguments = x, ids, weights, gate, up
    if not (can_run_metal() and reads_gate_up(x, gate, up)):
        return expert_gate_up_reference(
            *arguments, beta=beta, linear_beta=linear_beta, tiling=tiling
        )
    tiling = tiling or best_tiling("expert_gate_up", TILING)
    tokens, per_token = ids.shape
    betas = constants(beta, linear_beta or 1.0)
    inputs = [x, ids, weights, scalar(gate.split), betas]
    for pair in zip(gate.both(), up.both(), strict=True):
        inputs += [array for matrix in pair for array in matrix.buffers()]
    rows = tiling.rows * tiling.simdgroups
    return _kernel()(
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("WIDTH", gate.columns),
            ("INNER", gate.rows),
            ("TOP_K", per_token),
            ("LINEAR", linear_beta is not None),
            ("ROWS", tiling.rows),
            ("SIMDGROUPS", tiling.simdgroups),
            *slot_template(ids, weights),
            *gate.template(),
        ],
        grid=(32, -(-gate.rows // rows) * tiling.simdgroups, tokens * per_token),
        threadgroup=(32, tiling.simdgroups, 1),
        output_shapes=[(tokens, per_token, gate.rows)],
        output_dtypes=[mx.float32],
    )[0]


def reads_gate_up(x: mx.array, gate: BankedMatrix, up: BankedMatrix) -> bool:
    """Whether the kernel takes these: known widths, gate and up stored alike."""
    alike = [bank.format for bank in gate.banks] == [bank.format for bank in up.banks]
    known = gate.readable() and up.readable() and x.dtype in FLOATS
    return alike and known and x.size >= LEAST_BUFFER


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token, 16 experts of 3584 → 3072."""
    width, inner = 3584, 3072
    x = mx.array(rng.standard_normal((1, width), np.float32))
    return {
        "x": x.astype(mx.bfloat16),
        **example_slots(rng),
        "gate": example_matrix(rng, inner, width),
        "up": example_matrix(rng, inner, width),
        "beta": 4.0,
        "linear_beta": 25.0,
    }
