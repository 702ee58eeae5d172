"""What the simulator must catch: each wrong kernel beside its corrected twin.

A kernel reads ``a`` (64 floats, 0 to 63) and ``few`` (2 ones) and writes ``out`` (64).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest
from metalsim import (
    Kernel,
    MetalSimError,
    Options,
    assert_deterministic,
    run_metal_kernel,
)

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
REVERSE = """
threadgroup float s[64];
uint t = thread_position_in_threadgroup.x;
s[t] = a[t];
BETWEEN
out[t] = s[63 - t];
"""


def reverse(between: str) -> str:
    """A kernel that turns ``a`` round, with ``between`` its write and its read."""
    return REVERSE.replace("BETWEEN", between)


#: In both passes: name → (wrong, right, message); ``first`` reads through a pointer.
FIRST = "template <typename T> inline T first(const SPACE T* p) { return p[0]; }\n"
OF_SHARED = "threadgroup float s[4]; s[0] = 1; out[0] = first(s);"
REJECTED_TEXT = {
    "pointer to threadgroup as device": (
        (OF_SHARED, FIRST.replace("SPACE", "device")),
        (OF_SHARED, FIRST.replace("SPACE", "threadgroup")),
        "no matching function",
    ),
    "pointer to device as thread": (
        "const thread float* p = a; out[0] = p[0];",
        "const device float* p = a; out[0] = p[0];",
        "cannot initialize a variable",
    ),
    "small input as device": (
        "const device float* p = few; out[0] = p[0];",
        "const constant float* p = few; out[0] = p[0];",
        "cannot initialize a variable",
    ),
    "write to an input": ("a[0] = 1.0f;", "out[0] = a[0];", "read-only"),
    "double": (
        "double x = a[0]; out[0] = x;",
        "float x = a[0]; out[0] = x;",
        "poisoned",
    ),
    "C library": (
        "out[0] = expf(a[0]);",
        "out[0] = metal::exp(a[0]);",
        "undeclared identifier 'expf'",
    ),
    "std": ("out[0] = std::exp(a[0]);", "out[0] = exp(a[0]);", "poisoned"),
    "misspelt function": (
        "out[0] = metal::rsqrtf(a[0]);",
        "out[0] = metal::rsqrt(a[0]);",
        "no member named 'rsqrtf'",
    ),
    "float to bfloat implicitly": (
        "bfloat16_t x = a[0]; out[0] = x;",
        "bfloat16_t x = static_cast<bfloat16_t>(a[0]); out[0] = x;",
        "no viable conversion from 'const float'",
    ),
    "max of two types": (
        "out[0] = max(a[0], 0);",
        "out[0] = max(a[0], 0.0f);",
        "no matching function",
    ),
    "threadgroup variable in a block": (
        "if (a[0] < 1) { threadgroup float s[4]; s[0] = 1; out[0] = s[0]; }",
        "threadgroup float s[4]; if (a[0] < 1) { s[0] = 1; out[0] = s[0]; }",
        "inside a block, kernel line 1",
    ),
    "lambda": (
        "auto f = [](float x) { return x + 1; }; out[0] = f(a[0]);",
        "float x[2] = {1, 2}; out[0] = x[0];",
        "a lambda",
    ),
    "simd_sum of 64 bits": (
        "out[0] = simd_sum(int64_t(a[0]));",
        "out[0] = simd_sum(int(a[0]));",
        "64-bit",
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault that shows when the kernel runs."""

    wrong: str
    right: str
    message: str
    options: Options = field(default_factory=Options)
    threadgroup: int = 64


