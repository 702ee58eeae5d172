"""Pytest plugin of a host test run: what each test came to, and whose class answered.

Loaded with ``-p host_plugin``, so the distribution's files stay as they are. It appends
one JSON object a line to ``--event-file``; each is on disk at once, so whoever reads them
knows which test is running even when the process has to be killed.
"""

import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

K3 = "mlx_lm.models.kimi_k3"

#: Modules of mlx-lm for which this package answers, or will.
ANSWERED = (K3, "mlx_lm.tool_parsers.kimi_k3", "mlx_lm.chat_templates.kimi_k3")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--event-file", metavar="FILE", help="where events are appended")
    parser.addoption("--done-file", metavar="FILE", help="JSON list of tests to leave")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--event-file")
    if file:
        config.pluginmanager.register(Recorder(Path(file)), "host-test-recorder")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out the tests that an earlier process has done."""
    file = config.getoption("--done-file")
    if file:
        done = set(json.loads(Path(file).read_text()))
        items[:] = [item for item in items if short(item.nodeid) not in done]


class Recorder:
    """Hooks that write events; outcomes are passed, failed, error or skipped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, str] = {}
        self.with_failed_subtests: set[str] = set()

    def write(self, event: str, **values: Any) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"event": event, **values}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write("collected", tests=[short(item.nodeid) for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("start", test=short(nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("broken", file=report.nodeid, message=last_line(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One result a phase; the worst of them is the test's, a subtest's is its own."""
        name = short(report.nodeid)
        outcome, message = report.outcome, last_line(report)
        context = getattr(report, "context", None)
        if context is not None:
            if outcome == "failed":
                self.with_failed_subtests.add(name)
            name = self.of_its_own(f"{name} [{plain(context.msg or context.kwargs)}]")
        elif outcome == "passed" and name in self.with_failed_subtests:
            outcome, message = "failed", "subtests failed"
        elif outcome == "failed" and report.when != "call":
            outcome = "error"
        if outcome == "passed" and report.when != "call":
            return
        if self.outcomes.get(name) in ("failed", "error"):
            return
        self.outcomes[name] = outcome
        self.write(
            "result",
            test=name,
            outcome=outcome,
            seconds=round(report.duration, 3),
            message="" if outcome == "passed" else message,
        )

    def of_its_own(self, name: str) -> str:
        """``name``, numbered where a loop names several subtests alike."""
        number, numbered = 1, name
        while numbered in self.outcomes:
            number += 1
            numbered = f"{name} {number}"
        return numbered

    def pytest_sessionfinish(self) -> None:
        self.write("end", **witness())


def witness() -> dict[str, Any]:
    """Which mlx-lm ran, whose K3 class answered, and whether the tests asked for it."""
    import mlx_lm

    asked = K3 in sys.modules
    model = importlib.import_module(K3).Model
    origins = {name: importlib.util.find_spec(name) for name in ANSWERED}
    return {
        "mlx_lm": str(Path(mlx_lm.__file__).parent),
        "tests_asked_for_k3": asked,
        "class_file": inspect.getfile(model),
        "answers": {
            name: spec.origin if spec else None for name, spec in origins.items()
        },
    }


def short(nodeid: str) -> str:
    """``TestClass::test_name``, without the file."""
    return nodeid.partition("::")[2] or nodeid


def last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a test did not pass, on one line: the reason of a skip, or the error."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return plain(lines[0])[:300] if lines else ""


def plain(text: Any) -> str:
    """``text`` without addresses and module files, which differ between processes."""
    return re.sub(r"0x[0-9a-f]+| from '[^']*'", "", str(text))
