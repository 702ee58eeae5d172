"""The launch census counts by its rules, and leaves the process as it found it."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "launch_census.py"


@pytest.fixture
def census(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``census(name)`` imports a module of the census."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent / "census"), *sys.path])
    return import_module


def leaves(*shapes: tuple[int, ...]) -> list[mx.array]:
    arrays = [mx.ones(shape) for shape in shapes]
    mx.eval(arrays)
    return arrays


def test_views_are_not_launches(census: Any) -> None:
    graph = census("lazy_graph")
    (x,) = leaves((4, 6))
    y = x.reshape(2, 12).T[:3]
    read, _ = graph.export([y + y], {})
    assert read.primitives() == {"Add": 1}
    assert read.launches() == 1
    assert read.nodes() > 2


def test_each_call_of_a_compiled_function_is_one_launch(census: Any) -> None:
    graph = census("lazy_graph")
    x, y = leaves((3, 3), (3, 3))

    def both(a: mx.array, b: mx.array) -> mx.array:
        return mx.sigmoid(a) * b + mx.tanh(b)

    fused: Any = cast(Any, mx.compile(both))
    read, _ = graph.export([fused(fused(fused(x, y), y), y)], {})
    assert read.launches() == 3
    assert all("Compiled" in name for name in read.primitives())


def test_a_kernel_with_two_outputs_is_one_launch(census: Any) -> None:
    graph, pretend = census("lazy_graph"), census("pretend_gpu")
    x, y = leaves((3, 3), (3, 3))
    with pretend.pretend_gpu() as calls:
        kernel = cast(Any, mx.fast.metal_kernel("k", ["x", "y"], ["a", "b"], ""))
        a, b = kernel(
            inputs=[x, y, 7],
            output_shapes=[(3,), (4,)],
            output_dtypes=[mx.float32, mx.uint32],
        )
        assert calls.names() == {"k": 1}
    assert (a.shape, b.dtype) == ((3,), mx.uint32)
    assert graph.export([a, b], {})[0].launches() == 1


def test_more_arrays_than_one_export_can_name(census: Any) -> None:
    graph = census("lazy_graph")
    arrays = leaves(*[(2,)] * 2500)
    names = {f"a{i}": array for i, array in enumerate(arrays)}
    read, _ = graph.export([sum(arrays[1:], arrays[0])], names)
    assert read.launches() == 2499
    taken = {name for inputs in read.takes.values() for name in inputs}
    assert set(names) <= taken


def test_bytes_of_a_weight_count_once_for_each_reader(census: Any) -> None:
    graph = census("lazy_graph")
    x, w = leaves((2, 8), (16, 8))
    weights = {"w": graph.Weight(w.nbytes)}

    def bytes_of(result: mx.array) -> int:
        read, _ = graph.export([result], {"w": w})
        return graph.weight_bytes(read, weights, {})

    assert bytes_of(x @ w.T) == w.nbytes
    assert bytes_of(x @ w.T + (x + 1) @ w.T) == 2 * w.nbytes
    assert bytes_of(x * 2) == 0


def test_bytes_of_routed_experts(census: Any) -> None:
    """A gather reads a row for each pair; our kernel those of its bank."""
    graph, pretend = census("lazy_graph"), census("pretend_gpu")
    x, w = leaves((1, 1, 8), (10, 8, 8))
    weights = {"w": graph.Weight(w.nbytes, rows=10, gathered=4, wanted=3)}
    row = w.nbytes // 10
    gathered = mx.gather_mm(x, w, rhs_indices=mx.array([0, 1, 2, 9]))
    read, _ = graph.export([gathered], {"w": w})
    assert graph.weight_bytes(read, weights, {}) == 4 * row

    (y,) = pretend.one_node([(1, 8)], [mx.float32], [x, w, w])
    read, _ = graph.export([y], {"w": w, "y": y})
    assert graph.weight_bytes(read, weights, {"y": "kimi_k3_expert_gate_up"}) == 3 * row
    assert graph.weight_bytes(read, weights, {"y": "other"}) == 10 * row


def test_parts_add_up_and_what_nobody_needs_is_left_out(census: Any) -> None:
    parts = census("parts")

    class Layer:
        def inner(self, x: mx.array) -> tuple[mx.array, mx.array]:
            return x * 2 + 1, mx.exp(x)

        def outer(self, x: mx.array) -> mx.array:
            used, _unused = self.inner(mx.sin(x))
            return used - 1

    (x,) = leaves((4,))
    cutter = parts.Cutter(set(), lambda shape: mx.zeros(shape, mx.uint32))
    with cutter.wrapped([(Layer, "inner", "in"), (Layer, "outer", "out")]):
        cutter.roots.append((mx.cos(Layer().outer(x)), "rest"))
    split = parts.split_graph(cutter, {})
    assert {name: graph.primitives() for name, graph in split.items()} == {
        "in": {"Add": 1, "Multiply": 1},
        "out": {"Subtract": 1, "Sin": 1},
        "rest": {"Cos": 1},
    }
    assert Layer.inner.__qualname__.endswith("Layer.inner")


@pytest.mark.parametrize("fails", [False, True])
def test_the_pretended_gpu_is_gone_afterwards(census: Any, fails: bool) -> None:
    pretend = census("pretend_gpu")

    def state() -> list[Any]:
        names = ("metal_kernel", "rms_norm", "layer_norm", "rope")
        attention = mx.fast.scaled_dot_product_attention
        patched = [getattr(mx.fast, name) for name in names]
        return [*patched, attention, mx.metal.is_available, mx.default_device]

    before = state()
    try:
        with pretend.pretend_gpu():
            assert mx.metal.is_available()
            assert mx.default_device() == mx.gpu
            assert not any(a is b for a, b in zip(before, state(), strict=True))
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert all(a is b for a, b in zip(before, state(), strict=True))


def test_census_of_a_small_k3() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--nano"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bytes_exact"]
    assert result["launch_ratio_to_mlx_lm"] < 0.6
    rows = {name: row["decode"] for name, row in result["rows"].items()}
    for row in rows.values():
        assert row["launches"] == sum(row["launches by part"].values())
    uniform, two_banks = rows["kimi-k3-mlx, uniform"], rows["kimi-k3-mlx, two banks"]
    assert two_banks["launches"] == uniform["launches"]
    moe_layers = 7
    for kernel in ("kimi_k3_expert_gate_up", "kimi_k3_expert_down_combine"):
        assert two_banks["kernels"][kernel] == moe_layers
