"""The words of a summary, for a terminal of 80 columns."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .statistics import Estimate

if TYPE_CHECKING:
    from .summary import Row, Summary

#: Columns that a name gets in a table; longer ones are cut.
_NAME = 15

#: With fewer documents, intervals of skewed values hold the truth less often than they
#: say: at 12, about five times in six instead of nineteen in twenty.
_FEW = 40

FEW_TEXT = "Of so few documents, intervals are rather too narrow: take more."


def summary_text(summary: "Summary") -> str:
    """Tables first, so that what holds of everything is what a terminal shows last."""
    parts = [_head(summary)]
    for grouping, rows in summary.groups.items():
        parts.append(_table(grouping, rows))
    parts.append(_overall(summary.overall))
    rows = [row for group in summary.groups.values() for row in group.values()]
    parts.append(_notes(summary, [summary.overall, *rows]))
    return "\n\n".join("\n".join(part) for part in parts)


def number_text(value: float, digits: int = 3) -> str:
    """``value`` with so many significant digits, without an exponent where it fits."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    return text.rstrip(".") if value else "0"


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """``0.0392 (0.0361 to 0.0425)``, or the value alone."""
    value = number_text(estimate.value, digits)
    if estimate.low is None or estimate.high is None:
        return value
    low, high = (number_text(end, digits) for end in (estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def share_text(estimate: Estimate) -> str:
    """``93.2 % (92.1 to 94.3)``, or the value alone."""
    value = f"{100 * estimate.value:.1f} %"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def cut_text(text: str, most: int = _NAME) -> str:
    """``text``, cut to ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def ends(estimate: Estimate) -> list[float]:
    """The value, and the two ends of its interval if it has one."""
    found = (estimate.value, estimate.low, estimate.high)
    return [one for one in found if one is not None]


def documents_text(documents: int) -> str:
    return f"{documents:,} document{'' if documents == 1 else 's'}"


def overlap_text(about: Mapping[str, Any]) -> str:
    """What is known of samples that the build was calibrated on."""
    overlap = str(about.get("overlap", "not checked"))
    if overlap == "not checked":
        return "not checked; --calibration FOLDER checks it"
    # A digest is for machines: its beginning tells enough.
    return " ".join(word[:12] if len(word) == 64 else word for word in overlap.split())


def _head(summary: "Summary") -> list[str]:
    about = summary.about
    lines = [f"{about.get('direction', 'KL(teacher || build)')}, nats a token"]
    for name in ("teacher", "build"):
        side = about.get(name, {})
        if side:
            lines.append(
                f"{name:9}{side.get('path', '?')}  ({side.get('dtype', '?')} type, "
                f"checkpoint {str(side.get('checkpoint', '?'))[:12]})"
            )
    row = summary.overall
    lines.append(
        f"{'samples':9}{row.tokens:,} predictions in {documents_text(row.documents)}"
    )
    indent = " " * 9
    lines += textwrap.wrap(
        f"{'overlap':9}{overlap_text(about)}",
        80,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines


def _table(grouping: str, rows: Mapping[str, "Row"]) -> list[str]:
    name = f"by {grouping}"
    lines = [
        f"{name:{_NAME}}{'tokens':>9}{'docs':>6} {'KL':>7}{'':17}{'ppl ratio':17}   same"
    ]
    for key, row in rows.items():
        e = row.estimates
        lines.append(
            f"{cut_text(key):{_NAME}}{row.tokens:>9,}{row.documents:>6,} "
            f"{_kl_cell(e['kl']):23} {_ratio_cell(e['ppl_ratio']):17} "
            f"{100 * e['agreement'].value:5.1f}%"
        )
    return lines


def _kl_cell(kl: Estimate) -> str:
    """`` 0.0392 0.0361–0.0425``: as :func:`interval_text` in fewer columns."""
    digits = 2 if kl.value < 1e-4 else 3
    value, *rest = (number_text(end, digits) for end in ends(kl))
    return f"{value:>7} {'–'.join(rest)}".rstrip()


def _ratio_cell(ratio: Estimate) -> str:
    """``1.031 1.024–1.038``: decimals under each other, while they fit."""
    value, *rest = (
        f"{end:.3f}" if end < 10 else number_text(end) for end in ends(ratio)
    )
    return f"{value} {'–'.join(rest)}".rstrip()


def _overall(row: "Row") -> list[str]:
    e = row.estimates
    quantiles = (number_text(e[f"kl_{q}"].value) for q in ("median", "p90", "p99"))
    half, most, nearly_all = quantiles
    return [
        f"KL               {interval_text(e['kl'])} nats a token",
        f"                 median {half}; 90 % below {most}, 99 % below {nearly_all}",
        f"tokens below     0.01: {share_text(e['below_0.01'])}; "
        f"0.1: {share_text(e['below_0.1'])}",
        f"same top token   {share_text(e['agreement'])}",
        f"perplexity       teacher {interval_text(e['teacher_ppl'], 4)}",
        f"                 build   {interval_text(e['build_ppl'], 4)}",
        f"                 ratio   {interval_text(e['ppl_ratio'], 4)}",
    ]


def _notes(summary: "Summary", rows: list["Row"]) -> list[str]:
    lines = [
        f"Intervals: {summary.level:.0%}, from drawing documents again within each "
        f"corpus {summary.draws:,} times."
    ]
    if any(row.estimates["kl"].low is None for row in rows):
        lines.append(
            "Without an interval: too few documents, or one that is all of its corpus."
        )
    return lines + [FEW_TEXT] * is_of_few(summary)


def is_of_few(summary: "Summary") -> bool:
    """Whether too few documents were judged for intervals as wide as they should be."""
    return summary.overall.documents < _FEW
