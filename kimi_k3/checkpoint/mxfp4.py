"""MXFP4 in NumPy: 4-bit E2M1 codes with one E8M0 scale for 32 weights of a row.

A byte holds two codes, the earlier weight in the low nibble. A scale byte ``s`` stands
for 2^(s-127); 255 is NaN. Loading never comes here: MLX's ``mxfp4`` mode has the same
encoding, so stored bytes are reinterpreted. This is for making and checking
checkpoints. Source: OCP Microscaling Formats (MX) specification 1.0.
"""

import numpy as np

from ..errors import CheckpointError

GROUP = 32

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_SCALE_BIAS = 127
_SCALE_NAN = 255


def dequantize(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 values of uint8 ``packed`` (..., n/2) with ``scales`` (..., n/32).

    Returns (..., n). Raises CheckpointError if the shapes do not belong together or a
    scale is NaN.
    """
    if packed.dtype != np.uint8 or scales.dtype != np.uint8:
        raise CheckpointError(
            f"MXFP4 codes and scales are uint8, not {packed.dtype} and {scales.dtype}."
        )
    columns = 2 * packed.shape[-1]
    if scales.shape != (*packed.shape[:-1], columns // GROUP) or columns % GROUP:
        raise CheckpointError(
            f"MXFP4 codes of shape {packed.shape} hold rows of {columns} weights and "
            f"need one scale for {GROUP} of them; the scales have shape {scales.shape}."
        )
    if (scales == _SCALE_NAN).any():
        raise CheckpointError(
            f"An MXFP4 scale byte is {_SCALE_NAN}, which means NaN: a damaged file."
        )
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, GROUP)
    exponents = scales.astype(np.int32)[..., None] - _SCALE_BIAS
    # The largest code overflows float32 to infinity at scale 2^127, as in MLX.
    with np.errstate(over="ignore"):
        values = np.ldexp(_VALUES[codes], exponents)
    return values.reshape(*packed.shape[:-1], columns)


def quantize(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearest MXFP4 of finite ``weights`` (..., n); ties go to the even code.

    Returns ``(packed, scales)``, uint8 (..., n/2) and (..., n/32). The scale of a group
    is the smallest power of two under which its largest weight stays within 6.
    """
    columns = weights.shape[-1]
    if columns % GROUP:
        raise CheckpointError(
            f"A row of {columns} weights is not a multiple of the MXFP4 group {GROUP}."
        )
    if not np.isfinite(weights).all():
        raise CheckpointError("Weights that are infinite or NaN have no MXFP4 form.")
    groups = weights.astype(np.float64).reshape(*weights.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    # frexp gives m 2^e with m in [0.5, 1): 2^e bounds it, 2^(e-1) only at m = 0.5.
    mantissa, exponent = np.frexp(largest / _MAGNITUDES[-1])
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    scales = np.clip(exponent + _SCALE_BIAS, 0, _SCALE_NAN - 1).astype(np.uint8)
    scaled = np.ldexp(groups, _SCALE_BIAS - scales.astype(np.int32)[..., None])
    below = np.searchsorted(_MIDPOINTS, np.abs(scaled), side="left")
    above = np.searchsorted(_MIDPOINTS, np.abs(scaled), side="right")
    codes = np.where(below % 2 == 0, below, above).astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    pairs = codes.reshape(*weights.shape[:-1], columns // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales
