"""A rendered conversation: pieces of text and of structure that do not mix.

A host that renders a conversation to one string and encodes that string later cannot
tell structure from a user's text that spells it. The string made here knows.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex


class Piece(NamedTuple):
    """A run of ordinary text, or the name of one control id."""

    text: str
    control: bool = False


class RenderedPrompt(str):
    """The text of ``pieces``, for hosts that want a string; encoding uses the pieces.

    Slices, sums and strips keep what they know, as do pickles and copies. What other
    string methods return is an ordinary string, all of it text to the tokenizer.
    """

    pieces: tuple[Piece, ...]

    def __new__(cls, pieces: Iterable[Piece]) -> "RenderedPrompt":
        pieces = tuple(pieces)
        prompt = super().__new__(cls, "".join(piece.text for piece in pieces))
        prompt.pieces = pieces
        return prompt

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.pieces,)

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        return format(str.__str__(self), spec) if spec else self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            return super().__getitem__(key)
        start, stop, step = key.indices(len(self))
        if step != 1:
            return super().__getitem__(key)
        return RenderedPrompt(_between(self.pieces, start, stop))

    def __add__(self, other: str) -> str:
        return RenderedPrompt((*self.pieces, *_pieces_of(other)))

    def __radd__(self, other: str) -> str:
        return RenderedPrompt((*_pieces_of(other), *self.pieces))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self


def _pieces_of(text: str) -> tuple[Piece, ...]:
    return text.pieces if isinstance(text, RenderedPrompt) else (Piece(text),)


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
