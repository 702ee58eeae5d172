"""Which part of a conversation each token belongs to, found by the XTML control ids.

Only ids that our renderer places are structure: text that spells a marker has other ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.packing import PADDING

#: Parts of conversations; ``markup`` is the frame of messages, ``text`` is no conversation.
SPANS = (
    *("system", "user", "think", "response", "tool call", "tool result"),
    *("markup", "text"),
)

_OF_ROLE = {"system": "system", "user": "user", "tool": "tool result"}
_OF_SECTION = {"think": "think", "response": "response", "tools": "tool call"}
_NUMBER = {name: number for number, name in enumerate(SPANS)}


def spans_of(tokens: np.ndarray, documents: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Index into :data:`SPANS` of each token, (rows, length) int8; -1 for padding.

    The tags of a section belong to it, since the model chooses them: ``think`` begins
    with the marker that opens it and ends with the one that closes it. Tags of messages
    are ``markup``. A document goes on from one row to the next.

    Args:
        tokens: (rows, length) ids. documents: of each token, -1 for padding, as in
            :class:`~kimi_k3.build.sample_rows.Samples`.
    """
    found = np.full(tokens.shape, PADDING, np.int8)
    flat, owners, spans = tokens.reshape(-1), documents.reshape(-1), found.reshape(-1)
    markers = _Markers(tokenizer)
    reader, document = _Reader(markers), PADDING
    for place in np.flatnonzero(owners != PADDING):
        if owners[place] != document:
            reader, document = _Reader(markers), owners[place]
        reader.take(int(flat[place]), int(place), spans)
    return found


class _Markers:
    """The control ids of tags, and what is written between them."""

    def __init__(self, tokenizer: Any):
        names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        self.open, self.close, self.sep, self.end = map(
            tokenizer.convert_tokens_to_ids, names
        )
        self._tokenizer = tokenizer
        self._tags: dict[tuple[int, ...], tuple[str, str]] = {}

    def tag(self, ids: Sequence[int]) -> tuple[str, str]:
        """Name and ``role`` of the tag written as ``ids``."""
        key = tuple(ids)
        if key not in self._tags:
            text = self._tokenizer.decode(list(ids))
            _, _, rest = text.partition(' role="')
            self._tags[key] = text.partition(" ")[0], rest.partition('"')[0]
        return self._tags[key]


class _Reader:
    """Goes through the ids of one document."""

    def __init__(self, markers: _Markers):
        self.markers = markers
        #: Name and span of each open tag, the innermost last.
        self.stack: list[tuple[str, str]] = []
        #: Places and ids since a marker that began a tag.
        self.places: list[int] | None = None
        self.ids: list[int] = []
        self.closes = False
        self.conversation = False

    def take(self, token: int, place: int, spans: np.ndarray) -> None:
        """Give ``spans[place]``, and those of a tag that ends here."""
        markers = self.markers
        spans[place] = _NUMBER[self._span()]
        if token in (markers.open, markers.close):
            self.conversation = True
            self.places, self.ids = [place], []
            self.closes = token == markers.close
            # Until the tag is complete: what a cut one could say is not known.
            spans[place] = _NUMBER["markup"]
        elif token == markers.end:
            self.stack, self.places = [], None
            spans[place] = _NUMBER[self._span()]
        elif self.places is not None:
            self.places.append(place)
            spans[place] = _NUMBER["markup"]
            if token == markers.sep:
                spans[self.places] = _NUMBER[self._tag()]
                self.places = None
            else:
                self.ids.append(token)

    def _span(self) -> str:
        """Of what is written here."""
        if self.stack:
            return self.stack[-1][1]
        return "markup" if self.conversation else "text"

    def _tag(self) -> str:
        """The span of the tag that is complete; the stack is as it is after it."""
        name, role = self.markers.tag(self.ids)
        if self.closes:
            return self._close(name)
        if name == "message":
            # Of an assistant only its sections are something that it says.
            self.stack = [(name, _OF_ROLE.get(role, "markup"))]
            return "markup"
        outer = self._span()
        span = _OF_SECTION.get(name, "markup" if outer == "text" else outer)
        self.stack.append((name, span))
        return span

    def _close(self, name: str) -> str:
        """Closes what is open up to the innermost ``name``; a stray tag closes nothing."""
        names = [open_name for open_name, _ in self.stack]
        if name not in names:
            return self._span()
        place = len(names) - 1 - names[::-1].index(name)
        span = "markup" if name == "message" else self.stack[place][1]
        self.stack = self.stack[:place]
        return span
