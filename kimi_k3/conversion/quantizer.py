"""Affine quantisation with scales and biases fitted to the weights, not to their range.

What comes out is packed as ``mx.quantize(mode="affine")`` packs it, at the same size, so
whatever reads that reads this. In each group of g weights of a row the codes q, the scale
s and the bias b minimise

    Σ h·(w - s·q - b)²    with h the importance of the weight's input channel

where s and b are the bfloat16 values that are stored. With given codes the best s and b
are a line through points (least squares); with given s and b the best codes are the
nearest ones. The two alternate, which ends in a local minimum, so several starts are
tried and, per group, the best is kept. One start is the result of ``mx.quantize``: no
group comes out worse.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..errors import ConversionError
from ..kernels._common import runs_on_cpu
from .code_packing import pack_codes
from .group_fit import best_fit, groups_of, nearest, to_bfloat16

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

#: Weights worked on at once: what a CPU's cache holds, or what keeps a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24

#: The largest magnitude of a weight; above it, sums leave what float32 can hold.
LARGEST = 2.0**120

Quantized = tuple[mx.array, mx.array, mx.array]


def quantize(
    weight: mx.array,
    *,
    bits: int,
    group_size: int,
    importance: mx.array | None = None,
) -> Quantized:
    """Codes, scales and biases of ``weight``, as ``mx.quantize(mode="affine")`` has them.

    The same arguments give the same bits on one machine.

    Args:
        weight: (..., out, in), float32, float16 or bfloat16; groups lie along ``in``.
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128.
        importance: how much a squared error of a weight counts, by input channel, such
            as Σ x² of what the matrix reads: (in,), or (..., in) with one row a matrix.
            0 or more. A group in which all are 0 is fitted as without.

    Returns:
        uint32 codes (..., out, in·bits/32), and scales and biases (..., out,
        in/group_size), bfloat16.

    Raises ConversionError for shapes, types or widths that have no such form, and for
    values that are NaN, infinite or above 2¹²⁰.
    """
    _check(weight, bits, group_size)
    *batch, rows, columns = weight.shape
    mx.eval(weight)
    matrices = weight.reshape(-1, rows, columns)
    weights = _importance_rows(importance, tuple(batch), columns)
    found: list[Quantized] = []
    for index in range(matrices.shape[0]):
        channel = None
        if weights is not None:
            channel = weights[index if weights.shape[0] > 1 else 0]
        for chunk in _chunks(matrices[index], columns):
            part = _quantize_rows(chunk, bits, group_size, channel)
            mx.eval(part)
            found.append(part)
    codes, scales, biases = (
        mx.concatenate(list(arrays)).reshape(*batch, rows, -1)
        for arrays in zip(*found, strict=True)
    )
    return codes, scales, biases


def squared_error(
    weight: mx.array,
    quantized: Quantized,
    *,
    bits: int,
    group_size: int,
    importance: mx.array | None = None,
) -> tuple[float, float]:
    """Σ h·(w - w')², and Σ h·w² to compare with, where w' is what ``quantized`` stands for.

    w' is computed in float32, as ``mx.quantized_matmul`` does. ``weight`` and
    ``importance`` are as :func:`quantize` takes them; without importance h is 1.
    """
    *batch, rows, columns = weight.shape
    weights = _importance_rows(importance, tuple(batch), columns)
    parts = [weight, quantized[0], *(x.astype(mx.float32) for x in quantized[1:])]
    parts = [part.reshape(-1, rows, part.shape[-1]) for part in parts]
    error = energy = 0.0
    for index in range(parts[0].shape[0]):
        channel = None
        if weights is not None:
            channel = weights[index if weights.shape[0] > 1 else 0]
        chunks = zip(*(_chunks(part[index], columns) for part in parts), strict=True)
        for wanted, *stored in chunks:
            wanted = wanted.astype(mx.float32)
            found = mx.dequantize(*stored, group_size=group_size, bits=bits)
            sums = [
                mx.square(x) if channel is None else mx.square(x) * channel
                for x in (wanted - found, wanted)
            ]
            left, right = (np.array(x.sum(axis=-1), np.float64) for x in sums)
            error, energy = error + left.sum(), energy + right.sum()
    return float(error), float(energy)


def _quantize_rows(
    rows: mx.array, bits: int, group_size: int, importance: mx.array | None
) -> Quantized:
    _check_values(rows)
    groups = groups_of(rows, bits, group_size, importance)
    fit = best_fit(rows, groups)
    codes, _ = nearest(groups.values, fit.scale, fit.bias, groups.top)
    return (
        pack_codes(codes.astype(mx.uint32).reshape(rows.shape), bits),
        to_bfloat16(fit.scale, groups.unit).squeeze(-1),
        to_bfloat16(fit.bias, groups.unit).squeeze(-1),
    )


def _check(weight: mx.array, bits: int, group_size: int) -> None:
    if bits not in BITS or group_size not in GROUPS:
        raise ConversionError(
            f"no affine format has {bits} bits in groups of {group_size}; bits can be "
            f"{', '.join(map(str, BITS))}, groups {', '.join(map(str, GROUPS))}."
        )
    if weight.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ConversionError(
            f"weights of type {weight.dtype} cannot be quantised; wanted float32, float16 "
            "or bfloat16."
        )
    if weight.ndim < 2 or weight.size == 0 or weight.shape[-1] % group_size:
        raise ConversionError(
            f"weights of shape {weight.shape} have no groups of {group_size}; wanted (..., "
            f"rows, columns) with columns that {group_size} divides."
        )


def _check_values(rows: mx.array) -> None:
    if not mx.all(mx.abs(rows).astype(mx.float32) <= LARGEST).item():
        raise ConversionError(
            "the weights hold NaN, infinity or values above 2**120, which no scale fits. "
            "Run `kimi-k3 verify` on the source, or download the shard again."
        )


def _importance_rows(
    importance: mx.array | None, batch: tuple[int, ...], columns: int
) -> mx.array | None:
    """(matrices, in) or (1, in) float32, checked."""
    if importance is None:
        return None
    if importance.shape not in ((columns,), (*batch, columns)):
        raise ConversionError(
            f"importance is of shape {importance.shape}; wanted {(columns,)} or "
            f"{(*batch, columns)}, one value an input channel."
        )
    rows = importance.astype(mx.float32).reshape(-1, columns)
    if not mx.all((rows >= 0) & (rows < float("inf"))).item():
        raise ConversionError(
            "importance holds NaN, infinity or values below 0; wanted Σ x² of each input "
            "channel. Calibrate again."
        )
    return rows


def _chunks(matrix: mx.array, columns: int) -> Iterator[mx.array]:
    """Some rows of ``matrix``, which stands for so many ``columns``, after the other."""
    size = _CPU_CHUNK if runs_on_cpu() else _GPU_CHUNK
    rows = max(1, size // columns)
    for start in range(0, matrix.shape[0], rows):
        yield matrix[start : start + rows]
