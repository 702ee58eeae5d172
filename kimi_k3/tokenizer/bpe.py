"""Byte-pair encoding of ordinary text, through tiktoken.

Nothing here reads control names in a text: that is decided elsewhere, on purpose.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from ..errors import TokenizerError

_NOT_HAN = r"&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

#: How text is split before merging. A run of Han comes first and Han is no letter of
#: the word patterns, so Chinese next to Latin is always split.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

#: Longest text, and longest run of white space or of anything else, split at once.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000

# Unicode White_Space, which the split pattern's \s means too; str.isspace has four more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_RUN = re.compile(f"[{_SPACE}]+|[^{_SPACE}]+")


def cut(text: str) -> Iterator[str]:
    """``text`` in order, in parts that the split pattern takes one by one.

    Every MAX_CHARACTERS, and within those after every MAX_RUN characters of a run.
    """
    for start in range(0, len(text), MAX_CHARACTERS):
        yield from _cut_runs(text[start : start + MAX_CHARACTERS])


def _cut_runs(text: str) -> Iterator[str]:
    done = 0
    if len(text) >= MAX_RUN:
        for run in _RUN.finditer(text):
            for end in range(run.start() + MAX_RUN, run.end() + 1, MAX_RUN):
                yield text[done:end]
                done = end
    if done < len(text):
        yield text[done:]


class Bpe:
    """The ids of one vocabulary: ranks of byte strings, control ids above them."""

    def __init__(self, ranks: dict[bytes, int], controls: Sequence[str]):
        try:
            import tiktoken
        except ImportError:
            raise TokenizerError(
                "Kimi K3's tokenizer needs the tiktoken package: pip install tiktoken"
            ) from None
        self.controls = {name: len(ranks) + i for i, name in enumerate(controls)}
        self.bytes_by_id = [*ranks, *(name.encode() for name in controls)]
        self._encoding = tiktoken.Encoding(
            "kimi_k3",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.controls,
        )
        self._control = _either(self.controls)

    def __len__(self) -> int:
        return len(self.bytes_by_id)

    @property
    def first_control(self) -> int:
        return len(self.bytes_by_id) - len(self.controls)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` as ordinary text: never a control id."""
        ids: list[int] = []
        for part in cut(text):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def encode_with_controls(
        self, text: str, names: Iterable[str] | None = None
    ) -> list[int]:
        """Ids of ``text`` in which control ``names`` (default: all) become their ids."""
        ids: list[int] = []
        pattern = self._control if names is None else _either(names)
        # A capturing split puts the names at odd places.
        for place, part in enumerate(pattern.split(text)):
            ids += [self.controls[part]] if place % 2 else self.encode(part)
        return ids

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes that ``ids`` stand for; a control id stands for its name."""
        try:
            if ids and min(ids) < 0:
                raise IndexError
            return b"".join([self.bytes_by_id[token_id] for token_id in ids])
        except IndexError:
            odd = next(i for i in ids if not 0 <= i < len(self))
            raise TokenizerError(
                f"id {odd} is not in this vocabulary of {len(self)} ids; the model's "
                f"vocab_size and the tokenizer's files do not belong together."
            ) from None


def _either(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of ``names``, the longest first, as a group."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


# Bytes that print in Latin-1 stand for themselves, the others for U+0100 onwards.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_NAMES = str.maketrans(
    {
        byte: chr(0x100 + place)
        for place, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)
    }
)


def printable(token: bytes) -> str:
    """The name of a rank: one printable character a byte, as in byte-level BPE files."""
    return token.decode("latin-1").translate(_NAMES)
