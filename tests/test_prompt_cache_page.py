"""docs/prompt-cache.md shows what its results file holds, and advises as that says."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that fills the page."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return import_module("prompt_cache_page")


@pytest.fixture
def result(page: Any) -> dict[str, Any]:
    return json.loads(page.RESULT.read_text("utf-8"))


def test_every_table_is_what_the_file_holds(page: Any, result: dict[str, Any]):
    """If not: python benchmarks/prompt_cache_page.py"""
    text = page.PAGE.read_text("utf-8")
    assert page.filled(text, result) == text
    assert page.filled(text.replace("| with a seed |", "| seeded |"), result) == text


def test_totals_are_those_of_the_requests(result: dict[str, Any]):
    for row in result["conversations"].values():
        requests = [request for agent in row["each"] for request in agent]
        assert row["requests"] == len(requests) >= result["turns"]
        assert row["prompt_tokens"] == sum(request["prompt"] for request in requests)
        assert row["read"] == sum(request["read"] for request in requests)
        assert all(0 < request["read"] <= request["prompt"] for request in requests)


def test_with_its_reasoning_only_what_was_added_is_read(result: dict[str, Any]):
    for name in ("reasoning sent back", "reasoning sent back, streamed", "with a seed"):
        (requests,) = result["conversations"][name]["each"]
        known = 0
        for request in requests:
            assert request["read"] == request["prompt"] - known
            known = request["prompt"] + request["answer"]


def test_the_advice_is_what_was_measured(result: dict[str, Any]):
    talks, after = result["conversations"], result["afterwards"]
    read = {name: row["read"] / row["prompt_tokens"] for name, row in talks.items()}
    assert read["reasoning dropped"] < 0.2
    assert read["with a seed, reasoning dropped"] == 1
    eight = [read["eight agents"]]
    eight += [read[f"eight agents, {entries} entries"] for entries in (32, 64, 100)]
    assert eight == sorted(eight, reverse=True)
    assert eight[0] > 4 * eight[-1]
    assert talks["two agents interleaved"]["read"] < 0.1 * sum(
        request["prompt"] for request in talks["two agents interleaved"]["each"][0]
    )
    effort = talks["effort changed for one turn"]
    assert effort["changed"][0]["read"] == effort["changed"][0]["prompt"]
    assert effort["next"]["read"] < effort["next"]["prompt"] / 2
    assert after["last answer again"]["read"] == 1
    assert after["last question again"]["read"] == 1
    for question in ("last", "fifth"):
        edited = after[f"{question} question edited, 100 entries"]["read"]
        assert edited < 50
        assert after[f"{question} question edited"]["read"] > 3 * edited
