"""Loops: whether an answer says the same over and over until it ends, and from where.

*Loop.* Let x be the ids of an answer, n of them. Period p explains its end from s on if
x[i] = x[i − p] for every i from s + p to n − 1; s is the first such place, and n − s ids
are what is repeated. The smallest p for which enough is repeated is the loop's period.
How much is enough is written down in :data:`ENOUGH`: text, code, tables and lists repeat
themselves too, but not exactly, not for long, or they go on to something else. Where only
numbers differ from one period to the next (``Step 7: check it. Step 8: check it.``) more
is asked for, and words: counting is no loop.

*Repeated n-grams.* 1 − (different n-grams) / (all n-grams) of the ids, n = 4: seq-rep-4 of
Welleck et al., "Neural Text Generation with Unlikelihood Training" (2019).

*Compression.* Bytes of the text as UTF-8 / bytes of its raw DEFLATE stream (zlib, level
9): the higher, the more it repeats itself. Prose is at 1.5 to 3.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

#: Ids in an n-gram.
GRAM = 4

#: Texts of fewer bytes say nothing about compression: the stream's own tables weigh more.
LEAST_BYTES = 128


class Kind(IntEnum):
    """What the text of an id is made of."""

    SIGNS = 0
    DIGITS = 1
    LETTERS = 2


@dataclass(frozen=True)
class Token:
    """What the detector knows of an id. ``word`` is its text in lower case, bare."""

    kind: Kind
    word: str

    @classmethod
    def of(cls, content: bytes) -> "Token":
        """Of the bytes of an id, which need not be whole characters."""
        word = content.decode("utf-8", errors="replace").strip().lower()
        if word.isdecimal():
            return cls(Kind.DIGITS, word)
        # Part of a character is U+FFFD: all digits and signs that repeat are ASCII.
        if any(character.isalpha() or character == "\ufffd" for character in word):
            return cls(Kind.LETTERS, word)
        return cls(Kind.SIGNS, word)


@dataclass(frozen=True)
class Enough:
    """From what on a repetition is a loop.

    Attributes:
        tokens: ids that are repeated, the first period included.
        periods: how many periods these are.
        words: different words of at least two letters in a period.
    """

    tokens: int
    periods: int
    words: int = 0

    def asks(self, times: int) -> "Enough":
        """Of an answer that ended by itself: ``times`` as much."""
        return Enough(self.tokens * times, self.periods * times, self.words)

    def has(self, length: int, period: int) -> bool:
        """Whether ``length`` ids of that period are enough."""
        return length >= max(self.tokens, self.periods * period)


@dataclass(frozen=True)
class Loop:
    """Where a loop begins (ids before it), its period, and the ids that it repeats.

    ``counts`` says that numbers differ from period to period.
    """

    start: int
    period: int
    tokens: int
    counts: bool = False

    @property
    def periods(self) -> float:
        return self.tokens / self.period


#: Of an exact repetition with letters, in either way; of one without any; and of one that
#: counts.
ENOUGH = {
    "words": Enough(tokens=64, periods=4),
    "long": Enough(tokens=96, periods=3),
    "signs": Enough(tokens=128, periods=8),
    "counts": Enough(tokens=96, periods=8, words=4),
}

#: An answer that ended by itself got out of it, so it may have been asked to repeat.
_IF_ENDED = 2


def find_loop(
    ids: Sequence[int], tokens: Sequence[Token], *, ended: bool
) -> Loop | None:
    """The loop in which the answer ``ids`` (n,) ends, if it does.

    Args:
        tokens: of each id, (n,).
        ended: whether the answer ended by itself; ``ids`` are without its end then, and
            without the tags that close it.
    """
    times = _IF_ENDED if ended else 1
    loop = _exact(ids, tokens, times)
    return loop or _counting(ids, tokens, times)


def repeated_share(ids: Sequence[int], gram: int = GRAM) -> float | None:
    """Share of n-grams that were there before; None with fewer than two n-grams."""
    count = len(ids) - gram + 1
    if count < 2:
        return None
    return 1 - len({tuple(ids[i : i + gram]) for i in range(count)}) / count


def compression_ratio(text: str) -> float | None:
    """Bytes of ``text`` / bytes of its DEFLATE stream; None for a short text."""
    content = text.encode("utf-8", "surrogatepass")
    if len(content) < LEAST_BYTES:
        return None
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return len(content) / len(packer.compress(content) + packer.flush())


def _exact(ids: Sequence[int], tokens: Sequence[Token], times: int) -> Loop | None:
    n = len(ids)
    words, long, signs = (
        ENOUGH[name].asks(times) for name in ("words", "long", "signs")
    )
    for period, explained in enumerate(_tails(ids), start=1):
        length = period + explained
        if not (words.has(length, period) or long.has(length, period)):
            continue
        letters = any(t.kind == Kind.LETTERS for t in tokens[n - period :])
        if letters or signs.has(length, period):
            return Loop(n - length, period, length)
    return None


def _counting(ids: Sequence[int], tokens: Sequence[Token], times: int) -> Loop | None:
    """As :func:`_exact`, with every run of digits in the place of every other."""
    places: list[int] = []
    symbols: list[int] = []
    for place, (token_id, token) in enumerate(zip(ids, tokens, strict=True)):
        if token.kind != Kind.DIGITS:
            symbols.append(token_id)
        elif not symbols or symbols[-1] != _ANY_NUMBER:
            symbols.append(_ANY_NUMBER)
        else:
            continue  # 9 and 10 are one number each, of one id or of two
        places.append(place)
    n, enough = len(symbols), ENOUGH["counts"].asks(times)
    for period, explained in enumerate(_tails(symbols), start=1):
        length = period + explained
        if length < enough.periods * period:
            continue
        start = places[n - length]
        if len(ids) - start < enough.tokens:
            continue
        cycle = [tokens[place] for place in places[n - period :]]
        words = {t.word for t in cycle if t.kind == Kind.LETTERS and len(t.word) > 1}
        if len(words) >= enough.words and any(t.kind == Kind.DIGITS for t in cycle):
            return Loop(start, period, len(ids) - start, counts=True)
    return None


#: Stands for a number; no id is negative.
_ANY_NUMBER = -1


def _tails(symbols: Sequence[int]) -> list[int]:
    """For each period p from 1 on: how many symbols at the end equal those p before.

    The Z function of the reversed sequence, in linear time.
    """
    y = list(reversed(symbols))
    n = len(y)
    found = [0] * n
    left = right = 0
    for i in range(1, n):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < n and y[length] == y[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found[1:]
