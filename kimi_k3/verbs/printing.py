"""What verbs print alike: a report, and a line of progress."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Protocol


class Report(Protocol):
    """What a verb found: plain values for JSON, or text for a reader."""

    def to_dict(self) -> Mapping[str, object]: ...

    def text(self) -> str: ...


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """The option that :func:`print_report` is given."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_report(report: Report, as_json: bool) -> None:
    """To stdout: the report as one JSON document, or its text."""
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())


def progress_line(what: str) -> Callable[[int, int], None] | None:
    """Rewrites one line on a terminal with the share that is done; else nothing."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{what} {done / total:.0%}", end=end, file=sys.stderr, flush=True)

    return show
