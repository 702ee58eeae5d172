"""Interleaves the documents of several corpora by their shares, and lays them in rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .documents import Document

#: Labels and document numbers of positions that hold no token.
PADDING = -1

#: Token ids of a document, int32.
Encode = Callable[[Document], np.ndarray]


class Stream(Protocol):
    """Gives documents one by one, then None."""

    def next(self) -> Document | None: ...


@dataclass(frozen=True)
class Taken:
    """Tokens of one document in samples, and which corpus and document they are of."""

    ids: np.ndarray
    label: int
    document: int


@dataclass
class Interleaved:
    """Documents in the order of the samples, and how far each corpus came."""

    tokens: list[int]
    taken: list[Taken] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    #: Documents of each corpus that were laid again after its last.
    repeated: list[int] = field(default_factory=list)


def interleave(
    streams: Sequence[Stream],
    wanted: Sequence[int],
    encode: Encode,
    *,
    most: int | None = None,
    repeat: bool = False,
    tell: Callable[[int], None] | None = None,
) -> Interleaved:
    """Take documents until each corpus has its ``wanted`` tokens, or has no more.

    The next document always comes from the corpus that is furthest behind its share of
    what has been taken; the first of equals. What a corpus still needs bounds each of
    its documents, so that none fills more than its corpus' share.

    Args:
        most: tokens that one document gives at most.
        repeat: start a corpus again after its last document.
        tell: is given the number of tokens taken so far.
    """
    total = sum(wanted)
    result = Interleaved([0] * len(wanted), repeated=[0] * len(wanted))
    whole: list[list[Taken]] = [[] for _ in wanted]
    unfilled = list(range(len(wanted)))
    while unfilled:
        done = sum(result.tokens)
        label = max(unfilled, key=lambda i: wanted[i] * done - result.tokens[i] * total)
        document = streams[label].next()
        if document is not None:
            taken = Taken(encode(document), label, len(result.digests))
            result.digests.append(document.digest)
            if repeat:
                whole[label].append(taken)
        elif whole[label]:
            taken = whole[label][result.repeated[label] % len(whole[label])]
            result.repeated[label] += 1
        else:
            unfilled.remove(label)
            continue
        room = wanted[label] - result.tokens[label]
        ids = taken.ids[: min(room, most or room)]
        result.taken.append(Taken(ids, label, taken.document))
        result.tokens[label] += len(ids)
        if result.tokens[label] == wanted[label]:
            unfilled.remove(label)
        if tell:
            tell(done + len(ids))
    return result


#: Tokens, labels and documents, each (rows, length).
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def pack(taken: Sequence[Taken], length: int, padding_id: int) -> Rows:
    """Rows of all documents one after another; the last is padded if it is not full."""
    count = sum(len(one.ids) for one in taken)
    rows = _empty(-(-count // length), length, padding_id)
    done = 0
    for one in taken:
        place = slice(done, done + len(one.ids))
        _lay(rows, one, place)
        done = place.stop
    return _shaped(rows, length)


def window(taken: Sequence[Taken], length: int, padding_id: int) -> Rows:
    """One row for each document, padded on its right."""
    rows = _empty(len(taken), length, padding_id)
    for row, one in enumerate(taken):
        _lay(rows, one, slice(row * length, row * length + len(one.ids)))
    return _shaped(rows, length)


def _empty(rows: int, length: int, padding_id: int) -> Rows:
    return (
        np.full(rows * length, padding_id, np.int32),
        np.full(rows * length, PADDING, np.int16),
        np.full(rows * length, PADDING, np.int32),
    )


def _lay(rows: Rows, one: Taken, place: slice) -> None:
    for array, value in zip(rows, (one.ids, one.label, one.document), strict=True):
        array[place] = value


def _shaped(rows: Rows, length: int) -> Rows:
    tokens, labels, documents = (array.reshape(-1, length) for array in rows)
    return tokens, labels, documents
