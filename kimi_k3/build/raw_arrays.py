"""MLX arrays whose memory files are read into and written from, without a copy.

Files of this package hold little-endian numbers in row order, as MLX does in memory.
"""

import mlx.core as mx
import numpy as np

from ..errors import KimiK3Error

#: Stand-ins that NumPy knows for types that it does not.
_SAME_SIZE = {mx.bfloat16: mx.uint16}


def raw_array(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    """A new array of zeros, and its memory as bytes (N,) to be written to.

    Write before the array is computed with. May be called on any thread.
    """
    kind = _SAME_SIZE.get(dtype, dtype)
    # The CPU's stream: a thread of its own has no work on an accelerator to wait for.
    base = mx.zeros(shape, dtype=kind, stream=mx.cpu)
    array = base if kind == dtype else mx.view(base, dtype, stream=mx.cpu)
    mx.eval(array)
    memory = raw_bytes(base)
    if not memory.flags.writeable:
        raise KimiK3Error("this MLX does not let its arrays be written to; update mlx.")
    return array, memory


def raw_bytes(array: mx.array) -> np.ndarray:
    """The memory of ``array`` as bytes (N,) in row order; evaluates it."""
    if array.dtype in _SAME_SIZE:
        array = mx.view(array, _SAME_SIZE[array.dtype])
    array = mx.contiguous(array)
    mx.eval(array)
    return np.array(array, copy=False).reshape(-1).view(np.uint8)
