"""B39: memory of a conversion, on a small scale: two layers at most, whatever the depth."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.conversion.source_files import SourceFiles

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

#: Peaks of two depths may differ by this.
DEPTH_TOLERANCE = 1.05


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("convert")
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


@pytest.mark.parametrize("plan", ["pass-through", "graded"])
def test_memory_does_not_grow_with_depth(
    benchmark: Any, sources: Any, plan: str, tmp_path: Path
):
    deep, shallow = (
        benchmark.measure(sources[depth], plan, tmp_path / depth)
        for depth in ("deep", "shallow")
    )
    assert deep["written_mb"] > 2 * shallow["written_mb"]
    assert 0 < deep["peak_array_layers"] < 2
    ratio = deep["peak_array_mb"] / shallow["peak_array_mb"]
    assert 1 / DEPTH_TOLERANCE < ratio < DEPTH_TOLERANCE


def test_what_holds_layers_is_found(
    benchmark: Any, sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Broken twin: whatever is read stays in memory until the end."""
    kept, expert = [], SourceFiles.expert

    def keep(source: SourceFiles, layer: int, number: int) -> Any:
        for other in range(benchmark.QUICK.deep.experts):
            kept.append(expert(source, layer, other))
        return kept[-1]

    monkeypatch.setattr(SourceFiles, "expert", keep)
    found = benchmark.measure(sources["shallow"], "graded", tmp_path / "out")
    assert found["peak_array_layers"] > 2


def test_the_results_file_says_what_the_page_says(benchmark: Any):
    result = json.loads(benchmark.RESULTS.read_text())
    page = benchmark.PAGE.read_text()
    assert benchmark.filled(page, result) == page
    assert result["speed"]["share_of_copy"] >= 0.8
    for found in result["memory"].values():
        assert found["peak_array_layers"] <= 2
        assert found["resident_growth_layers"] <= 2
