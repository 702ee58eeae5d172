"""The words of a summary, for a terminal of 80 columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .statistics import Estimate

if TYPE_CHECKING:
    from .summary import Row, Summary


def summary_text(summary: "Summary") -> str:
    """The tables of ``summary``."""
    lines = [str(summary.about.get("direction", ""))]
    lines += _row("all", summary.overall)
    for grouping, rows in summary.groups.items():
        lines += ["", f"by {grouping}", *_table(rows)]
    return "\n".join(lines)


def _table(rows: Mapping[str, "Row"]) -> list[str]:
    return [line for name, row in rows.items() for line in _row(name, row)]


def _row(name: str, row: "Row") -> list[str]:
    kl: Estimate = row.estimates["kl"]
    return [f"{name:12} {row.tokens:>9,} {kl.value:.5f}"]
