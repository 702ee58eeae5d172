"""The simulator against MLX: its generated text, and kernels of mlx-lm that work."""

import importlib
import sys
from dataclasses import asdict
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from closeness import relative_error
from kernel_cases import CASES
from metalsim import (
    Kernel,
    MetalSimError,
    Options,
    SimulatedKernel,
    assert_deterministic,
    run_metal_kernel,
)
from metalsim.kernel import generate
from simulated import real_metal_kernel, run_kernels

PROBES = {
    "template and every kind of argument": (
        Kernel(
            "probe",
            ["a", "n", "few"],
            ["out", "flags"],
            "uint i = thread_position_in_grid.x;\n"
            "out[i] = a[i] * n + few[0] + a_shape[0] + a_strides[0] + a_ndim + K;\n"
            "flags[i] = simdgroups_per_threadgroup > 1;",
            "inline int two() { return 2; }\n",
        ),
        [mx.arange(16).astype(mx.float16), mx.array(3), mx.ones((3,))],
        [mx.float32, mx.bool_],
        [("T", mx.bfloat16), ("K", 4), ("B", True)],
    ),
    "no template, two dimensions, 8 elements": (
        Kernel(
            "plain",
            ["x"],
            ["y"],
            "y[thread_index_in_threadgroup] = x[x_shape[1]] + simd_sum(1);",
        ),
        [mx.zeros((2, 4), mx.uint8)],
        [mx.bfloat16],
        [],
    ),
    "atomic outputs": (
        Kernel("counts", ["x"], ["n"], "n[0]; x[0];", atomic_outputs=True),
        [mx.zeros((9,), mx.int64)],
        [mx.uint32],
        [("N", 33)],
    ),
}


@pytest.mark.parametrize("name", list(PROBES))
def test_the_generated_text_is_the_one_mlx_prints(
    name: str, capfd: pytest.CaptureFixture[str]
):
    kernel, inputs, dtypes, template = PROBES[name]
    function, _ = generate(kernel, inputs, dtypes, template)

    definition = asdict(kernel)
    call = {
        "inputs": inputs,
        "output_shapes": [(16,)] * len(dtypes),
        "output_dtypes": dtypes,
        "grid": (16, 1, 1),
        "threadgroup": (16, 1, 1),
        "template": template,
    }
    assert function.text.strip() == printed_by_mlx(definition, call, capfd)


def printed_by_mlx(
    definition: dict[str, Any], call: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> str:
    """The text that MLX's own generator makes for a launch, which does not run."""
    kernel: Any = real_metal_kernel(**definition)

    def launch(*inputs: mx.array) -> Any:
        return kernel(**call | {"inputs": list(inputs), "verbose": True})

    capfd.readouterr()
    # Exporting builds the launch, and prints its text, without running it.
    mx.export_function("/dev/null", launch, *call["inputs"])
    printed = capfd.readouterr().out.split("```\n")[1]
    return printed.split("\ntemplate [[host_name")[0].strip()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("name", list(CASES))
def test_our_kernels_are_what_mlx_prints(name: str, capfd: pytest.CaptureFixture[str]):
    module = importlib.import_module(f"kimi_k3.kernels.{name}")
    with run_kernels() as launches:
        getattr(module, name)(**CASES[name]())
    (launch,) = launches.records
    kernel, call = Kernel(**launch.definition), launch.call
    function, _ = generate(
        kernel, call["inputs"], call["output_dtypes"], call["template"]
    )
    assert function.text.strip() == printed_by_mlx(launch.definition, call, capfd)


def simulated_copy(module: str, options: Options) -> Any:
    """A fresh copy of ``module`` whose kernels are simulated."""

    def metal_kernel(*args: Any, **kwargs: Any) -> SimulatedKernel:
        return SimulatedKernel(*args, options=options, **kwargs)

    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(mx.fast, "metal_kernel", metal_kernel),
        mock.patch.object(mx.metal, "is_available", return_value=True),
    ):
        sys.modules.pop(module, None)
        return importlib.import_module(module)


