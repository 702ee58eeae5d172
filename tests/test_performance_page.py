"""docs/performance.md shows what the results files hold."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.config import TextArgs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that fills the page."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return import_module("performance_page")


def result(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def test_every_table_is_what_its_file_holds(page: Any) -> None:
    """If not: python benchmarks/performance_page.py"""
    text = page.PAGE.read_text()
    assert page.filled(text) == text
    assert page.filled(text.replace("| launches |", "| lunches |")) == text


def test_the_census_keeps_its_words() -> None:
    counted = result("launch_census")
    assert counted["launch_ratio_to_mlx_lm"] <= 0.5
    assert counted["bytes_exact"]


def test_logits_agreed_before_timing(page: Any) -> None:
    error = result("decode")["float32_logits_between_classes"]
    assert error <= page.decode.FLOAT32_LIMIT


def test_long_prompts_reach_their_goals(page: Any) -> None:
    """In the kept run: memory and time at the longest context, outputs throughout."""
    kept = result("long_prompt")
    assert all(kept["met"].values())
    assert all(row["error"] <= page.long_prompt.LIMIT for row in kept["rows"].values())
    assert kept["attention_block_bytes"] == TextArgs.attention_block_bytes
