"""docs/prompt-cache.md shows what its results file holds, and advises as that says."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import _parse_size

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


def test_turns_are_what_the_page_says(page: Any, result: dict[str, Any]):
    """Two requests a turn, of ten turns or three; two turns less one without a tool."""
    for name, row in result["conversations"].items():
        turns = 3 if name.startswith("eight agents") else result["turns"]
        for requests in row["each"]:
            assert len(requests) in ((2 * turns,) if turns == 3 else (20, 18))
        if "changed" in row:
            (requests,) = row["each"]
            start = requests.index(row["changed"][0])
            assert requests[start + len(row["changed"])] == row["next"]
    table = page.changes_table(result)
    assert "| 6 | effort changed for one turn |" in table
    assert "| 7 | effort changed for one turn: the next |" in table
    assert "| 5 | fifth question edited |" in table
    assert "| 10 | last answer again |" in table


def test_entries_that_fit(page: Any):
    """44 × 0.449 GB are below 20 GB, 45 are not; four of 4.07 GB, and not five."""
    row = page.memory_table({}).splitlines()[-1]
    assert row == "| entries that fit in 20 GB | 44 | 29 | 14 | 4 | 2 |"


def test_the_command_that_the_page_counts_for(page: Any):
    serving = (page.PAGE.parent / "serving.md").read_text("utf-8")
    assert f"--prompt-cache-size 64 --prompt-cache-bytes {page.BOUND}GB" in serving
    assert "--decode-concurrency 2 --prompt-concurrency 1" in serving


def test_how_mlx_lm_reads_a_size(page: Any):
    assert _parse_size(f"{page.BOUND}GB") == page.BOUND * 10**9
    assert _parse_size("20") == 20
    with pytest.raises(KeyError):
        _parse_size("20GiB")


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
