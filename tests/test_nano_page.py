"""benchmarks/nano/README.md shows what the results file holds, and that is as promised."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "nano"), *sys.path])
    return import_module("report")


@pytest.fixture
def result(report: Any) -> dict[str, Any]:
    return json.loads(report.RESULT.read_text("utf-8"))


def test_every_table_is_what_the_file_holds(report: Any, result: dict[str, Any]):
    """If not: python benchmarks/nano/report.py --page"""
    text = (report.HERE / "README.md").read_text("utf-8")
    assert report.filled(text, result) == text
    other = report.filled(text.replace("| bz2 |", "| gzip |"), result)
    assert other == text


def test_three_nanos_resemble_k3(result: dict[str, Any]):
    """Concentration as K3's, and domains of one kind nearer than those of two."""
    shipped, *sisters = result["nanos"].values()
    assert len(sisters) == 2
    assert all(0.45 <= share <= 0.65 for share in shipped["top_quarter"])
    for nano in (shipped, *sisters):
        shares = nano["top_quarter"]
        assert 0.45 <= sum(shares) / len(shares) <= 0.65
        python, c, chinese = map(nano["corpora"].index, ("python", "c", "chinese"))
        code, far = nano["overlap"][python][c], nano["overlap"][python][chinese]
        assert code > far
        assert code > 2 * nano["chance"][python][c]


def test_sisters_are_whole():
    from kimi_k3.build.verify import verify

    for name in ("seed1", "seed2"):
        folder = BENCHMARKS / "nano" / name
        assert verify(folder).passed
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000
