"""Text of ids that knows which of its markers were control ids.

A model may write `<|close|>think<|sep|>` in ordinary tokens, to talk about the format or
to edit a file that holds it. In a plain string that looks like structure, and hosts
look for structure in strings. The string made here tells them apart:

- a host that compares it character by character with a marker, as mlx-lm's
  ``TextStateMachine`` does, finds control ids only where it is given
  :func:`control_characters`, and text that spells a marker nowhere;
- code of this package asks :attr:`DecodedText.controls`.
"""

from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, SupportsIndex

from .aware_text import AwareText, Piece
from .files import MARKERS

#: Where control names lie in a text: sorted (start, stop) pairs that do not overlap.
Ranges = tuple[tuple[int, int], ...]


class DecodedText(AwareText):
    """``text``, in which the names of control ids lie at ``controls``.

    Part of a control name, and what is added as an ordinary string, is ordinary text.
    ``text[i]`` looks like a character of the text, but those of control names are not
    equal to it, nor is the last one of a marker that text spells. A loop over the
    characters, ``in`` and ``find`` go by the text alone.
    """

    controls: Ranges

    def __new__(cls, text: str = "", controls: Ranges = ()) -> "DecodedText":
        decoded = super().__new__(cls, text)
        decoded.controls = controls
        return decoded

    @classmethod
    def of(cls, pieces: Iterable[tuple[str, bool]]) -> "DecodedText":
        """The text of ``pieces``, each with whether it names a control id."""
        texts, controls, place = [], [], 0
        for text, control in pieces:
            if control:
                controls.append((place, place + len(text)))
            texts.append(text)
            place += len(text)
        return cls("".join(texts), tuple(controls))

    @classmethod
    def joined(cls, *parts: str) -> "DecodedText":
        """``parts`` one after the other; of ordinary strings all is ordinary text."""
        controls: list[tuple[int, int]] = []
        place = 0
        for part in parts:
            if isinstance(part, DecodedText):
                controls += ((place + a, place + b) for a, b in part.controls)
            place += len(part)
        return cls("".join(parts), tuple(controls))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.plain(), self.controls)

    def plain(self) -> str:
        """The characters alone, as an ordinary string."""
        return str.__str__(self)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        content, pieces, place = self.plain(), [], 0
        for start, stop in self.controls:
            pieces += [Piece(content[place:start]), Piece(content[start:stop], True)]
            place = stop
        return tuple(piece for piece in [*pieces, Piece(content[place:])] if piece.text)

    def __add__(self, other: Any) -> str:
        # A prompt also knows where each of its texts ends, so the sum is one.
        if isinstance(other, AwareText) and not isinstance(other, DecodedText):
            return NotImplemented
        return super().__add__(other)

    def _part(self, start: int, stop: int) -> "DecodedText":
        first = bisect_left(self.controls, (start, start))
        beyond = bisect(self.controls, (stop, stop))
        kept = [(a - start, b - start) for a, b in self.controls[first:beyond]]
        if kept and kept[-1][1] > stop - start:
            kept.pop()
        return DecodedText(str.__getitem__(self, slice(start, stop)), tuple(kept))

    def _with(self, before: str, after: str) -> "DecodedText":
        return DecodedText.joined(before, self, after)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            return super().__getitem__(key)
        character = str.__getitem__(self, key)
        place = range(len(self))[key]
        before = bisect(self.controls, (place, len(self))) - 1
        if before >= 0 and place < self.controls[before][1]:
            start, stop = self.controls[before]
            name = str.__getitem__(self, slice(start, stop))
            return control_characters(name)[place - start]
        if character == ">" and super().endswith(MARKERS, 0, place + 1):
            return _SpelledEnd(character)
        return character


@cache
def control_characters(name: str) -> tuple[str, ...]:
    """What one gets from a DecodedText, one by one, where the control id ``name`` is."""
    return tuple(_ControlCharacter(name, place) for place in range(len(name)))


class _ControlCharacter(str):
    """Character ``place`` of a control name: equal to itself and to no other.

    Of names other than markers all are equal, so that one edge takes out any name.
    """

    origin: tuple[str, int]
    identity: tuple[str, int]

    def __new__(cls, name: str, place: int) -> "_ControlCharacter":
        character = super().__new__(cls, name[place])
        character.origin = (name, place)
        character.identity = (name, place) if name in MARKERS else ("", 0)
        return character

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.origin

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ControlCharacter) and self.identity == other.identity

    def __ne__(self, other: object) -> bool:
        return not self == other


#: What equals every character of a control name that is no marker, such as ``[PAD]``.
OTHER_CONTROL: Sequence[str] = (_ControlCharacter("?", 0),)


class _SpelledEnd(str):
    """The last character of a marker that is text: shown alike, but equal to nothing."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other
