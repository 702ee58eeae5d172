"""docs/quality.md shows what the results file holds; what the file must hold."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _on_path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "quality.json").read_text())


def test_page_shows_the_results_file(result: dict[str, Any]) -> None:
    """If not: python benchmarks/quality.py --page"""
    page = import_module("quality_page")
    text = page.PAGE.read_text()
    assert page.filled(text, result) == text
    result = json.loads(json.dumps(result))
    result["goals"][0]["ratio"]["value"] += 1
    assert page.filled(text, result) != text


def test_budget_predicts_no_more_than_any_plan_by_rule(result: dict[str, Any]) -> None:
    """By the way that chose it, and in the same bytes: what the search promises."""
    cases = import_module("quality_cases")
    rows = [row for row in result["builds"] if row["part"] == "sizes"]
    checked = 0
    for budget in (row for row in rows if row["plan"].startswith("budget")):
        way = budget["plan"].removeprefix("budget by ")
        same = [
            row
            for row in rows
            if (row["seed"], row["size"]) == (budget["seed"], budget["size"])
        ]
        for row in same:
            assert row["bytes"] <= row["limit"] == budget["limit"]
            if row["plan"] in cases.FIXED:
                assert budget["predicted"][way] <= row["predicted"][way]
                checked += 1
    assert checked


def test_goals_say_what_was_measured(result: dict[str, Any]) -> None:
    kl = {
        (row["seed"], row["size"], row["plan"]): row["kl"]["value"]
        for row in result["builds"]
        if row["part"] == "sizes"
    }
    budget = import_module("quality_cases").BUDGET
    assert result["goals"]
    for row in result["goals"]:
        mine = kl[row["seed"], row["size"], budget]
        ratio = mine / kl[row["seed"], row["size"], row["plan"]]
        assert row["ratio"]["value"] == pytest.approx(ratio, rel=2e-5)
        assert row["met"] == (row["ratio"]["value"] <= row["goal"])


def test_a_missed_goal_comes_with_correlations(
    result: dict[str, Any],
) -> None:
    """A missed goal is told with correlations, and at least two criteria were tried."""
    chosen = {row["plan"] for row in result["builds"] if row["part"] == "sizes"}
    assert len({name for name in chosen if name.startswith("budget by ")}) >= 2
    assert {"within a size", "all"} <= set(result["rank_correlation"]["scopes"])
    assert result["rank_correlation"]["ways"]


@pytest.mark.parametrize(
    ("kl", "expected"),
    [([1.0, 2.0, 3.0, 4.0], 1.0), ([4.0, 3.0, 2.0, 1.0], -1.0), ([1, 3, 2, 4], 0.8)],
)
def test_rank_correlation(kl: list[float], expected: float) -> None:
    rows = [
        {"build": str(n), "predicted": {"way": n}, "kl": {"value": value}}
        for n, value in enumerate(kl)
    ]
    # The same build a second time tells nothing more.
    rows.append(rows[0])
    found = import_module("quality_ranks")._spearman(rows, "way")
    assert found == pytest.approx(expected, rel=1e-12)


def test_equal_values_share_a_rank() -> None:
    ranks = import_module("quality_ranks")._ranks([5.0, 1.0, 5.0, 9.0])
    assert ranks.tolist() == [1.5, 0.0, 1.5, 3.0]


def test_a_budget_plan_worse_than_a_rule_is_refused() -> None:
    """The assertion that the run makes of every budget plan can fail."""
    from kimi_k3.checkpoint.folder import read_config
    from kimi_k3.nano import NANO_FOLDER
    from kimi_k3.planning.assumed_saliency import assumed_table
    from kimi_k3.planning.budget_plan import budget_plan
    from kimi_k3.planning.damage import Damage
    from kimi_k3.planning.plan_sizes import SourceSizes

    subject = import_module("quality_subject").Subject
    sizes = SourceSizes.of(read_config(NANO_FOLDER))
    table = assumed_table(sizes.args.text_config)
    way = Damage.of_criterion(table, "reap_sum", None, sizes)
    wide = dict.fromkeys(sizes.classes, 16)
    good = budget_plan(way, sizes, memory=2_600_000, fixed_bits=wide)
    nano = SimpleNamespace(seed=0, sizes=sizes, table=table)
    subject.assert_best(nano, good, way, 2_600_000)
    poor = budget_plan(way, sizes, memory=2_400_000, fixed_bits=wide)
    with pytest.raises(AssertionError, match="predicts"):
        subject.assert_best(nano, poor, way, 2_600_000)
    with pytest.raises(AssertionError, match="limit"):
        subject.assert_best(nano, good, way, 2_400_000)
