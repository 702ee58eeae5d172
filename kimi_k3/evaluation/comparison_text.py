"""The words of a comparison, for a terminal of 80 columns."""

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .comparison import excludes_zero
from .statistics import Estimate
from .summary_text import cut_text, ends, number_text

if TYPE_CHECKING:
    from .comparison import Comparison
    from .summary import Row

_NAME = 15

#: More than these are written with an exponent.
_MOST_DECIMALS = 5


def comparison_text(comparison: "Comparison") -> str:
    """Tables first, so that the verdict is what a terminal shows last."""
    parts = [_head(comparison)]
    parts += [_table(name, rows) for name, rows in comparison.groups.items()]
    parts.append(_overall(comparison))
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(comparison: "Comparison") -> str:
    """One sentence: which of the two builds is closer to the teacher."""
    kl = comparison.overall.estimates["kl"]
    sure = excludes_zero(kl)
    if sure is None:
        return (
            "There is no interval: too few documents, or one that is all of its corpus."
        )
    if not sure:
        return (
            "The interval of KL holds 0: these documents do not tell which build is "
            "closer to the teacher."
        )
    closer = "B" if kl.value < 0 else "A"
    return f"The interval of KL excludes 0: {closer} is closer to the teacher."


def signed_text(estimate: Estimate, digits: int = 2) -> str:
    """``-0.014 (-0.019 to -0.010)``, or the value alone."""
    value, *rest = _signed_parts(estimate, digits)
    return f"{value} ({' to '.join(rest)})" if rest else value


def _signed_parts(estimate: Estimate, digits: int) -> list[str]:
    """Value and ends, with as many decimals as the interval's width gives a meaning to."""
    value, *rest = ends(estimate)
    width = rest[1] - rest[0] if rest else 0.0
    decimals = digits - 1 - math.floor(math.log10(width)) if width else 0
    if width and 0 <= decimals <= _MOST_DECIMALS:
        return [f"{end:+.{decimals}f}" for end in (value, *rest)]
    return [_signed(end, digits) for end in (value, *rest)]


def _signed(value: float, digits: int) -> str:
    text = number_text(value, digits)
    return text if value <= 0 else f"+{text}"


def _head(comparison: "Comparison") -> list[str]:
    lines = ["B less A; + is more, so less KL and log perplexity is better"]
    sides = {"teacher": comparison.teacher, "A": comparison.a, "B": comparison.b}
    for name, side in sides.items():
        lines.append(
            f"{name:9}{side.get('path', '?')}  ({side.get('dtype', '?')} type, "
            f"checkpoint {str(side.get('checkpoint', '?'))[:12]})"
        )
    row = comparison.overall
    lines.append(
        f"{'samples':9}{row.tokens:,} predictions in {row.documents:,} documents"
    )
    return lines


def _table(grouping: str, rows: Mapping[str, "Row"]) -> list[str]:
    name = f"by {grouping}"
    lines = [f"{name:{_NAME}}{'docs':>6} {'KL':>9}   {'KL ratio':18}log ppl"]
    for key, row in rows.items():
        e = row.estimates
        value, *rest = _signed_parts(e["log_ppl"], 2)
        star = "*" if excludes_zero(e["kl"]) else " "
        lines.append(
            f"{cut_text(key, _NAME - 1):{_NAME}}{row.documents:>6,} "
            f"{_signed(e['kl'].value, 3):>9} {star} {_ratio(e.get('kl_ratio')):18}"
            f"{value} {'…'.join(rest)}".rstrip()
        )
    return lines


def _ratio(estimate: Estimate | None) -> str:
    """``0.756 0.650–0.864``, or nothing where A has no KL."""
    if estimate is None:
        return ""
    value, *rest = (number_text(end) for end in ends(estimate))
    return f"{value} {'–'.join(rest)}"


def _overall(comparison: "Comparison") -> list[str]:
    e = comparison.overall.estimates
    lines = [f"KL               {signed_text(e['kl'])} nats a token"]
    if "kl_ratio" in e:
        value, *rest = (number_text(end) for end in ends(e["kl_ratio"]))
        between = f" ({' to '.join(rest)})" if rest else ""
        lines.append(f"                 {value} times that of A{between}")
    hundred = [100 * end for end in ends(e["agreement"])]
    percent = signed_text(Estimate(*hundred))
    lines += [
        f"log perplexity   {signed_text(e['log_ppl'])}",
        f"same top token   {percent} points of a hundred",
        "",
        *textwrap.wrap(verdict(comparison), 80),
        f"Intervals: {comparison.level:.0%}, of {comparison.draws:,} draws of the same "
        "documents for both.",
    ]
    rows = [row for group in comparison.groups.values() for row in group.values()]
    if any(excludes_zero(row.estimates["kl"]) for row in rows):
        chance = round(1 / (1 - comparison.level))
        lines.append(
            f"* the interval of KL excludes 0; by chance alone one row in {chance} does."
        )
    return lines + [f"Note: {note}." for note in comparison.notes]
