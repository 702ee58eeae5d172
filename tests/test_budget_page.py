"""docs/budget.md shows what the results file holds, and that holds what it must."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "cases", "figure"),
    [("budget", "full_size", "damage"), ("predicted_damage", "plans", "kl")],
)
def test_the_page_shows_the_results(
    name: str, cases: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    made = import_module(name)
    result, page = json.loads(made.RESULTS.read_text()), made.PAGE.read_text()
    assert made.filled(page, result) == page
    result[cases][0][figure] += 1
    assert made.filled(page, result) != page


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
