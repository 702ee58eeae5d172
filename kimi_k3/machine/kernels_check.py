"""``kimi-k3 doctor --kernels``: each kernel against its reference, and how fast it is.

A kernel is a module of ``kimi_k3.kernels`` with three functions: the one it is named
after, ``<name>_reference``, and ``example``, which makes arguments of Kimi K3's size.
"""

import importlib
import inspect
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from .. import kernels
from ..kernels import _common
from ..kernels._tuned import Tiling, chip, store_tilings

#: Largest differences allowed, of the largest reference value.
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-2

#: What is tried for kernels that leave their tiling open.
TILINGS = tuple(Tiling(r, s) for r in (1, 2, 4, 8) for s in (1, 2, 4, 8))

#: Bytes of the array whose plain read is the measure, and seconds that a time takes.
READ_BYTES = 2**30
ROUND_SECONDS = 0.05
ROUNDS = 5

HALVES = (mx.bfloat16, mx.float16)


@dataclass(frozen=True)
class KernelResult:
    """One kernel, or only its reference where ``ran_kernel`` is False.

    Attributes:
        error: largest difference with float32 activations, of the largest value; None
            where there was nothing to compare with.
        half_error: the same in the dtypes of the example.
        seconds: of one call in those dtypes.
        bytes: of all arrays in and out.
        tiling: the fastest way to divide the work, if the kernel leaves it open.
    """

    name: str
    ran_kernel: bool
    error: float | None
    half_error: float | None
    seconds: float
    bytes: int
    tiling: Tiling | None = None

    @property
    def passed(self) -> bool:
        """Whether the results are near enough; NaN is not."""
        if self.error is None or self.half_error is None:
            return True
        return self.error <= FLOAT32_TOLERANCE and self.half_error <= HALF_TOLERANCE

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class KernelsReport:
    """What :func:`check_kernels` saw.

    ``read_bandwidth`` is of a plain read, bytes a second; None where no kernel ran.
    """

    chip: str
    read_bandwidth: float | None
    results: tuple[KernelResult, ...]
    stored_in: str | None = None

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        results = [
            asdict(r) | {"passed": r.passed, "bytes_per_second": r.bandwidth}
            for r in self.results
        ]
        return asdict(self) | {"results": results, "passed": self.passed}

    def text(self) -> str:
        """The report for a reader."""
        lines = [f"{self.chip}: no Metal GPU here; the references ran, not the kernels"]
        if self.read_bandwidth:
            speed = f"{self.read_bandwidth / 1e9:.0f} GB/s"
            lines = [f"{self.chip}: a plain read runs at {speed}"]
        heading = f"{'':26}{'error':>9}{'bf16':>9}{'ms':>10}{'GB/s':>8}{'of read':>9}"
        lines += ["", heading]
        lines += [self._line(result) for result in self.results]
        if self.stored_in:
            lines += ["", f"Tilings of this chip are kept in {self.stored_in}"]
        failed = [result.name for result in self.results if not result.passed]
        verdict = f"Wrong results: {', '.join(failed)}. Please report this chip."
        if not failed:
            verdict = "All kernels are right here."
            if not self.read_bandwidth:
                verdict = "No kernel was checked."
        return "\n".join([*lines, "", verdict])

    def _line(self, result: KernelResult) -> str:
        errors = (
            "-" if error is None else f"{error:.1e}"
            for error in (result.error, result.half_error)
        )
        line = f"{result.name:26}" + "".join(f"{error:>9}" for error in errors)
        line += f"{1e3 * result.seconds:10.3f}{result.bandwidth / 1e9:8.1f}"
        if self.read_bandwidth:
            line += f"{result.bandwidth / self.read_bandwidth:9.0%}"
        if result.tiling:
            rows, simdgroups = result.tiling
            line += f"  {rows} rows, {simdgroups} simdgroups"
        return line if result.passed else f"{line}  WRONG"


