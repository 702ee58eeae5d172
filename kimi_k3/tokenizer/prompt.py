"""A rendered conversation: pieces of text and of structure that do not mix.

A host that renders a conversation to one string and encodes that string later cannot
tell structure from a user's text that spells it. The string made here knows.
"""

from collections.abc import Iterable
from typing import Any

from .aware_text import AwareText, Piece


class RenderedPrompt(AwareText):
    """The text of ``pieces``, for hosts that want a string; encoding uses the pieces."""

    _pieces: tuple[Piece, ...]

    def __new__(cls, pieces: Iterable[Piece]) -> "RenderedPrompt":
        pieces = tuple(pieces)
        prompt = super().__new__(cls, "".join(piece.text for piece in pieces))
        prompt._pieces = pieces
        return prompt

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._pieces

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.pieces,)

    def _part(self, start: int, stop: int) -> "RenderedPrompt":
        return RenderedPrompt(_between(self.pieces, start, stop))

    def _with(self, before: str, after: str) -> "RenderedPrompt":
        return RenderedPrompt((*_pieces_of(before), *self.pieces, *_pieces_of(after)))


def _pieces_of(text: str) -> tuple[Piece, ...]:
    if isinstance(text, AwareText):
        return text.pieces
    return (Piece(text),) if text else ()


def _between(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces of characters ``start`` … ``stop``; part of a control name is text."""
    kept = []
    place = 0
    for piece in pieces:
        first, last = max(start - place, 0), min(stop - place, len(piece.text))
        if first < last:
            whole = last - first == len(piece.text)
            kept.append(Piece(piece.text[first:last], piece.control and whole))
        place += len(piece.text)
    return kept
