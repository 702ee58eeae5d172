"""HTML as nested calls: text is escaped, whatever it says, unless it is made here."""

import base64
import re
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path

from .report_tables import NOT_MEASURED, Cell, Table, source_text


class Html(str):
    """Text that is markup already. Anything else is escaped when it is put into it."""

    __slots__ = ()


#: Elements that hold nothing.
_VOID = frozenset(("meta", "img", "br", "hr"))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """``<name attribute="…">children</name>``; ``class_`` stands for ``class``.

    An attribute that is None is left out, one that is True has no value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{escape(str(value))}"')
    start = f"<{' '.join(parts)}>"
    if name in _VOID:
        return Html(start)
    return Html(f"{start}{''.join(map(markup, children))}</{name}>")


def markup(child: object) -> Html:
    """``child`` as markup: as it is, or escaped."""
    return child if isinstance(child, Html) else Html(escape(str(child), quote=False))


def joined(children: Iterable[object]) -> Html:
    return Html("\n".join(map(markup, children)))


def page(title: str, description: str, body: Html) -> str:
    """A whole document that needs nothing from anywhere."""
    style = resources.files("kimi_k3").joinpath("reporting", "report.css")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="description", content=description),
        element("title", title),
        # Of no text from files: nothing to escape.
        element("style", Html(style.read_text("utf-8"))),
    )
    whole = element("html", head, element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def table_html(table: Table) -> Html:
    """A table that scrolls inside its own frame, with where its numbers are from."""
    kinds = ["words" if words else None for words in table.word_columns]
    names = zip(table.columns, kinds, strict=True)
    head = element(
        "thead",
        element("tr", *(element("th", n, scope="col", class_=k) for n, k in names)),
    )
    body = element("tbody", *(_row(row, kinds) for row in table.rows))
    caption = element(
        "caption",
        element("strong", table.title),
        Html(" ") if table.note else "",
        table.note,
        element("span", source_text(table.source), class_="source"),
    )
    return element(
        "div",
        element("table", caption, head, body),
        class_="scroll",
        role="region",
        aria_label=table.title,
        tabindex="0",
    )


def _row(row: tuple[Cell, ...], kinds: list[str | None]) -> Html:
    first, *others = row
    return element(
        "tr",
        element("th", *_content(first, breaks=True), scope="row"),
        *(
            element("td", *_content(cell), class_=kind)
            for cell, kind in zip(others, kinds[1:], strict=True)
        ),
    )


def _content(cell: Cell, *, breaks: bool = False) -> tuple[object, ...]:
    """The text of ``cell`` and its note; ``breaks``: lines may end within names."""
    if cell.text == NOT_MEASURED:
        return (element("em", cell.text),)
    text = markup(cell.text)
    if breaks:
        text = Html(re.sub(r"([._/])(?=\w)", r"\1<wbr>", text))
    return (text, element("small", cell.note)) if cell.note else (text,)


def picture_html(path: Path, alternative: str, caption: str) -> Html:
    """The PNG ``path`` inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    width, height = png_size(path.read_bytes())
    return element(
        "figure",
        element(
            "img",
            src=f"data:image/png;base64,{data}",
            alt=alternative,
            width=width,
            height=height,
        ),
        element("figcaption", caption),
    )


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header of a PNG file."""
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
