"""Tables of how a build was judged: overall, by group, beside others."""

from collections.abc import Iterator, Mapping

from ..evaluation.comparison import Comparison
from ..evaluation.comparison_text import verdict
from ..evaluation.summary import ESTIMATES
from ..evaluation.summary_text import documents_text
from .report_results import Judged
from .report_tables import (
    NOT_MEASURED,
    PERPLEXITY,
    QUALITY,
    Cell,
    Column,
    Table,
    count,
    estimate_cell,
    groups_table,
    nats,
    ratio,
)

#: Headings of groupings, and how to read them.
_GROUPINGS = {
    "corpus": ("By corpus", ""),
    "span": (
        "By part of the conversation",
        "Parts are found by control tokens; markup is the frame of messages, text is no "
        "conversation.",
    ),
    "language": (
        "By language",
        "Told by the writing of a document: languages of one script, and programs, are "
        "not told apart.",
    ),
    "position": ("By position", "Tokens of the document that the model had seen."),
}

_ALL = (*QUALITY, *PERPLEXITY)

_DIFFERENCES = (
    Column("KL, B less A", "kl", lambda value: _signed(nats(value), value)),
    Column("KL, B over A", "kl_ratio", ratio),
    Column(
        "log perplexity, B less A", "log_ppl", lambda value: _signed(nats(value), value)
    ),
    Column(
        "same top token, B less A",
        "agreement",
        lambda value: _signed(f"{100 * value:.1f} points", value),
    ),
)


def overall_table(judged: Judged | None) -> Table:
    """Each measure over all predictions: what it is, value, interval."""
    title = "Quality, all tokens"
    named = [(column, Cell(column.heading, _meaning(column))) for column in _ALL]
    if judged is None:
        rows = tuple((name, Cell(NOT_MEASURED)) for _, name in named)
        return Table(title, ("measure", "value"), rows, NOT_MEASURED)
    estimates = judged.summary.overall.estimates
    rows = []
    for column, name in named:
        cell = estimate_cell(estimates, column, NOT_MEASURED)
        rows.append((name, Cell(cell.text), Cell(cell.note or "–")))
    return Table(
        title,
        ("measure", "value", f"{judged.summary.level:.0%} interval"),
        tuple(rows),
        str(judged.source),
        judged_text(judged),
    )


def _meaning(column: Column) -> str:
    """What a measure is, where its heading does not say it."""
    plain = ("kl", "ppl_ratio", "build_ppl", "below_0.01", "below_0.1")
    if column.name in plain:
        return ""
    return ESTIMATES[column.name].removeprefix(f"{column.heading}: ")


def judged_text(judged: Judged) -> str:
    """What was compared with what, in which direction, by how much text."""
    about, row = judged.summary.about, judged.summary.overall
    return (
        f"{about.get('direction', 'direction not recorded')}, in nats a token: teacher "
        f"{judged.teacher}, build {judged.build}, {count(row.tokens)} tokens of "
        f"{documents_text(row.documents)}."
    )


def group_tables(judged: Judged) -> Iterator[Table]:
    """A table for each grouping that the summary has."""
    for grouping, rows in judged.summary.groups.items():
        title, note = _GROUPINGS.get(grouping, (f"By {grouping}", ""))
        yield groups_table(title, grouping, rows, str(judged.source), note=note)


def comparison_table(comparison: Comparison, a: Judged, b: Judged) -> Table:
    """What build B has more than build A, overall and by corpus and span."""
    rows = {"all": comparison.overall}
    for grouping in ("corpus", "span"):
        rows |= {
            f"{grouping}: {name}": row
            for name, row in comparison.groups.get(grouping, {}).items()
        }
    table = groups_table(
        f"B = {b.build} beside A = {a.build}",
        "tokens of",
        rows,
        f"{a.predictions} and {b.predictions}",
        _DIFFERENCES,
        f"Same documents, same teacher {a.teacher}. {verdict(comparison)}",
    )
    return table


def compared(a: Judged, b: Judged) -> Comparison | None:
    """The paired comparison; None where one of them lacks its predictions."""
    if a.evaluation is None or b.evaluation is None:
        return None
    return Comparison.of(a.evaluation, b.evaluation)


def level_text(judged: Judged) -> str:
    """Which intervals, and how they were found."""
    summary = judged.summary
    return (
        f"Beside a value stands its {summary.level:.0%} interval, from "
        f"{summary.draws:,} draws of documents with replacement within each corpus "
        f"(seed {summary.seed}). Where documents are too few there is none."
    )


def overlap_text(about: Mapping[str, object]) -> str:
    """Whether the text to judge by is known to be new to the build's calibration."""
    found = str(about.get("overlap", "not checked"))
    return f"Overlap with the text that the build was calibrated on: {found}."


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text.replace("-", "−")
