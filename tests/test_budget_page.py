"""docs/budget.md shows what the results file holds, and that holds what it must."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_page_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    budget = import_module("budget")
    result, page = json.loads(budget.RESULTS.read_text()), budget.PAGE.read_text()
    assert budget.filled(page, result) == page
    result["full_size"][0]["damage"] += 1
    assert budget.filled(page, result) != page


def test_goals_are_met() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "budget.json").read_text())
    for case in result["full_size"]:
        assert case["cpu_seconds"] < 10
        assert case["solver_gap"] < 1e-3
        assert case["gap"] < (0.01 if "bytes_per_token" in case else 1e-3)
    for case in [*result["full_size"], *sum(result["nano"].values(), [])]:
        assert case["bound"] <= case["damage"]
        assert case["damage"] <= min([*case["by_rule"].values(), 1e9])
        assert case["damage"] <= min([*case["at_8_bits"].values(), 1e9])
