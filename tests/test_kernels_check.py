"""``kimi-k3 doctor --kernels``: what it compares, times, tunes and tells."""

import importlib
import json
import math
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3 import kernels
from kimi_k3.cli import main
from kimi_k3.kernels import _common, _tuned
from kimi_k3.kernels._tuned import Tiling, best_tiling, chip, read_tilings
from kimi_k3.machine import kernels_check
from kimi_k3.machine.kernels_check import (
    KernelsReport,
    bytes_of,
    check_kernel,
    check_kernels,
    compare,
    kernel_modules,
)

SOURCE = """
uint i = thread_position_in_grid.x;
y[i] = static_cast<T>(FACTOR * float(x[i]));
"""
TILING = Tiling(rows=2, simdgroups=2)


def twice_module(source: str = SOURCE.replace("FACTOR", "2.0f")) -> ModuleType:
    """A kernel like those of the package: doubles ``x``, with a tiling to choose."""
    module: Any = ModuleType("kimi_k3.kernels.twice")

    def twice(x: mx.array, *, tiling: Tiling = TILING) -> mx.array:
        module.tilings.append(tiling)
        if not _common.can_run_metal():
            return module.twice_reference(x)
        kernel: Any = mx.fast.metal_kernel(
            name="kimi_k3_twice", input_names=["x"], output_names=["y"], source=source
        )
        return kernel(
            inputs=[x],
            template=[("T", x.dtype), ("ROWS", tiling.rows)],
            grid=(x.size, 1, 1),
            threadgroup=(32 * tiling.simdgroups, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )[0]

    def example(rng: np.random.Generator) -> dict[str, Any]:
        x = mx.array(rng.standard_normal(64, np.float32))
        return {"x": x.astype(mx.bfloat16)}

    module.tilings = []
    module.twice = twice
    module.twice_reference = lambda x: x * 2
    module.example = example
    return module


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small reads, few tilings, and a file of our own, which is returned."""
    file = tmp_path / "cache" / "kernels.json"
    monkeypatch.setattr(kernels_check, "READ_BYTES", 2**16)
    monkeypatch.setattr(kernels_check, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(kernels_check, "ROUNDS", 1)
    monkeypatch.setattr(kernels_check, "TILINGS", (TILING, Tiling(1, 2)))
    monkeypatch.setattr(_tuned, "FILE", file)
    best_tiling.cache_clear()
    return file


@pytest.fixture
def only_twice(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = twice_module()
    monkeypatch.setattr(kernels_check, "kernel_modules", lambda: iter([module]))
    return module


def test_every_kernel_can_be_checked():
    names = [info.name for info in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"kimi_k3.kernels.{name}") for name in names]
    with_reference = {
        module.__name__
        for name, module in zip(names, modules, strict=True)
        if hasattr(module, f"{name}_reference")
    }
    checked = {module.__name__ for module in kernel_modules()}
    assert with_reference
    assert checked == with_reference


def test_without_metal_the_references_run(
    only_twice: ModuleType, quick: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_common, "can_run_metal", lambda: False)
    report = check_kernels()
    (result,) = report.results
    assert report.passed
    assert not result.ran_kernel
    assert result.error is None
    assert result.seconds > 0
    assert "no Metal GPU here; the references ran" in report.text()
    assert "No kernel was checked." in report.text()
    assert not quick.exists()


def test_a_right_kernel_passes_and_is_tuned(
    only_twice: Any, quick: Path, simulated_kernels: Callable[..., Any]
):
    with simulated_kernels() as launches:
        report = check_kernels()
    (result,) = report.results
    assert launches.count("kimi_k3_twice")
    assert result.error == result.half_error == 0
    assert result.bytes == 2 * 64 * 2
    assert set(only_twice.tilings) == set(kernels_check.TILINGS)
    assert result.tiling
    assert result.tiling in kernels_check.TILINGS
    assert read_tilings(quick) == {chip(): {"twice": result.tiling}}
    assert report.stored_in == str(quick)
    text = report.text()
    assert "All kernels are right here." in text
    assert f"{result.tiling.rows} rows, {result.tiling.simdgroups} simdgroups" in text
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


@pytest.mark.parametrize("factor", ["2.001f", "NAN"])
def test_a_wrong_kernel_is_named_and_not_tuned(
    factor: str,
    quick: Path,
    monkeypatch: pytest.MonkeyPatch,
    simulated_kernels: Callable[..., Any],
):
    module = twice_module(SOURCE.replace("FACTOR", factor))
    monkeypatch.setattr(kernels_check, "kernel_modules", lambda: iter([module]))
    with simulated_kernels():
        report = check_kernels()
    assert not report.passed
    assert "WRONG" in report.text()
    assert "Wrong results: twice." in report.text()
    assert not quick.exists()


@pytest.mark.parametrize("name", ["router_logits", "select_experts"])
def test_kernels_of_the_package_pass(name: str, simulated_kernels: Callable[..., Any]):
    """The others take longer, and have tests of their own at this size."""
    module = importlib.import_module(f"kimi_k3.kernels.{name}")
    with simulated_kernels() as launches:
        result = check_kernel(module, metal=True)
    assert launches.count(f"kimi_k3_{name}")
    assert result.passed
    assert result.error is not None


def test_choices_are_compared_in_the_order_of_their_ids():
    ids, weights = mx.array([[3, 1, 2]]), mx.array([[0.3, 0.1, 0.2]])
    turned = mx.array([[1, 2, 3]]), mx.array([[0.1, 0.2, 0.3]])
    assert compare((ids, weights), turned) == 0
    other = mx.array([[1, 2, 3]]), mx.array([[0.1, 0.3, 0.2]])
    assert compare((ids, weights), other) > 0.1
    assert math.isnan(compare(mx.array([1.0, math.nan]), mx.array([1.0, 2.0])))


def test_bytes_count_an_array_once():
    x = mx.zeros((4,))
    assert bytes_of({"a": x, "b": [x, mx.zeros((2,), mx.uint8)], "n": 3}) == 18


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"x": {"y": [1]}}', '{"x": {"y": [0, 2]}}', '{"x": 3}']
)
def test_a_damaged_file_is_named_and_replaced(damage: str, quick: Path):
    quick.parent.mkdir()
    quick.write_text(damage)
    with pytest.warns(UserWarning, match="does not hold kernel tilings"):
        assert best_tiling("twice", TILING) == TILING
    _tuned.store_tilings({"twice": Tiling(8, 4)})
    assert best_tiling("twice", TILING) == Tiling(8, 4)
    assert best_tiling("other", TILING) == TILING


def test_other_chips_keep_their_choices(quick: Path):
    quick.parent.mkdir()
    quick.write_text('{"another chip": {"twice": [1, 1]}}')
    _tuned.store_tilings({"twice": Tiling(8, 4)})
    _tuned.store_tilings({"thrice": Tiling(2, 4)})
    mine = {"twice": Tiling(8, 4), "thrice": Tiling(2, 4)}
    assert read_tilings(quick) == {"another chip": {"twice": (1, 1)}, chip(): mine}


@pytest.mark.parametrize("json_wanted", [False, True])
def test_the_command(
    json_wanted: bool, only_twice: ModuleType, capsys: pytest.CaptureFixture[str]
):
    arguments = ["doctor", "--kernels", *(["--json"] if json_wanted else [])]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    if json_wanted:
        assert json.loads(out)["results"][0]["name"] == "twice"
    else:
        assert "twice" in out


def test_the_command_fails_with_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wrong = kernels_check.KernelResult("twice", True, 0.5, 0.0, 1e-3, 100)
    report = KernelsReport("a chip", 1e9, (wrong,))
    monkeypatch.setattr(kernels_check, "check_kernels", lambda: report)
    assert main(["doctor", "--kernels"]) == 1
    assert "WRONG" in capsys.readouterr().out
