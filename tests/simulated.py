"""The package's kernels where there is no GPU: simulated, counted, in any order.

``simulated_kernels`` (a fixture of conftest.py) hands out :func:`run_kernels`::

    with simulated_kernels(order="reverse", poison=0) as launches:
        got = select_experts(...)
    assert launches.count("kimi_k3_select_experts") == 1

On a machine with a Metal GPU the same lines run and count the real kernels.
"""

import importlib
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from metalsim import VARIANTS, MetalSimError, Options, SimulatedKernel, toolchain

import kimi_k3.kernels

SANITIZERS = ("address", "thread", "memory")

real_metal_kernel = mx.fast.metal_kernel


@dataclass(frozen=True)
class Launch:
    """One launch: what ``metal_kernel`` and then its kernel were called with."""

    definition: dict[str, Any]
    call: dict[str, Any]

    @property
    def name(self) -> str:
        return self.definition["name"]

    @property
    def inputs(self) -> dict[str, Any]:
        names = self.definition["input_names"]
        return dict(zip(names, self.call["inputs"], strict=True))


@dataclass
class Launches:
    """What ran inside the context, in order."""

    records: list[Launch] = field(default_factory=list)

    def count(self, name: str) -> int:
        return len(self.of(name))

    def of(self, name: str) -> list[Launch]:
        return [launch for launch in self.records if launch.name == name]

    @property
    def names(self) -> set[str]:
        return {launch.name for launch in self.records}


def has_gpu() -> bool:
    """Whether the real kernels can run here."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def why_no_simulator() -> str | None:
    """Why kernels cannot be simulated here; None where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "Metal kernels are simulated on x86-64 Linux only"
    try:
        toolchain.compiler()
    except MetalSimError as error:
        return str(error)
    return None


def why_no_kernels() -> str | None:
    """Why kernels cannot run here, not even simulated; None where they can."""
    return None if has_gpu() else why_no_simulator()


def need_kernels(required: bool, reason: str | None) -> None:
    """Skip the test for ``reason``, if any, or fail it where it is ``required``."""
    if reason and required:
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def _modules() -> list[ModuleType]:
    """All modules of the package, those of the kernels loaded if need be."""
    folder = kimi_k3.kernels
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(module.name)
    return [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "kimi_k3"]


def _forget_kernels(modules: list[ModuleType]) -> None:
    """Empty the caches that hold kernel objects: every cached function of kernels/."""
    for module in modules:
        for value in list(vars(module).values()):
            home = getattr(value, "__module__", None) or ""
            if home.startswith("kimi_k3.kernels") and hasattr(value, "cache_clear"):
                value.cache_clear()


MakeKernel = Callable[..., Callable[..., Any]]


@contextmanager
def _kernels_made_by(make: MakeKernel, **switches: bool) -> Iterator[Launches]:
    """``mx.fast.metal_kernel`` is ``make``, and notes launches.

    ``switches`` are functions of kernels/_common.py and what they return, everywhere.
    """
    launches = Launches()
    modules = _modules()

    def metal_kernel(**definition: Any) -> Callable[..., Any]:
        run = make(**definition)

        def call(**call: Any) -> Any:
            launches.records.append(Launch(definition, call))
            return run(**call)

        return call

    with ExitStack() as stack:
        stack.callback(_forget_kernels, modules)
        _forget_kernels(modules)
        stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", metal_kernel))
        for name, value in switches.items():
            for module in modules:
                if hasattr(module, name):
                    patch = mock.patch.object(module, name, return_value=value)
                    stack.enter_context(patch)
        yield launches


@contextmanager
def run_kernels(options: Options | None = None, **changes: Any) -> Iterator[Launches]:
    """Kernels run inside, by the package's own rules; ``changes`` are Options' fields."""
    options = options or Options(**changes)

    def simulate(**definition: Any) -> SimulatedKernel:
        return SimulatedKernel(**definition, options=options)

    make: Any = real_metal_kernel if has_gpu() else simulate
    with _kernels_made_by(make, can_run_metal=True) as launches:
        yield launches


@contextmanager
def trace_kernels() -> Iterator[Launches]:
    """The way of a GPU through the package, for a look at the lazy graph only.

    A launch gives arrays that depend on its inputs and must not be evaluated.
    """

    def stub(*_: Any, **__: Any) -> Callable[..., list[mx.array]]:
        def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any):
            shapes = zip(output_shapes, output_dtypes, strict=True)
            outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
            return mx.depends(outputs, [x for x in inputs if isinstance(x, mx.array)])

        return call

    with _kernels_made_by(stub, can_run_metal=True, runs_on_cpu=False) as launches:
        yield launches


@contextmanager
def no_references() -> Iterator[None]:
    """Inside, a call of any kernel's reference is an AssertionError."""
    with ExitStack() as stack:
        for module in _modules():
            for name in [n for n in vars(module) if n.endswith("_reference")]:
                error = AssertionError(f"{name} ran in place of its kernel")
                patch = mock.patch.object(module, name, side_effect=error)
                stack.enter_context(patch)
        yield


def _bits(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def same_in_every_order(call: Callable[[], Any]) -> Any:
    """``call()`` under three thread orders, each with other garbage in memory.

    Returns its array, or tuple of arrays; they must be the same bits in all three.
    """
    results = []
    for options in VARIANTS:
        with run_kernels(options) as launches:
            result = call()
            mx.eval(result)
        assert launches.records, "no kernel ran: the reference answered"
        results.append(result)
    first, *others = results
    arrays = [first] if isinstance(first, mx.array) else list(first)
    for options, other in zip(VARIANTS[1:], others, strict=True):
        other = [other] if isinstance(other, mx.array) else list(other)
        for i, (one, two) in enumerate(zip(arrays, other, strict=True)):
            assert _bits(one) == _bits(two), f"output {i} differs with {options}"
    return first


def under_sanitizers(call: Callable[[], Any]) -> None:
    """``call()`` once under each sanitizer; a fault is a MetalSimError.

    Use the smallest shapes: programs are slow here. On a GPU it only runs.
    """
    for sanitizer in SANITIZERS:
        with run_kernels(sanitizer=sanitizer) as launches:
            mx.eval(call())
        assert launches.records, "no kernel ran: the reference answered"