def delta_rule_inputs(dtype: mx.Dtype) -> list[mx.array]:
    """Query, key, value, decay, beta and state of a small gated delta rule."""
    rng = np.random.default_rng(1)
    B, T, H, K, V = 2, 3, 2, 128, 64

    def normal(*shape: int) -> mx.array:
        return mx.array(0.1 * rng.standard_normal(shape).astype(np.float32))

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    decay = mx.array(rng.uniform(0.5, 1, (B, T, H, K)).astype(np.float32))
    beta = mx.array(rng.uniform(0, 1, (B, T, H)).astype(np.float32))
    floats = [x.astype(dtype) for x in (q, k, v, beta)]
    return [*floats[:3], decay, floats[3], normal(B, H, V, K)]


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("sanitizer", [None, "address", "thread", "memory"])
def test_a_kernel_of_mlx_lm_equals_its_ops(sanitizer: str | None):
    """A kernel known to work on GPUs: right numbers, and no false alarm."""
    dtype = mx.bfloat16 if sanitizer == "address" else mx.float32
    tolerance = 3e-2 if dtype == mx.bfloat16 else 1e-5
    theirs = simulated_copy("mlx_lm.models.gated_delta", Options(sanitizer=sanitizer))
    inputs = delta_rule_inputs(dtype)
    ran = theirs.gated_delta_kernel(*inputs)
    expected = theirs.gated_delta_ops(*inputs)
    for one, two in zip(ran, expected, strict=True):
        assert relative_error(one, two) < tolerance


#: A 32 × 32 output tile; four simdgroups, each with 2 × 2 matrices of 8 × 8.
MATMUL = """
    uint2 tile = uint2(threadgroup_position_in_grid.xy) * 32;
    uint quarter = simdgroup_index_in_threadgroup;
    uint row = quarter / 2 * 16, column = quarter % 2 * 16;
    threadgroup float left[32 * 32];
    threadgroup float right[32 * 32];
    simdgroup_matrix<float, 8, 8> sums[2][2];
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j)
        sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k0 = 0; k0 < K; k0 += 32) {
      for (uint i = thread_index_in_threadgroup; i < 32 * 32; i += 128) {
        uint r = i / 32, c = i % 32;
        left[i] = a[(tile.y + r) * K + k0 + c];
        right[i] = b[(k0 + r) * N + tile.x + c];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int k = 0; k < 32; k += 8) {
        simdgroup_matrix<float, 8, 8> x[2], y[2];
        for (int i = 0; i < 2; ++i) {
          simdgroup_load(x[i], left + (row + i * 8) * 32 + k, 32);
          simdgroup_load(y[i], right + k * 32 + column + i * 8, 32);
        }
        for (int i = 0; i < 2; ++i)
          for (int j = 0; j < 2; ++j)
            simdgroup_multiply_accumulate(sums[i][j], x[i], y[j], sums[i][j]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j)
        simdgroup_store(sums[i][j], c + (tile.y + row + i * 8) * N
            + tile.x + column + j * 8, N);
"""
MATMUL_BARRIER = "      threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def matmul_call() -> tuple[dict[str, Any], mx.array]:
    M, N, K = 64, 32, 64
    rng = np.random.default_rng(4)
    a = mx.array(rng.standard_normal((M, K)).astype(np.float32))
    b = mx.array(rng.standard_normal((K, N)).astype(np.float32))
    call = {
        "inputs": [a, b],
        "template": [("N", N), ("K", K)],
        "grid": (N // 32 * 32, M // 32 * 4, 1),
        "threadgroup": (32, 4, 1),
        "output_shapes": [(M, N)],
        "output_dtypes": [mx.float32],
    }
    return call, a @ b


@pytest.mark.usefixtures("simulator")
def test_simdgroup_matrices():
    call, expected = matmul_call()
    kernel = Kernel("matmul", ["a", "b"], ["c"], MATMUL)
    (c,) = assert_deterministic(kernel, **call)
    assert relative_error(c, expected) < 1e-5


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("removed", [0, 1])
def test_a_tiled_matmul_without_one_of_its_barriers_races(removed: int):
    call, _ = matmul_call()
    parts = MATMUL.split(MATMUL_BARRIER)
    assert len(parts) == 3
    parts[1] = (MATMUL_BARRIER if removed else "") + parts[1]
    parts[1] += "" if removed else MATMUL_BARRIER
    kernel = Kernel("matmul", ["a", "b"], ["c"], "".join(parts))
    with pytest.raises(MetalSimError, match="data race"):
        run_metal_kernel(kernel, Options(sanitizer="thread"), **call)
