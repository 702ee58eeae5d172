"""Let model classes take their GPU paths in a process that has no GPU.

Inside :func:`pretend_gpu` MLX says that it has Metal and that a GPU is the default
device; Metal kernels and ``mx.fast`` ops become one graph node each, which depends on
all their inputs and is never evaluated. Classes must be imported inside it: some build
their kernels at import. What was patched is put back at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from lazy_graph import leaf


class KernelCalls:
    """Every kernel call so far: the arrays it gave and the kernel's name."""

    def __init__(self) -> None:
        self.outputs: list[tuple[mx.array, str]] = []

    def clear(self) -> None:
        self.outputs.clear()

    def names(self) -> dict[str, int]:
        """How often each kernel was called."""
        counts: dict[str, int] = {}
        for name in (name for _, name in self.outputs):
            counts[name] = counts.get(name, 0) + 1
        return counts


def one_node(shapes: Any, dtypes: Any, inputs: Any) -> list[mx.array]:
    """Arrays of these shapes from a single node that depends on ``inputs``."""
    placeholders = [leaf(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    return mx.depends(placeholders, [x for x in inputs if isinstance(x, mx.array)])


@contextmanager
def pretend_gpu() -> Iterator[KernelCalls]:
    """See above; gives the record of kernel calls."""
    calls = KernelCalls()

    def metal_kernel(name: str, *_: Any, **__: Any) -> Callable[..., list[mx.array]]:
        def launch(
            *, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            outputs = one_node(output_shapes, output_dtypes, inputs)
            calls.outputs.append((outputs[0], name))
            return outputs

        return launch

    def same_shape(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return one_node([x.shape], [x.dtype], [x, *args, *kwargs.values()])[0]

    def attention(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        shape = (*q.shape[:-1], v.shape[-1])
        return one_node([shape], [q.dtype], [q, k, v, *kwargs.values()])[0]

    patches: list[tuple[Any, str, Any]] = [
        (mx.metal, "is_available", lambda: True),
        (mx, "default_device", lambda: mx.gpu),
        (mx.fast, "metal_kernel", metal_kernel),
        (mx.fast, "rms_norm", same_shape),
        (mx.fast, "layer_norm", same_shape),
        (mx.fast, "rope", same_shape),
        (mx.fast, "scaled_dot_product_attention", attention),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield calls
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
