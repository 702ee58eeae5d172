"""The tags of tool calls in a text, with the values between them.

Two readers. Of :class:`DecodedText` it is known which markers are control ids, and only
those are structure. An ordinary string is read by its structure alone: a value goes on
to the first closing tag of its own that is followed by what may follow one. So markers
and JSON in a value survive there too, unless they spell exactly that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .decoded import DecodedText
from .files import MARKERS
from .xtml import CLOSE, OPEN, SEP

#: Tags with a value, and those that end whatever call is open.
_VALUES = ("argument", "json")
_AROUND = ("call", "tools", "message")

# Outside of quotes no marker can stand in a tag, so that no search goes far.
_HEADER = r'(?:[^"<]|"[^"]*"|<(?!\|))*+'
_TAG = re.compile(
    rf"<\|open\|>(?P<opened>(?P<name>call|argument|json|tools)\b{_HEADER})<\|sep\|>"
    r"|<\|close\|>(?P<closed>call|tools|message)(?:<\|sep\|>|\Z)"
)
_FOLLOWS = (
    r"\s*(?:<\|open\|>(?:argument|json|call|tools)\b"
    r"|<\|close\|>(?:(?:call|tools|message)\b|\s*\Z)|\Z)"
)
_ENDS = {
    name: re.compile(rf"<\|close\|>{name}<\|sep\|>(?={_FOLLOWS})") for name in _VALUES
}
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_WORD = re.compile(r"\w*")
_LAST = re.compile(r"<\|close\|>(\w*)\s*\Z")
_UNESCAPED = {"&quot;": '"', "&amp;": "&"}


@dataclass(frozen=True)
class Tag:
    """A tag as far as calls are concerned; ``header`` is what stands in it.

    ``body`` is the value behind an ``argument`` or ``json`` that was opened, None if it
    is not closed. Closing tags of values are left out.
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
    """A tag whose marks are control ids, and where it lies."""

    name: str
    opens: bool
    header: str
    start: int
    stop: int


def _exact(text: DecodedText) -> Iterator[Tag]:
    content = text.plain()
    spans = [span for span in _spans(text) if span.name in _VALUES + _AROUND]
    end = _Span("", False, "", len(content), len(content))
    for span, after in pairwise([*spans, end]):
        if span.name in _AROUND:
            yield Tag(span.name, span.opens, span.header)
        elif span.opens:
            closed = after.name == span.name and not after.opens
            body = content[span.stop : after.start] if closed else None
            yield Tag(span.name, True, span.header, body)


def _spans(text: DecodedText) -> Iterator[_Span]:
    content = text.plain()
    marks = [(a, b) for a, b in text.controls if content[a:b] in MARKERS]
    for (start, stop), (after, beyond) in pairwise([*marks, (len(content),) * 2]):
        between = content[stop:after]
        complete = content[after:beyond] == SEP.text
        if content[start:stop] == OPEN.text and complete:
            found = _WORD.match(between)
            yield _Span(found[0] if found else "", True, between, start, beyond)
        elif content[start:stop] == CLOSE.text:
            name = between.strip()
            if after == len(content) and _may_become_an_end(name):
                name = "call"
            yield _Span(name, False, "", start, beyond if complete else after)


def _may_become_an_end(word: str) -> bool:
    return any(name.startswith(word) for name in _AROUND)


def _by_structure(text: str) -> Iterator[Tag]:
    place = 0
    unclosed: set[str] = set()
    while found := _TAG.search(text, place):
        place = found.end()
        name = found["name"]
        if name is None:
            yield Tag(found["closed"])
        elif name in _AROUND:
            yield Tag(name, True, found["opened"])
        else:
            end = None if name in unclosed else _ENDS[name].search(text, place)
            if end is None:
                unclosed.add(name)
                yield Tag(name, True, found["opened"])
            else:
                yield Tag(name, True, found["opened"], text[place : end.start()])
                place = end.end()
    last = _LAST.search(text, place)
    if last is not None and _may_become_an_end(last[1]):
        yield Tag("call")