ADDRESS, THREAD, MEMORY = (
    Options(sanitizer=s) for s in ("address", "thread", "memory")
)
FAULTS = {
    "read past a buffer": Fault(
        "out[0] = a[a_shape[0]];",
        "out[0] = a[a_shape[0] - 1];",
        "out-of-bounds access to 'a' at byte 256 of 256",
    ),
    "read past a buffer, exactly": Fault(
        "out[0] = a[a_shape[0]];",
        "out[0] = a[a_shape[0] - 1];",
        "heap-buffer-overflow",
        ADDRESS,
    ),
    "write before a buffer": Fault(
        "int i = -1 - int(a[0] > 1e9f); out[i] = 0;",
        "int i = 0; out[i] = 0;",
        "heap-buffer-overflow",
        ADDRESS,
    ),
    "thread array overrun": Fault(
        "float x[4] = {1, 2, 3, 4}; uint i = a_shape[0] / 16; out[0] = x[i];",
        "float x[4] = {1, 2, 3, 4}; uint i = a_shape[0] / 16; out[0] = x[i - 1];",
        "out of bounds",
        ADDRESS,
    ),
    "threadgroup array overrun": Fault(
        "threadgroup float s[32]; s[thread_position_in_threadgroup.x] = 1;",
        "threadgroup float s[64]; s[thread_position_in_threadgroup.x] = 1;",
        "overflow|out of bounds",
        ADDRESS,
    ),
    "missing barrier": Fault(reverse(""), reverse(BARRIER), "data race", THREAD),
    "missing barrier behind a simd_sum": Fault(
        reverse("simd_sum(1.0f);"),
        reverse(f"simd_sum(1.0f); {BARRIER}"),
        "data race",
        THREAD,
    ),
    "barrier that orders no memory": Fault(
        reverse("threadgroup_barrier(mem_flags::mem_none);"),
        reverse(BARRIER),
        "data race",
        THREAD,
    ),
    "simdgroup barrier across simdgroups": Fault(
        reverse("simdgroup_barrier(mem_flags::mem_threadgroup);"),
        reverse("simdgroup_barrier(mem_flags::mem_threadgroup);").replace(
            "63 - t", "t ^ 31"
        ),
        "data race",
        THREAD,
    ),
    "two threadgroups write one place": Fault(
        "if (thread_index_in_threadgroup == 0) out[0] = 1;",
        "if (thread_index_in_threadgroup == 0) "
        "out[threadgroup_position_in_grid.x] = 1;",
        "data race",
        THREAD,
        threadgroup=32,
    ),
    "uninitialised variable": Fault(
        "float x; if (a[0] > 1e9f) x = 1; out[thread_position_in_grid.x] = x;",
        "float x = 0; if (a[0] > 1e9f) x = 1; out[thread_position_in_grid.x] = x;",
        "uninitialised",
        MEMORY,
    ),
    "uninitialised threadgroup memory": Fault(
        "threadgroup float s[64]; uint t = thread_position_in_grid.x; "
        "out[t] = s[t] > 0 ? 1 : 2;",
        "threadgroup float s[64]; uint t = thread_position_in_grid.x; s[t] = 0; "
        "out[t] = s[t] > 0 ? 1 : 2;",
        "use-of-uninitialized-value|uninitialised",
        MEMORY,
    ),
    "output never written": Fault(
        "uint t = thread_position_in_grid.x; if (t < 63) out[t] = 1;",
        "uint t = thread_position_in_grid.x; out[t] = 1;",
        "'out' byte 252 was never written",
        MEMORY,
    ),
    "barrier that some threads skip": Fault(
        f"if (thread_position_in_grid.x < 40) {BARRIER} out[0] = 1;",
        f"{BARRIER} out[0] = 1;",
        "divergent threadgroup_barrier",
    ),
    "two barriers at once": Fault(
        f"if (thread_position_in_grid.x < 32) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}",
        BARRIER,
        "different barriers",
    ),
    "divergent simd_sum": Fault(
        "if (thread_index_in_simdgroup < 8) out[0] = simd_sum(1.0f);",
        "out[0] = simd_sum(1.0f);",
        "divergent simdgroup operation",
    ),
    "33 KB of threadgroup memory": Fault(
        "threadgroup float s[8448]; s[0] = 1;",
        "threadgroup float s[8192]; s[0] = 1;",
        "Metal allows 32768",
    ),
    "endless loop": Fault(
        "volatile int x = 1; while (x) {}",
        "out[0] = 1;",
        "still running",
        Options(timeout=1),
    ),
}


def kernel_of(source: str | tuple[str, str]) -> Kernel:
    source, header = source if isinstance(source, tuple) else (source, "")
    return Kernel("test", ["a", "few"], ["out"], source + "\n// a_shape", header)


def call_of(threadgroup: int = 64) -> dict[str, Any]:
    return {
        "inputs": [mx.arange(64, dtype=mx.float32), mx.ones((2,))],
        "grid": (64, 1, 1),
        "threadgroup": (threadgroup, 1, 1),
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
    }


pytestmark = pytest.mark.usefixtures("simulator")


@pytest.mark.parametrize("name", list(REJECTED_TEXT))
def test_a_wrong_text_does_not_compile(name: str):
    wrong, right, message = REJECTED_TEXT[name]
    with pytest.raises(MetalSimError, match=message):
        run_metal_kernel(kernel_of(wrong), Options(), **call_of())
    run_metal_kernel(kernel_of(right), Options(), **call_of())


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_reported(name: str):
    fault = FAULTS[name]
    call = call_of(fault.threadgroup)
    # The strict pass has tests of its own.
    options = replace(fault.options, check_address_spaces=False)
    with pytest.raises(MetalSimError, match=fault.message):
        run_metal_kernel(kernel_of(fault.wrong), options, **call)
    run_metal_kernel(kernel_of(fault.right), options, **call)


@pytest.mark.parametrize(
    "source",
    [
        reverse(""),
        "threadgroup float s[64]; uint t = thread_position_in_threadgroup.x; "
        "out[t] = s[t];",
        "out[0] = float(thread_position_in_grid.x);",
    ],
    ids=["no barrier", "garbage", "last writer"],
)
def test_order_and_garbage_show(source: str):
    with pytest.raises(MetalSimError, match="depends on thread order or on uninit"):
        assert_deterministic(kernel_of(source), **call_of())


def test_a_right_kernel_is_deterministic():
    (out,) = assert_deterministic(kernel_of(reverse(BARRIER)), **call_of())
    assert out.tolist() == list(range(63, -1, -1))


def test_simd_sum_over_active_lanes_only():
    source = """
    float x = 0;
    if (thread_index_in_simdgroup < 8) x = simd_sum(1.0f);
    out[thread_position_in_grid.x] = x + simd_sum(1.0f);
    """
    active = Options(divergence="active")
    (out,) = run_metal_kernel(kernel_of(source), active, **call_of())
    assert out.tolist() == ([40.0] * 8 + [32.0] * 24) * 2


def test_the_largest_threadgroup():
    source = reverse(BARRIER).replace("s[64]", "s[1024]").replace("63 -", "1023 -")
    call: dict[str, Any] = call_of(1024) | {
        "inputs": [mx.arange(1024, dtype=mx.float32), mx.ones((2,))],
        "grid": (1024, 1, 1),
        "output_shapes": [(1024,)],
    }
    (out,) = run_metal_kernel(kernel_of(source), Options(), **call)
    assert out.tolist() == list(range(1023, -1, -1))
    too_large: dict[str, Any] = call | {
        "grid": (2048, 1, 1),
        "threadgroup": (2048, 1, 1),
    }
    with pytest.raises(MetalSimError, match="Metal allows 1024"):
        run_metal_kernel(kernel_of(source), Options(), **too_large)
