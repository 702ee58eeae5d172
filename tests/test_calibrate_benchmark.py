"""Memory of a calibration, on a small scale: whatever the depth, and as foretold."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.build.layer_stream import LayerStream

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

#: Peaks of two depths may differ by this: what MLX frees lags behind what it computes.
DEPTH_TOLERANCE = 1.1

Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("calibrate")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def sources(benchmark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sources")
    form = benchmark.QUICK
    return {
        depth: benchmark.write_checkpoint(folder / depth, getattr(form, depth))
        for depth in ("deep", "shallow")
    }


@pytest.fixture
def measure(benchmark: Any, sources: Any, tmp_path: Path) -> Measure:
    """Runs a case of the benchmark in this process."""

    def run(depth: str, limit: int = 1 << 30) -> Any:
        case = benchmark.Case(depth, True, limit)
        return benchmark.measure(
            sources[depth], benchmark.QUICK, case, tmp_path / depth
        )

    return run


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["on-disk", "held"])
def test_memory_does_not_grow_with_depth(measure: Measure, limit: int):
    deep, shallow = (measure(d, limit=limit) for d in ("deep", "shallow"))
    assert deep["tensors_read"] > 2 * shallow["tensors_read"]
    ratio = deep["peak_array_mb"] / shallow["peak_array_mb"]
    assert 1 / DEPTH_TOLERANCE < ratio < DEPTH_TOLERANCE
    for found in (deep, shallow):
        assert found["tensors_read_twice"] == 0
        assert found["bytes_read"] == found["bytes_expected"]
        assert found["formula_to_measured"] == pytest.approx(1, abs=0.2)


def test_layers_that_stay_would_be_seen(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
):
    kept: list[Any] = []
    layers = LayerStream.layers

    def keeping(self: LayerStream, start: int = 0) -> Any:
        for index, layer, nbytes in layers(self, start):
            kept.append(layer.parameters())
            yield index, layer, nbytes

    monkeypatch.setattr(LayerStream, "layers", keeping)
    found = {}
    for depth in ("deep", "shallow"):
        found[depth] = measure(depth)
        kept.clear()
    deep, shallow = found["deep"], found["shallow"]
    assert deep["peak_array_mb"] / shallow["peak_array_mb"] > DEPTH_TOLERANCE
    assert deep["formula_to_measured"] != pytest.approx(1, abs=0.2)


#: Small layers in which one part of a step takes most of the memory.
ATTENTION = {"heads": 4, "expert": 64, "top_k": 2}
EXPERTS = {"heads": 1, "expert": 128, "top_k": 8}


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "no-moments"])
@pytest.mark.parametrize("part", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_formula_holds_where_steps_are_most_of_it(
    benchmark: Any, tmp_path: Path, part: dict[str, int], moments: bool
):
    shape = benchmark.Shape(4, 2, hidden=128, experts=16, **part)
    steps = {"rows": 4, "length": 128, "step_tokens": 512}
    form = replace(benchmark.QUICK, shallow=shape, **steps)
    source = benchmark.write_checkpoint(tmp_path / "source", shape)
    case = benchmark.Case("shallow", moments, 0)
    found = benchmark.measure(source, form, case, tmp_path / "out")
    cost = benchmark.cost_of(form, case)
    assert cost.memory["activations of a step"] > cost.array_memory / 2
    assert found["formula_to_measured"] == pytest.approx(1, abs=0.2)
    assert found["bytes_read"] == found["bytes_expected"]


def test_reads_are_counted(benchmark: Any, sources: Any):
    with benchmark.Reads() as reads:
        stream = LayerStream(sources["shallow"])
        for _ in range(2):
            with stream.embed():
                pass
    assert reads.twice == 1
    assert reads.nbytes == 2 * stream.nbytes("embedding")


def test_page_shows_the_results_file(benchmark: Any):
    """If not: python benchmarks/calibrate.py --page"""
    page, result = benchmark.PAGE.read_text(), json.loads(benchmark.RESULTS.read_text())
    assert benchmark.filled(page, result) == page
    changed = next(iter(result["cases"].values()))
    changed["peak_array_mb"] += 1
    assert benchmark.filled(page, result) != page


def test_results_file_keeps_its_words(benchmark: Any):
    result = json.loads(benchmark.RESULTS.read_text())
    assert set(result["cases"]) == set(benchmark.CASES)
    for ratio in result["peak_of_deep_to_shallow"].values():
        assert 1 / DEPTH_TOLERANCE < ratio < DEPTH_TOLERANCE
    for found in result["cases"].values():
        assert found["bytes_read"] == found["bytes_expected"]
        assert found["tensors_read_twice"] == 0
        assert found["formula_to_measured"] == pytest.approx(1, abs=0.2)
