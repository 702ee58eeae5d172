"""What every kernel needs to know about the device it runs on."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import mlx.core as mx


def can_run_metal() -> bool:
    """Whether Metal kernels can run: the one switch for all of them."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def runs_on_cpu() -> bool:
    """Whether ops go to MLX's CPU back end, which has other strengths than a GPU."""
    return mx.default_device() == mx.cpu


@cache
def constants(*values: float) -> mx.array:
    """Numbers as one float32 array, made once: a new one is a copy at every launch."""
    return mx.array(values, dtype=mx.float32)


def compiled_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fuse ``function`` with ``mx.compile`` on a GPU, where launches cost.

    On the CPU it runs op by op: fusing there calls a C++ compiler at first use.
    """
    fused = mx.compile(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if runs_on_cpu() else fused)(*args, **kwargs)

    return call
