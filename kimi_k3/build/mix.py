"""What samples are made of: corpora and their shares, as values that check themselves.

A corpus has one kind of source. How all this is written in a file: ``mix_file.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MixError
from .scripts import LANGUAGES

PACKINGS = ("pack", "window")
IF_SHORT = ("refuse", "repeat", "accept")

#: A token's corpus is kept as an int16.
MOST_CORPORA = 32_767

#: A value of a column that a dataset can be filtered by.
Scalar = str | int | float | bool


@dataclass(frozen=True)
class Files:
    """Text files: paths or globs. Long ones are cut into documents."""

    patterns: tuple[str, ...]


@dataclass(frozen=True)
class JsonLines:
    """Files with one JSON object a line, whose text lies under ``text_key``."""

    patterns: tuple[str, ...]
    text_key: str = "text"


@dataclass(frozen=True)
class Chats:
    """JSONL files with ``messages`` and perhaps ``tools`` a line."""

    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """A Hugging Face dataset, streamed. ``where``: column and the values it may have."""

    path: str
    config: str | None = None
    split: str = "train"
    text_key: str = "text"
    where: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()
    data_dir: str | None = None
    data_files: tuple[str, ...] = ()
    revision: str | None = None


Source = Files | JsonLines | Chats | Dataset


@dataclass(frozen=True)
class Corpus:
    """A source and how large a part of the samples comes from it.

    ``languages`` (codes such as "de") are only used to check the scripts found.
    """

    name: str
    share: float
    source: Source
    languages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"corpus {self.name!r}"
        if not self.name.strip():
            raise MixError("a corpus has an empty name; give it one.")
        if not self.name.isprintable():
            raise MixError(
                f"{where}: the name has characters that cannot be printed; results are "
                "kept by it, so choose plain ones."
            )
        if not 0 < self.share < float("inf"):
            raise MixError(
                f"{where}: share is {self.share}; make it positive, or take the corpus out."
            )
        for code in self.languages:
            if code not in LANGUAGES:
                raise MixError(
                    f"{where}: the script of language {code!r} is not known here; known "
                    f"are {', '.join(sorted(LANGUAGES))}. Leave the others out."
                )


@dataclass(frozen=True)
class Mix:
    """Corpora, their shares, and how rows of tokens are made of them.

    Args:
        tokens: tokens in all, without padding.
        length: tokens a row.
        corpora: in the order in which labels count them.
        seed: which documents come first.
        held_out: share of the documents kept from calibration, chosen by their hash.
        packing: "pack" lays documents one after another into full rows; "window" gives
            each document one row, cut at ``length`` or padded.
        end_of_document: end each text with ``[EOS]``; chats end as they are rendered.
        if_short: what to do with a corpus that cannot fill its share: "refuse",
            "repeat" its documents, or "accept" fewer tokens.
        base: the folder that relative paths start from.
        origin: what messages call this mix.
    """

    tokens: int
    length: int
    corpora: tuple[Corpus, ...]
    seed: int = 0
    held_out: float = 0.1
    packing: str = "pack"
    end_of_document: bool = True
    if_short: str = "refuse"
    base: Path = Path()
    origin: str = "the mix"

    def __post_init__(self) -> None:
        if self.length < 2:
            self._fail(f"length is {self.length}; a row has at least 2 tokens.")
        if self.tokens < self.length:
            self._fail(
                f"tokens is {self.tokens}, which is less than one row of {self.length}; "
                "ask for more tokens or shorter rows."
            )
        if self.packing not in PACKINGS:
            self._fail(f"packing is {self.packing!r}; choose {_either(PACKINGS)}.")
        if self.if_short not in IF_SHORT:
            self._fail(f"if_short is {self.if_short!r}; choose {_either(IF_SHORT)}.")
        if self.packing == "pack" and (beyond := self.tokens % self.length):
            below = self.tokens - beyond
            self._fail(
                f"tokens is {self.tokens}, which is no whole number of rows of "
                f"{self.length}; take {below} or {below + self.length}."
            )
        if not 0 <= self.held_out < 1:
            self._fail(
                f"held_out is {self.held_out}; it is a share of the documents, from 0 "
                "to below 1."
            )
        if not self.corpora:
            self._fail("there is no [[corpus]]; name at least one.")
        if len(self.corpora) > MOST_CORPORA:
            self._fail(
                f"there are {len(self.corpora)} corpora; at most {MOST_CORPORA} can be "
                "told apart. Put sources that belong together into one corpus."
            )
        names = [corpus.name for corpus in self.corpora]
        if twice := [name for name in names if names.count(name) > 1]:
            self._fail(
                f"two corpora are called {twice[0]!r}; results are kept by name, so "
                "rename one."
            )
        for corpus, wanted in zip(self.corpora, self.wanted, strict=True):
            if not wanted:
                self._fail(
                    f"the share of corpus {corpus.name!r} is less than one of "
                    f"{self.tokens} tokens; raise it or take the corpus out."
                )

    def _fail(self, what: str) -> None:
        raise MixError(f"{self.origin}: {what}")

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each corpus, scaled to a sum of 1."""
        total = sum(corpus.share for corpus in self.corpora)
        return tuple(corpus.share / total for corpus in self.corpora)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Tokens of each corpus; they sum to ``tokens``."""
        exact = [share * self.tokens for share in self.shares]
        counts = [int(value) for value in exact]
        by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in by_rest[: self.tokens - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader may want to know about the file itself."""
        total = sum(corpus.share for corpus in self.corpora)
        if abs(total - 1) < 1e-6:
            return ()
        return (f"the shares sum to {total:g} and were scaled to 1.",)


def _either(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"
