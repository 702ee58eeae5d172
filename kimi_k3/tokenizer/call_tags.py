"""The tags of tool calls in a text, with the values between them.

Two readers. Of :class:`DecodedText` it is known which markers are control ids, and only
those are structure. An ordinary string is read by its structure alone: a value goes on
to the first closing tag of its own whose next marker is one that may follow it. So
markers and JSON in a value survive there too, unless they spell exactly that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .decoded import DecodedText
from .files import MARKERS
from .xtml import CLOSE, OPEN, SEP

#: Tags with a value, and those that end whatever call is open.
VALUES = ("argument", "json")
AROUND = ("call", "tools", "message")

_INSIDE, _OUTSIDE = "|".join(VALUES), "|".join(AROUND)

# Neither goes over a marker, but a header may hold some in quotes.
_TEXT = r"[^<]*(?:<(?!\|)[^<]*)*"
_HEADER = r'(?:[^"<]|"[^"]*"|<(?!\|))*'

_TAG = re.compile(
    rf"<\|open\|>(?P<opened>(?P<name>{_INSIDE}|{_OUTSIDE})\b{_HEADER})"
    r"(?:(?P<sep><\|sep\|>)|(?=<\|))"
    rf"|<\|close\|>(?P<closed>{_OUTSIDE})(?:<\|sep\|>|\Z)"
    r"|<\|close\|>(?P<cut>\w*)\s*\Z"
)
_FOLLOWS = (
    rf"{_TEXT}(?:<\|open\|>(?:{_INSIDE}|{_OUTSIDE})\b"
    rf"|<\|close\|>(?:(?:{_OUTSIDE})\b|\w*\s*\Z)|\Z)"
)
_ENDS = {
    name: re.compile(rf"<\|close\|>{name}<\|sep\|>(?={_FOLLOWS})") for name in VALUES
}
_ATTRIBUTE = re.compile(r'(?<![\w-])([\w-]+)="([^"]*)"')
_WORD = re.compile(r"\w*")
_UNESCAPED = {"&quot;": '"', "&amp;": "&"}


@dataclass(frozen=True)
class Tag:
    """A tag as far as calls are concerned; ``header`` is what stands in it.

    ``body`` is the value behind an ``argument`` or ``json`` that was opened, None if the
    tag has no separator or is not closed; behind a ``call`` that was opened, the text up
    to the next tag. Closing tags of values are left out.
    """

    name: str
    opens: bool = False
    header: str = ""
    body: str | None = None


def read_tags(text: str) -> Iterator[Tag]:
    """The tags of ``text``, which may begin behind the ``<|open|>call`` of a call.

    A ``<|close|>`` at the end stands for the end of a call.
    """
    if isinstance(text, DecodedText):
        start = text.controls[0][0] if text.controls else len(text)
        if not text.startswith(OPEN.text, start) or text[:start].strip():
            text = DecodedText.joined(DecodedText.of([OPEN]), "call", text)
        yield from _exact(text)
    else:
        if not text.lstrip().startswith(OPEN.text):
            text = f"{OPEN.text}call{text}"
        yield from _by_structure(str.__str__(text))


def attributes(header: str) -> dict[str, str]:
    """Attributes of a tag, as they were before ``xtml.py`` escaped them."""
    return {
        key: re.sub("&quot;|&amp;", lambda found: _UNESCAPED[found[0]], value)
        for key, value in _ATTRIBUTE.findall(header)
    }


@dataclass(frozen=True)
class _Span:
    """A tag whose marks are control ids, and where it lies.

    ``complete``: it has its separator.
    """

    name: str
    opens: bool
    header: str
    start: int
    stop: int
    complete: bool


def _exact(text: DecodedText) -> Iterator[Tag]:
    content = text.plain()
    spans = [span for span in _spans(text) if span.name in VALUES + AROUND]
    end = _Span("", False, "", len(content), len(content), True)
    for span, after in pairwise([*spans, end]):
        body = content[span.stop : after.start]
        if span.name in AROUND:
            yield Tag(span.name, span.opens, span.header, body)
        elif span.opens:
            closed = after.name == span.name and not after.opens
            yield Tag(
                span.name, True, span.header, body if closed and span.complete else None
            )


def _spans(text: DecodedText) -> Iterator[_Span]:
    content = text.plain()
    marks = [(a, b) for a, b in text.controls if content[a:b] in MARKERS]
    for (start, stop), (after, beyond) in pairwise([*marks, (len(content),) * 2]):
        between = content[stop:after]
        complete = content[after:beyond] == SEP.text
        end = beyond if complete else after
        if content[start:stop] == OPEN.text and after < len(content):
            found = _WORD.match(between)
            name = found[0] if found else ""
            yield _Span(name, True, between, start, end, complete)
        elif content[start:stop] == CLOSE.text:
            name = between.strip()
            if after == len(content) and _may_become_an_end(name):
                name = "call"
            yield _Span(name, False, "", start, end, complete)


def _may_become_an_end(word: str) -> bool:
    return any(name.startswith(word) for name in AROUND)


def _by_structure(text: str) -> Iterator[Tag]:
    unclosed: set[str] = set()
    found = _TAG.search(text)
    while found:
        place, name, header = found.end(), found["name"], found["opened"] or ""
        if name in VALUES:
            sought = found["sep"] is not None and name not in unclosed
            end = _ENDS[name].search(text, place) if sought else None
            if end is not None:
                yield Tag(name, True, header, text[place : end.start()])
                place = end.end()
            else:
                if sought:
                    unclosed.add(name)
                yield Tag(name, True, header)
            found = _TAG.search(text, place)
            continue
        after = _TAG.search(text, place)
        body = text[place : after.start() if after else len(text)]
        if name is not None:
            yield Tag(name, True, header, body)
        elif found["closed"] or _may_become_an_end(found["cut"]):
            yield Tag(found["closed"] or "call")
        found = after