def check_kernels(file: Path | None = None, *, seed: int = 0) -> KernelsReport:
    """Run, compare, time and tune every kernel; ``file`` is where tilings are kept."""
    metal = _common.can_run_metal()
    results = tuple(check_kernel(m, metal, seed) for m in kernel_modules())
    tilings = {r.name: r.tiling for r in results if r.tiling and r.passed}
    stored = str(store_tilings(tilings, file)) if tilings else None
    speed = read_bandwidth() if metal else None
    return KernelsReport(chip(), speed, results, stored)


def kernel_modules() -> Iterator[ModuleType]:
    """The modules of ``kimi_k3.kernels`` that are kernels with an example."""
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        if hasattr(module, "example"):
            yield module


def check_kernel(module: ModuleType, metal: bool, seed: int = 0) -> KernelResult:
    """Compare and time one kernel, or time its reference where it cannot run."""
    name = module.__name__.rpartition(".")[2]
    kernel: Callable[..., Any] = getattr(module, name)
    arguments = module.example(np.random.default_rng(seed))
    if not metal:
        seconds = seconds_of(lambda: kernel(**arguments), rounds=1)
        size = bytes_of(arguments) + bytes_of(kernel(**arguments))
        return KernelResult(name, False, None, None, seconds, size)

    reference: Callable[..., Any] = getattr(module, f"{name}_reference")
    exact = {key: _widened(value) for key, value in arguments.items()}
    error = compare(kernel(**exact), reference(**exact))
    half_error = compare(kernel(**arguments), reference(**arguments))
    tiling, seconds = None, seconds_of(lambda: kernel(**arguments))
    if "tiling" in inspect.signature(kernel).parameters:
        times = {
            t: seconds_of(lambda t=t: kernel(**arguments, tiling=t)) for t in TILINGS
        }
        tiling = min(times, key=times.__getitem__)
        seconds = times[tiling]
        tuned = compare(kernel(**exact, tiling=tiling), reference(**exact))
        error = float(np.maximum(error, tuned))
    size = bytes_of(arguments) + bytes_of(kernel(**arguments))
    return KernelResult(name, True, error, half_error, seconds, size, tiling)


def compare(got: Any, want: Any) -> float:
    """The largest difference of the outputs, each of its largest value; or NaN."""
    outputs = list(zip(_listed(got), _listed(want), strict=True))
    return float(np.max([_difference(one, two) for one, two in outputs]))


def _listed(outputs: Any) -> list[np.ndarray]:
    """Outputs as float64; slots of a choice in the order of their ids."""
    arrays = [outputs] if isinstance(outputs, mx.array) else list(outputs)
    if not mx.issubdtype(arrays[0].dtype, mx.floating):
        order = mx.argsort(arrays[0], axis=-1)
        arrays = [mx.take_along_axis(array, order, axis=-1) for array in arrays]
    return [np.array(array.astype(mx.float32)).astype(np.float64) for array in arrays]


def _difference(one: np.ndarray, two: np.ndarray) -> float:
    largest = np.abs(two).max() or 1.0
    return float(np.abs(one - two).max() / largest)


def _widened(value: Any) -> Any:
    """A half-precision argument in float32; stored matrices stay what they are."""
    if isinstance(value, mx.array) and value.dtype in HALVES:
        return value.astype(mx.float32)
    return mx.float32 if isinstance(value, mx.Dtype) and value in HALVES else value


def bytes_of(value: Any) -> int:
    """Bytes of all arrays in ``value``, each once."""
    return sum({id(array): array.nbytes for array in _arrays(value)}.values())


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays(part)


def seconds_of(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median seconds of one call, many of them in a queue."""
    mx.eval(call())
    started = time.perf_counter()
    mx.eval(call())
    once = time.perf_counter() - started
    if once > 10 * ROUND_SECONDS:
        return once
    calls = max(1, min(100, int(ROUND_SECONDS / once)))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second of the largest plain read that MLX offers: a sum."""
    array = mx.ones((READ_BYTES // 4,), mx.float32)
    mx.eval(array)
    return array.nbytes / seconds_of(lambda: array.sum())
