"""Expert matrices of every width, and what the expert kernels must give, in float64."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from closeness import relative_error, to_numpy
from metalsim import MetalSimError
from oracles import situ
from simulated import run_kernels

from kimi_k3.kernels._quantized_rows import BankedMatrix, ExpertMatrix

Width = tuple[str, int, int]

#: Every width that MLX stores: mode, bits, group size.
WIDTHS: dict[str, Width] = {
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
    **{
        f"affine{bits}-{group}": ("affine", bits, group)
        for bits in (2, 3, 4, 5, 6, 8)
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


def values(banked: BankedMatrix, expert: int) -> np.ndarray:
    """What is stored of one expert, as float64 (rows, columns)."""
    low = expert >= banked.split
    matrix = banked.low if low else banked.high
    assert matrix is not None
    place = expert - banked.split if low else expert
    weight, scales, biases = (
        None if array is None else array[place]
        for array in (matrix.weight, matrix.scales, matrix.biases)
    )
    assert weight is not None
    if scales is None:
        return to_numpy(weight).astype(np.float64)
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    dense = mx.dequantize(
        weight,
        scales,
        biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
        dtype=mx.float32,
    )
    return to_numpy(dense).astype(np.float64)


def oracle_gate_up(
    x: Any,
    ids: Any,
    weights: Any,
    gate: BankedMatrix,
    up: BankedMatrix,
    *,
    beta: float,
    linear_beta: float | None,
) -> np.ndarray:
    """``expert_gate_up`` in float64."""
    x = to_numpy(x).astype(np.float64)
    ids, weights = to_numpy(ids), to_numpy(weights)
    hidden = np.zeros((*ids.shape, gate.rows))
    for expert in np.unique(ids):
        taken = (ids == expert) & (weights != 0)
        rows = x[np.nonzero(taken)[0]]
        gates, ups = rows @ values(gate, expert).T, rows @ values(up, expert).T
        hidden[taken] = situ(gates, ups, beta, linear_beta)
    return hidden


def oracle_down_combine(
    hidden: Any, ids: Any, weights: Any, down: BankedMatrix
) -> np.ndarray:
    """``expert_down_combine`` in float64."""
    hidden = to_numpy(hidden).astype(np.float64)
    ids, weights = to_numpy(ids), to_numpy(weights).astype(np.float64)
    routed = np.zeros((*ids.shape, down.rows))
    for expert in np.unique(ids):
        taken = ids == expert
        routed[taken] = hidden[taken] @ values(down, expert).T
    return (routed * weights[..., None]).sum(axis=-2)


def neighbours() -> list[tuple[str, str]]:
    """Every width once, two and two: one for each bank."""
    names = [*WIDTHS, *DENSE]
    return [(names[i], names[(i + 1) % len(names)]) for i in range(0, len(names), 2)]


def routed_slots(tokens: int, slots: int, experts: int) -> tuple[mx.array, mx.array]:
    """Ids, some of them repeated, and weights, some of them 0, (tokens, slots)."""
    keys = mx.random.split(mx.random.key(100 * tokens + slots), 2)
    ids = mx.random.randint(0, experts, (tokens, slots), key=keys[0])
    weights = mx.random.uniform(shape=(tokens, slots), key=keys[1])
    return ids.astype(mx.uint32), mx.where(weights < 0.15, 0.0, weights)


def is_wrong(call: Callable[[], mx.array], want: np.ndarray) -> bool:
    """Whether a kernel with a fault is found out: by its values, or by the simulator."""
    try:
        with run_kernels() as launches:
            got = call()
    except MetalSimError:
        return True
    assert launches.records, "no kernel ran: the reference answered"
    return relative_error(mx.nan_to_num(got), want) > 1e-2
