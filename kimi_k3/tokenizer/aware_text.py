"""Strings that remember which of their characters are structure.

Hosts pass text through slices, sums and strips on its way between ids and users. A
string of this kind goes the same way and arrives knowing what plain text cannot: which
markers are control ids and which are somebody's text that spells them.
"""

from typing import Any, NamedTuple, SupportsIndex


class Piece(NamedTuple):
    """A run of ordinary text, or the name of one control id."""

    text: str
    control: bool = False


class AwareText(str):
    """A string whose slices, sums and strips keep what it knows, in two methods.

    What other string methods return is an ordinary string, without structure.
    """

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its text and its control names, in order."""
        raise NotImplementedError

    def _part(self, start: int, stop: int) -> "AwareText":
        """Characters ``start`` … ``stop``, with what is known of them."""
        raise NotImplementedError

    def _with(self, before: str, after: str) -> "AwareText":
        """``before`` + this + ``after``; of an ordinary string all is ordinary text."""
        raise NotImplementedError

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
        return self._part(start, max(start, stop))

    def __add__(self, other: Any) -> str:
        return self._with("", other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return self._with(other, "") if isinstance(other, str) else NotImplemented

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
