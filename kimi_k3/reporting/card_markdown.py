"""Tables and text as Markdown for a model card: what files say stays text."""

import re

from .report_tables import Cell, Table, source_text

#: What Markdown and HTML could take for markup, anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def plain(text: str) -> str:
    """``text`` in one line, shown as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;"))


def table_markdown(table: Table) -> str:
    """A table with a heading above, and where its numbers are from below."""
    lines = [f"### {plain(table.title)}", ""]
    if table.note:
        lines += [plain(table.note), ""]
    lines += [
        _line([plain(name) for name in table.columns]),
        _line(["---" if words else "---:" for words in table.word_columns]),
        *(_line([_cell(cell) for cell in row]) for row in table.rows),
        "",
        f"*{plain(source_text(table.source))}*",
    ]
    return "\n".join(lines)


def folded(summary: str, content: str) -> str:
    """``content`` that is shown when ``summary`` is touched."""
    return f"<details><summary>{plain(summary)}</summary>\n\n{content}\n\n</details>"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return plain(f"{cell.text} ({cell.note})" if cell.note else cell.text)
