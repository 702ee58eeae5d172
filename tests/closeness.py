"""How tests compare arrays: relative to the largest reference value, NaN first."""

from typing import Any

import mlx.core as mx
import numpy as np


def to_numpy(array: Any) -> np.ndarray:
    """An MLX or NumPy array as NumPy; bfloat16 becomes float32."""
    if isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:
            array = array.astype(mx.float32)
        return np.array(array)
    return np.asarray(array)


def relative_error(got: Any, want: Any) -> float:
    """max|got - want| / max|want|, in float64; shapes must be equal."""
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    assert want.size, "nothing to compare: the reference is empty"
    got, want = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(want).max()
    assert scale > 0, "nothing to compare: the reference is zero everywhere"
    return float(np.abs(got - want).max() / scale)


def assert_close(
    got: Any, want: Any, *, rel: float, where: str = "result", dtype: Any = None
) -> float:
    """Assert max|got - want| <= rel * max|want| and return the ratio.

    NaN and infinity are looked for first, then shapes are compared, then (if ``dtype``
    is given) the MLX dtype of ``got``. ``where`` names what is compared.
    """
    for name, array in (("result", to_numpy(got)), ("reference", to_numpy(want))):
        bad = array.size - int(np.isfinite(array).sum())
        assert bad == 0, f"{where}: {bad} of {array.size} {name} values are not finite"
    if dtype is not None:
        assert got.dtype == dtype, f"{where}: dtype {got.dtype}, wanted {dtype}"
    shapes = to_numpy(got).shape, to_numpy(want).shape
    assert shapes[0] == shapes[1], f"{where}: shape {shapes[0]}, wanted {shapes[1]}"
    error = relative_error(got, want)
    assert error <= rel, f"{where}: relative error {error:.2e}, allowed {rel:.0e}"
    return error


def assert_same(got: Any, want: Any, *, where: str) -> None:
    """Assert that both arrays have one dtype, one shape and the very same bits."""
    if isinstance(got, mx.array) and isinstance(want, mx.array):
        assert got.dtype == want.dtype, f"{where}: {got.dtype}, wanted {want.dtype}"
    got, want = to_numpy(got), to_numpy(want)
    assert got.dtype == want.dtype, f"{where}: {got.dtype}, wanted {want.dtype}"
    assert got.shape == want.shape, f"{where}: {got.shape}, wanted {want.shape}"
    differ = int((got != want).sum())
    assert differ == 0, f"{where}: {differ} of {want.size} values differ"
