"""The words of what was counted of a build's answers, for a terminal of 80 columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..evaluation.summary_text import cut_text, interval_text, share_text
from .generation_measures import MEASURES

if TYPE_CHECKING:
    from .generation_report import Generation, GRow

#: Heads of the columns of a corpus, and the measure in each.
_COLUMNS = {
    "loops": "loops",
    "repeated": "repeated",
    "ends": "ends_by_itself",
    "calls": "calls_tools",
    "valid": "tool_call_valid",
    "drift": "language_drift",
}


def generation_text(generation: "Generation") -> str:
    """A table of corpora and the overall values of each setting."""
    about = generation.about
    build = about.get("build", {})
    head = [
        f"build    {build.get('path', '?')}  (checkpoint "
        f"{str(build.get('checkpoint', '?'))[:12]})",
        f"answers  of at most {about.get('max_tokens', '?')} tokens, "
        f"seed {about.get('seed', '?')}",
    ]
    parts = ["\n".join(head)]
    for name, rows in generation.settings.items():
        setting = about.get("settings", {}).get(name, {})
        how = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        parts.append(f"{name}{f' ({how})' if how else ''}")
        parts.append(_table(rows.corpus))
        parts.append(_overall(rows.overall))
    level = f"{100 * generation.level:g} %"
    parts.append(
        f"Intervals ({level}) are of drawing prompts again. What each measure sees and\n"
        "does not see: docs/generation.md."
    )
    return "\n\n".join(parts)


def _table(rows: "Mapping[str, GRow]") -> str:
    heads = "".join(f"{head:>9}" for head in _COLUMNS)
    lines = [f"{'corpus':15}{'answers':>9}{heads}"]
    for name, row in rows.items():
        cells = "".join(f"{_cell(row, measure):>9}" for measure in _COLUMNS.values())
        lines.append(f"{cut_text(name):15}{row.answers:9,}{cells}")
    return "\n".join(lines)


def _cell(row: "GRow", measure: str) -> str:
    found = row.estimates.get(measure)
    return "-" if found is None else f"{100 * found.value:.1f} %"


def _overall(row: "GRow") -> str:
    lines = [f"{row.answers:,} answers to {row.prompts:,} prompts"]
    for name, what in MEASURES.items():
        found = row.estimates.get(name)
        if found is not None:
            number = name in ("first_loop", "compression")
            text = interval_text(found) if number else share_text(found)
            lines.append(f"  {text:24}{what}")
    stops = ", ".join(f"{reason} {count}" for reason, count in row.stops.items())
    lines.append(f"  ended on: {stops}")
    if row.counts["count"]:
        lines.append(f"  of {row.counts['loop']} loops {row.counts['count']} count on")
    if row.counts["calls"]:
        lines.append(
            f"  {row.counts['calls']:,} calls in {row.counts['call']:,} answers"
        )
    return "\n".join(lines)
