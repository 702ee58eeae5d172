"""Tables as values, and how their numbers are written; a page and a card show the same.

Numbers are rounded, never worked out: what a table says can be found in the file that it
names.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..evaluation.statistics import Estimate
from ..evaluation.summary import Row
from ..evaluation.summary_text import documents_text

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Cell:
    """What a place of a table says, and an interval or a remark below it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first column names what a row is of.

    Attributes:
        source: the file that the numbers come from; NOT_MEASURED without one.
        note: how to read it.
        words: whether its cells are words, to be wrapped, and not numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    source: str
    note: str = ""
    words: bool = False

    @property
    def word_columns(self) -> list[bool]:
        """Of each column, whether most of its cells are no numbers: read from the left."""
        return [
            self.words or place == 0 or _is_words(row[place].text for row in self.rows)
            for place in range(len(self.columns))
        ]


def source_text(source: str) -> str:
    """What stands at a table: where its numbers are from, or that there are none."""
    return source if source == NOT_MEASURED else f"Source: {source}"


def _is_words(texts: Iterable[str]) -> bool:
    told = [text for text in texts if text not in ("", "–", NOT_MEASURED)]
    return 2 * sum(not _NUMBER.fullmatch(text) for text in told) > len(told)


#: A number with its unit, or two with a word or an arrow between them.
_NUMBER = re.compile(
    r"[+−-]?[\d,.]+(e-?\d+)?(\s(→|to)\s[\d,.]+(e-?\d+)?)?( (%|[kMGT]?B|bytes|points))?"
)


@dataclass(frozen=True)
class Column:
    """One estimate of a row: its heading, its name there, and how it is written."""

    heading: str
    name: str
    write: Callable[[float], str]


def nats(value: float) -> str:
    """0.0389; what is less than a ten-thousandth as 4.7e-5; exact nothing is 0."""
    if value == 0:
        return f"{value:g}"
    if abs(value) < 1e-4:
        digits, _, exponent = f"{value:.1e}".partition("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:#.3g}".rstrip(".")


def perplexity(value: float) -> str:
    return f"{value:#.4g}".rstrip(".") if value < 1e4 else f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.3f}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float) -> str:
    return f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"


def count(value: int) -> str:
    return f"{value:,}"


def size(nbytes: float) -> str:
    """Bytes in a decimal unit: 1.56 TB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


#: What is said of every group of predictions.
QUALITY = (
    Column("mean KL", "kl", nats),
    Column("median", "kl_median", nats),
    Column("90 % below", "kl_p90", nats),
    Column("99 % below", "kl_p99", nats),
    Column("KL < 0.01", "below_0.01", share),
    Column("KL < 0.1", "below_0.1", share),
    Column("same top token", "agreement", share),
    Column("perplexity ratio", "ppl_ratio", ratio),
)

PERPLEXITY = (
    Column("perplexity of the teacher", "teacher_ppl", perplexity),
    Column("perplexity of the build", "build_ppl", perplexity),
)

#: What is said of every group of answers, in two tables.
GENERATION = {
    "Loops and ends": (
        Column("loops", "loops", share),
        Column("first loop, tokens", "first_loop", number),
        Column("repeated tokens", "repeated", share),
        Column("compression", "compression", ratio),
        Column("ends by itself", "ends_by_itself", share),
        Column("ends in an open section", "open_section", share),
    ),
    "Tools and language": (
        Column("calls a tool", "calls_tools", share),
        Column("calls one not offered", "calls_unoffered", share),
        Column("call parses", "tool_call_parses", share),
        Column("known tool", "tool_call_known", share),
        Column("valid arguments", "tool_call_valid", share),
        Column("language drift", "language_drift", share),
        Column("drift in thinking", "think_drift", share),
    ),
}


#: What both ends of an interval have in common, and is written once.
_UNITS = (" %", " points")


def estimate_cell(
    estimates: Mapping[str, Estimate], column: Column, absent: str = "–"
) -> Cell:
    """The estimate of ``column`` with its interval; ``absent`` where there is none."""
    if (found := estimates.get(column.name)) is None:
        return Cell(absent)
    note = ""
    if found.low is not None and found.high is not None:
        low, high = column.write(found.low), column.write(found.high)
        unit = next((one for one in _UNITS if high.endswith(one)), "")
        note = f"{low.removesuffix(unit)} to {high}"
    return Cell(column.write(found.value), note)


def groups_table(
    title: str,
    grouping: str,
    rows: Mapping[str, Row],
    source: str,
    columns: tuple[Column, ...] = QUALITY,
    note: str = "",
) -> Table:
    """One row for each group of predictions; perplexities last, where there are some."""
    both = all(
        column.name in row.estimates for row in rows.values() for column in PERPLEXITY
    )
    headings = [column.heading for column in columns]
    if both:
        headings.append("perplexity, teacher → build")
    return Table(
        title,
        (grouping, "tokens", *headings),
        tuple(
            (
                Cell(name),
                Cell(count(row.tokens), documents_text(row.documents)),
                *(estimate_cell(row.estimates, column) for column in columns),
                *((_perplexities(row),) if both else ()),
            )
            for name, row in rows.items()
        ),
        source,
        note,
    )


def _perplexities(row: Row) -> Cell:
    teacher, build = (
        estimate_cell(row.estimates, column).text for column in PERPLEXITY
    )
    return Cell(f"{teacher}\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}{build}")
