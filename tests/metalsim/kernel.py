"""Runs kernels of ``mx.fast.metal_kernel`` on the CPU, called as MLX calls them."""

import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import signature, toolchain, translation
from .signature import Parameter
from .toolchain import MetalSimError

ORDERS = {"forward": 0, "reverse": 1, "random": 2}

#: Exit codes and quietness of the sanitizers.
SANITIZER_SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    "MSAN_OPTIONS": "exitcode=77",
}


@dataclass(frozen=True)
class Options:
    """How a kernel runs.

    Attributes:
        order: of threadgroups, simdgroups and lanes: forward, reverse or random.
        seed: of the random order.
        sanitizer: None, address, thread or memory.
        divergence: what a simdgroup operation that some lanes miss means: ``error``,
            or ``active`` for Metal's rule that only the present lanes count.
        poison: byte that fills uninitialised memory.
        check_address_spaces: also type-check with real address spaces.
        timeout: seconds.
    """

    order: str = "forward"
    seed: int = 0
    sanitizer: str | None = None
    divergence: str = "error"
    poison: int = 0xFF
    check_address_spaces: bool = True
    timeout: float = 600


#: Three orders with three kinds of garbage; a right kernel gives the same bits in all.
VARIANTS = (
    Options(),
    Options(order="reverse", poison=0x00),
    Options(order="random", seed=1, poison=0x3F),
)


@dataclass(frozen=True)
class Kernel:
    """The arguments of ``mx.fast.metal_kernel``."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    atomic_outputs: bool = False


def _to_bytes(array: mx.array) -> bytes:
    if not array.size:
        return b""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def _from_bytes(data: bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if not data:
        return mx.zeros(shape, dtype)
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)


def _side_bytes(array: mx.array, kind: str) -> bytes:
    """The _shape, _strides or _ndim argument of a row-contiguous array."""
    if kind == "ndim":
        return np.int32(array.ndim).tobytes()
    if kind == "shape":
        return np.array(array.shape, np.int32).tobytes()
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    return np.array(strides, np.int64).tobytes()


def _run_program(
    program: Path,
    first_line: str,
    buffers: Sequence[tuple[str, str, int]],
    data: Sequence[bytes],
    timeout: float,
) -> bytes:
    """Run ``program`` on (name, kind, bytes) ``buffers``; the bytes of all outputs."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        job, given, results = (Path(folder) / n for n in ("job", "data", "results"))
        lines = [f"{name} {kind} {size}" for name, kind, size in buffers]
        job.write_text("\n".join([f"{first_line} {len(lines)}", *lines]))
        with given.open("wb") as file:
            file.writelines(data)
        try:
            done = subprocess.run(
                [program, job, given, results],
                capture_output=True,
                text=True,
                env=os.environ | SANITIZER_SETTINGS,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise MetalSimError(f"kernel still running after {timeout} s") from None
        if done.returncode:
            ended = f"kernel process ended with {done.returncode}"
            raise MetalSimError(done.stderr[:4000] or ended)
        return results.read_bytes()


def generate(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: signature.Template,
) -> tuple[signature.Function, list[Parameter]]:
    """The function MLX would compile for this call, and its arguments."""
    arguments = signature.parameters(
        kernel.source,
        list(zip(kernel.input_names, inputs, strict=True)),
        list(zip(kernel.output_names, output_dtypes, strict=True)),
        kernel.atomic_outputs,
    )
    function = signature.generate(
        kernel.name,
        kernel.source,
        kernel.header,
        inputs,
        output_dtypes,
        template,
        arguments,
    )
    return function, arguments


def run_metal_kernel(
    kernel: Kernel,
    options: Options,
    *,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    template: signature.Template | None = None,
    init_value: float | None = None,
) -> list[mx.array]:
    """The outputs of one launch, or a MetalSimError."""
    inputs = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
    mx.eval(inputs)
    function, arguments = generate(kernel, inputs, output_dtypes, template or ())
    text = translation.cplusplus_source(function, arguments)
    program = toolchain.compile_program(
        text, options.sanitizer, options.check_address_spaces
    )

    sizes = [
        math.prod(shape) * dtype.size
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]
    buffers, data = [], []
    for p in arguments:
        if p.kind != "output":
            array = inputs[p.index]
            side = p.kind != "data"
            data.append(_side_bytes(array, p.kind) if side else _to_bytes(array))
            buffers.append((p.name, "i", len(data[-1])))
            continue
        if init_value is not None:
            shape, dtype = output_shapes[p.index], output_dtypes[p.index]
            data.append(_to_bytes(mx.full(shape, init_value, dtype)))
        kind = "o" if init_value is None else "z"
        buffers.append((p.name, kind, sizes[p.index]))

    numbers = [*grid, *threadgroup, ORDERS[options.order], options.seed]
    numbers += [int(options.divergence == "active"), options.poison]
    first_line = " ".join(map(str, numbers))
    results = _run_program(program, first_line, buffers, data, options.timeout)
    outputs, at = [], 0
    for size, shape, dtype in zip(sizes, output_shapes, output_dtypes, strict=True):
        outputs.append(_from_bytes(results[at : at + size], shape, dtype))
        at += size
    return outputs


def assert_deterministic(
    kernel: Kernel, options: Options | None = None, **call: Any
) -> list[mx.array]:
    """The outputs, if they are the same bits in all of :data:`VARIANTS`."""
    variants = [
        replace(options or v, order=v.order, seed=v.seed, poison=v.poison)
        for v in VARIANTS
    ]
    first, *others = (run_metal_kernel(kernel, v, **call) for v in variants)
    for variant, other in zip(variants[1:], others, strict=True):
        for name, one, two in zip(kernel.output_names, first, other, strict=True):
            if _to_bytes(one) != _to_bytes(two):
                raise MetalSimError(
                    f"output '{name}' depends on thread order or on uninitialised "
                    f"memory ({variant.order}, poison {variant.poison:#x})"
                )
    return first


class SimulatedKernel:
    """Stands in for the object that ``mx.fast.metal_kernel`` returns."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
        *,
        options: Options | None = None,
    ):
        if not ensure_row_contiguous:
            raise MetalSimError(f"{name}: only row-contiguous inputs are simulated")
        self.kernel = Kernel(
            name, input_names, output_names, source, header, atomic_outputs
        )
        self.options = options or Options()

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: signature.Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        return run_metal_kernel(
            self.kernel,
            self.options,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=template,
            init_value=init_value,
        )
