"""The comparison behind docs/host-tests.md sees what speaks against the package."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).parents[1] / "benchmarks" / "host_tests" / "compare.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("host_tests_compare", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(**outcomes: str) -> SimpleNamespace:
    """Outcomes by test; ``failed:why`` gives the message too."""
    parts = {name: value.partition(":") for name, value in outcomes.items()}
    return SimpleNamespace(
        outcomes={name: part[0] for name, part in parts.items()},
        messages={name: part[2] for name, part in parts.items() if part[2]},
    )


def test_only_a_pass_that_is_lost_is_a_regression():
    before = run(
        a="passed", b="passed", c="passed", d="passed", e="failed:x", f="passed"
    )
    after = run(
        a="passed", b="failed:y", c="skipped", d="timeout", e="passed", g="passed"
    )
    found = load().compare(before, after)
    assert found.regressions == ["b", "c", "d", "f"]
    assert set(found.differences) == {"b", "c", "d", "e", "f", "g"}
    assert found.differences["f"]["with"] == "missing"
    assert found.differences["b"]["message"] == "y"


def test_what_fails_in_both_is_told_apart_by_its_message():
    before = run(a="failed:no Metal", b="failed:1 != 2", c="skipped:GPU only")
    after = run(a="failed:no Metal", b="failed:1 != 3", c="skipped:GPU only")
    found = load().compare(before, after)
    assert found.fail_alike == {"a": "no Metal"}
    assert set(found.differences) == {"b"}
    assert found.skipped == {"GPU only": ["c"]}
    assert found.regressions == []


def test_subtests_are_counted_apart():
    outcomes = {"T::a": "passed", "T::a [one]": "passed", "T::a [two]": "failed"}
    counts = load().count(outcomes)
    assert counts == {"passed": 1, "failed": 0, "skipped": 0, "subtests": 2}
