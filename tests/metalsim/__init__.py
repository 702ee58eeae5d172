"""Runs the sources of ``mx.fast.metal_kernel`` on a Linux CPU (README.md)."""

from .kernel import (
    VARIANTS,
    Kernel,
    Options,
    SimulatedKernel,
    assert_deterministic,
    run_metal_kernel,
)
from .toolchain import MetalSimError

__all__ = [
    "VARIANTS",
    "Kernel",
    "MetalSimError",
    "Options",
    "SimulatedKernel",
    "assert_deterministic",
    "run_metal_kernel",
]
