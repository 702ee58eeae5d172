"""Float64 truth, part 2: what the bytes of a quantised tensor mean."""

import numpy as np

Array = np.ndarray

#: The sixteen E2M1 codes: sign, two exponent bits, one mantissa bit.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([E2M1, -E2M1])

#: Values that share one scale byte.
GROUP = 32


def e8m0(scale: Array) -> Array:
    """Scale byte s as 2^(s - 127); 255 is NaN."""
    powers = np.exp2(scale.astype(np.float64) - 127.0)
    return np.where(scale == 255, np.nan, powers)


def mxfp4(packed: Array, scale: Array) -> Array:
    """Packed uint8 [..., out, in/2] and scale bytes [..., out, in/32] as values.

    Two codes lie in a byte, the low nibble first.
    """
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1)
    values = E2M1[codes].reshape(*packed.shape[:-1], -1)
    return values * np.repeat(e8m0(scale), GROUP, axis=-1)


def affine(words: Array, scales: Array, biases: Array, bits: int) -> Array:
    """MLX's affine format: uint32 words [..., out, in*bits/32] as values [..., in].

    A row is one little-endian stream of integers q, ``bits`` wide; each of the groups
    of ``scales`` and ``biases`` [..., out, groups] shares value = q * scale + bias.
    """
    stream = np.unpackbits(
        np.ascontiguousarray(words).astype("<u4").view(np.uint8),
        axis=-1,
        bitorder="little",
    )
    digits = stream.reshape(*stream.shape[:-1], -1, bits).astype(np.float64)
    codes = digits @ np.exp2(np.arange(bits))
    group = codes.shape[-1] // scales.shape[-1]
    scale = np.repeat(scales.astype(np.float64), group, axis=-1)
    return codes * scale + np.repeat(biases.astype(np.float64), group, axis=-1)
