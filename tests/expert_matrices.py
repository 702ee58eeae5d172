"""Expert matrices of every width, and what the expert kernels must give, in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
from closeness import to_numpy
from oracles import situ

from kimi_k3.kernels._quantized_rows import BankedMatrix, ExpertMatrix

Width = tuple[str, int, int]

#: Every width that MLX stores: mode, bits, group size.
WIDTHS: dict[str, Width] = {
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
    **{
        f"affine{bits}-{group}": ("affine", bits, group)
        for bits in (2, 3, 4, 6, 8)
        for group in (32, 64, 128)
    },
}

DENSE: dict[str, mx.Dtype] = {
    "bf16": mx.bfloat16,
    "f16": mx.float16,
    "f32": mx.float32,
}


def make_matrix(
    name: str,
    experts: int,
    rows: int,
    columns: int,
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.bfloat16,
) -> ExpertMatrix:
    """Random experts stored as ``name`` says; ``dtype`` is that of affine scales."""
    key = mx.random.key(seed)
    weight = mx.random.normal((experts, rows, columns), key=key) * columns**-0.5
    if name in DENSE:
        return ExpertMatrix(weight.astype(DENSE[name]))
    mode, bits, group = WIDTHS[name]
    parts = mx.quantize(weight.astype(dtype), group_size=group, bits=bits, mode=mode)
    return ExpertMatrix(*parts, mode=mode, bits=bits, group_size=group)


def bank_pair(
    high: str, low: str, split: int, experts: int, rows: int, columns: int, **more: Any
) -> BankedMatrix:
    """``split`` experts stored as ``high``, the rest as ``low``; either may be none."""
    seed = more.pop("seed", 0)
    first, second = (
        make_matrix(name, count, rows, columns, seed=seed + i, **more)
        if count
        else None
        for i, (name, count) in enumerate(((high, split), (low, experts - split)))
    )
    return BankedMatrix(first, second, split)


def values(matrix: ExpertMatrix) -> np.ndarray:
    """What a bank stores, as float64 (E, rows, columns)."""
    scales, biases = matrix.scales, matrix.biases
    if scales is None:
        return to_numpy(matrix.weight).astype(np.float64)
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    dense = mx.dequantize(
        matrix.weight,
        scales,
        biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
        dtype=mx.float32,
    )
    return to_numpy(dense).astype(np.float64)


def all_values(banked: BankedMatrix) -> np.ndarray:
    return np.concatenate([values(bank) for bank in banked.banks])


def oracle_gate_up(
    x: Any,
    ids: Any,
    weights: Any,
    gate: BankedMatrix,
    up: BankedMatrix,
    *,
    beta: float,
    linear_beta: float,
) -> np.ndarray:
    """``expert_gate_up`` in float64."""
    gates, ups = all_values(gate), all_values(up)
    x, ids = to_numpy(x).astype(np.float64), to_numpy(ids)
    hidden = np.stack(
        [
            [situ(gates[e] @ row, ups[e] @ row, beta, linear_beta) for e in chosen]
            for row, chosen in zip(x, ids, strict=True)
        ]
    )
    return np.where(to_numpy(weights)[..., None] != 0, hidden, 0.0)


def oracle_down_combine(
    hidden: Any, ids: Any, weights: Any, down: BankedMatrix
) -> np.ndarray:
    """``expert_down_combine`` in float64."""
    downs = all_values(down)
    hidden, ids = to_numpy(hidden).astype(np.float64), to_numpy(ids)
    weights = to_numpy(weights).astype(np.float64)
    return np.stack(
        [
            sum(w * (downs[e] @ h) for h, e, w in zip(*token, strict=True))
            for token in zip(hidden, ids, weights, strict=True)
        ]
    )
