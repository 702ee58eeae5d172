"""Packs the codes of an affine matrix into the 32-bit words that MLX reads."""

import math

import mlx.core as mx


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """(..., n) codes below 2**bits → (..., n·bits/32) uint32, as ``mx.quantize`` has them.

    Codes follow each other without gaps from the lowest bit of the first word on. ``n``
    is a multiple of 32.
    """
    # So many codes fill whole bytes, or a whole word if they can.
    together = 32 // bits if 32 % bits == 0 else 8 // math.gcd(8, bits)
    nbytes = together * bits // 8
    word = mx.uint32 if nbytes <= 4 else mx.uint64
    shifts = mx.arange(together, dtype=word) * bits
    parts = codes.astype(word).reshape(*codes.shape[:-1], -1, together) << shifts
    words = parts.sum(axis=-1, keepdims=True)
    if nbytes < words.itemsize:
        # Bytes of a word lie lowest first on every machine that MLX runs on.
        words = mx.contiguous(mx.view(words, mx.uint8)[..., :nbytes])
    packed = words.reshape(*codes.shape[:-1], -1)
    return mx.view(packed, mx.uint32)
