"""What two runs of one test file say about each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

PASSED, SKIPPED, MISSING = "passed", "skipped", "missing"


class Outcomes(Protocol):
    """The part of a file's run that is compared."""

    outcomes: dict[str, str]
    messages: dict[str, str]


@dataclass
class Comparison:
    """Counts of both runs, and the tests by what became of them.

    ``regressions`` are the tests that pass without the package and not with it; only
    these speak against it. ``fail_alike`` fail in both runs with one message.
    """

    counts: dict[str, dict[str, int]]
    differences: dict[str, dict[str, str]]
    regressions: list[str]
    fail_alike: dict[str, str]
    skipped: dict[str, list[str]]

    def counts_of_both(self) -> dict[str, tuple[int, int]]:
        """Passed, failed, skipped and subtests, each without and with the package."""
        first, second = self.counts["without"], self.counts["with"]
        return {key: (first[key], second[key]) for key in first}

    def summary(self) -> dict[str, Any]:
        return {
            "without": self.counts["without"],
            "with": self.counts["with"],
            "differences": self.differences,
            "fail_in_both": self.fail_alike,
            "skipped_in_both": self.skipped,
        }


def compare(without: Outcomes, with_package: Outcomes) -> Comparison:
    """Compare test by test, subtests included; one that is not there is ``missing``.

    Two failures with different messages differ as well: the package changed something.
    """
    names = list({**without.outcomes, **with_package.outcomes})
    differences: dict[str, dict[str, str]] = {}
    fail_alike: dict[str, str] = {}
    skipped: dict[str, list[str]] = {}
    for name in names:
        before = without.outcomes.get(name, MISSING)
        after = with_package.outcomes.get(name, MISSING)
        old, new = without.messages.get(name, ""), with_package.messages.get(name, "")
        if before == after == SKIPPED:
            skipped.setdefault(new, []).append(name)
        elif before != after or old != new:
            differences[name] = {"without": before, "with": after, "message": new}
        elif before != PASSED:
            fail_alike[name] = new
    return Comparison(
        counts={
            "without": count(without.outcomes),
            "with": count(with_package.outcomes),
        },
        differences=differences,
        regressions=[n for n, d in differences.items() if d["without"] == PASSED],
        fail_alike=fail_alike,
        skipped=skipped,
    )


def count(outcomes: Mapping[str, str]) -> dict[str, int]:
    """Passed, failed (with errors, timeouts and crashes), skipped; subtests apart."""
    found = Counter(o for name, o in outcomes.items() if not is_subtest(name))
    passed, skipped = found[PASSED], found[SKIPPED]
    return {
        "passed": passed,
        "failed": found.total() - passed - skipped,
        "skipped": skipped,
        "subtests": sum(map(is_subtest, outcomes)),
    }


def is_subtest(name: str) -> bool:
    """Whether ``name`` is that of a subtest: ``TestClass::test_name [its name]``."""
    return " [" in name
