"""MXFP4 helpers against MLX's own ``mxfp4`` mode and the format's definition."""

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3.checkpoint import mxfp4
from kimi_k3.errors import CheckpointError


def mlx_dequantize(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    weights = mx.dequantize(
        mx.array(packed).view(mx.uint32),
        mx.array(scales),
        group_size=32,
        bits=4,
        mode="mxfp4",
        dtype=mx.float32,
        stream=mx.cpu,  # a GPU may flush the subnormals of scale bytes 0 to 2
    )
    return np.array(weights)


def every_code_under_every_scale() -> tuple[np.ndarray, np.ndarray]:
    """All 256 bytes as rows of 16 (a whole group) under each scale but NaN's."""
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 1, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None, None], 16, axis=1)
    return packed, scales


def test_dequantize_equals_mlx_bit_for_bit():
    packed, scales = every_code_under_every_scale()
    ours, theirs = mxfp4.dequantize(packed, scales), mlx_dequantize(packed, scales)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_swapped_nibbles_would_be_seen():
    packed, scales = every_code_under_every_scale()
    swapped = (packed >> 4) | (packed << 4)
    assert (mxfp4.dequantize(swapped, scales) != mlx_dequantize(packed, scales)).any()


def test_dequantize_by_hand():
    packed = np.zeros((1, 16), dtype=np.uint8)
    packed[0, 0] = 0x1F  # low nibble first: -6, then 0.5
    values = mxfp4.dequantize(packed, np.array([[128]], dtype=np.uint8))
    assert values[0, :3].tolist() == [-12.0, 1.0, 0.0]
    smallest = mxfp4.dequantize(packed, np.array([[0]], dtype=np.uint8))
    assert smallest[0, 0] == -6 * 2.0**-127
    largest = mxfp4.dequantize(packed, np.array([[254]], dtype=np.uint8))
    assert np.isneginf(largest[0, 0])
    assert largest[0, 1] == 0.5 * 2.0**127


@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 3e5])
def test_quantize_is_nearest(scale):
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((7, 96)) * scale).astype(np.float32)
    packed, scales = mxfp4.quantize(weights)
    assert packed.shape == (7, 48)
    assert scales.shape == (7, 3)
    values = mxfp4.dequantize(packed, scales)
    steps = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=-1)
    table = steps[..., None] * mxfp4._VALUES
    nearest = np.abs(weights[..., None] - table).min(axis=-1)
    np.testing.assert_allclose(np.abs(weights - values), nearest, rtol=1e-5, atol=0)


def test_quantize_returns_what_fits_exactly():
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (5, 32), dtype=np.uint8)
    packed[:, ::16] = 0x77  # a 6 in each group, so the scale is the smallest possible
    scales = rng.integers(100, 140, (5, 2), dtype=np.uint8)
    again = mxfp4.quantize(mxfp4.dequantize(packed, scales))
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scales)


def test_quantize_rounds_ties_to_the_even_code():
    row = np.zeros((1, 32), dtype=np.float32)
    row[0, :8] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    values = mxfp4.dequantize(*mxfp4.quantize(row))
    assert values[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


def test_quantize_zero_group():
    packed, scales = mxfp4.quantize(np.zeros((2, 32), dtype=np.float32))
    assert not mxfp4.dequantize(packed, scales).any()


def test_bad_input_is_named():
    codes = np.zeros((2, 16), dtype=np.uint8)
    with pytest.raises(CheckpointError, match=r"\(2, 16\).*scales have shape \(1, 1\)"):
        mxfp4.dequantize(codes, np.zeros((1, 1), dtype=np.uint8))
    with pytest.raises(CheckpointError, match="255, which means NaN"):
        mxfp4.dequantize(codes, np.full((2, 1), 255, dtype=np.uint8))
    with pytest.raises(CheckpointError, match="uint8, not int8"):
        mxfp4.dequantize(codes.view(np.int8), np.zeros((2, 1), dtype=np.uint8))
    with pytest.raises(CheckpointError, match="row of 48 weights"):
        mxfp4.quantize(np.zeros((1, 48)))
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        mxfp4.quantize(np.full((1, 32), np.inf))
