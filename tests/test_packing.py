"""Documents of several corpora are interleaved by their shares, and laid in rows."""

import random
from collections import Counter

import numpy as np

from kimi_k3.build.documents import Document
from kimi_k3.build.packing import Interleaved, Taken, interleave, pack, window


class Numbers:
    """A stream of documents of the given lengths; their text is their number."""

    def __init__(self, name: str, lengths: list[int]) -> None:
        self.left = [
            Document(f"{name}{i} {length}", f"{name}{i}")
            for i, length in enumerate(lengths)
        ]

    def next(self) -> Document | None:
        return self.left.pop(0) if self.left else None


def ones(document: Document) -> np.ndarray:
    return np.ones(int(document.text.split()[1]), np.int32)


def farthest_from_share(found: Interleaved, wanted: list[int]) -> float:
    """How many tokens the corpora are off their shares at most, at any document."""
    got, off = np.zeros(len(wanted)), 0.0
    share = np.array(wanted) / sum(wanted)
    for taken in found.taken:
        got[taken.label] += len(taken.ids)
        off = max(off, float(np.abs(got - share * got.sum()).max()))
    return off


def test_shares_hold_all_along():
    chance = random.Random(3)
    for _ in range(50):
        wanted = [chance.randrange(1, 1000) for _ in range(chance.randrange(1, 6))]
        lengths = [[chance.randrange(20, 60) for _ in range(50)] for _ in wanted]
        streams = [Numbers(str(i), one) for i, one in enumerate(lengths)]
        found = interleave(streams, wanted, ones)
        assert found.tokens == wanted
        sums: Counter[int] = Counter()
        for taken in found.taken:
            sums[taken.label] += len(taken.ids)
        assert [sums[i] for i in range(len(wanted))] == wanted
        # Each corpus may be behind by a document of every other one.
        assert farthest_from_share(found, wanted) <= 60 * len(wanted)


def test_one_corpus_after_another_would_be_seen():
    found = Interleaved([500, 500], [Taken(np.ones(50), i // 10, i) for i in range(20)])
    assert farthest_from_share(found, [500, 500]) == 250


def test_no_document_fills_more_than_its_share():
    found = interleave([Numbers("a", [9999]), Numbers("b", [10] * 9)], [100, 50], ones)
    assert [(t.label, len(t.ids)) for t in found.taken] == [(0, 100)] + [(1, 10)] * 5


def test_repeats_and_shortage():
    def streams() -> list[Numbers]:
        return [Numbers("a", [30, 30]), Numbers("b", [10] * 30)]

    short = interleave(streams(), [100, 100], ones)
    assert (short.tokens, short.repeated) == ([60, 100], [0, 0])
    found = interleave(streams(), [100, 100], ones, repeat=True)
    assert (found.tokens, found.repeated) == ([100, 100], [2, 0])
    digests = [found.digests[t.document] for t in found.taken if t.label == 0]
    assert digests == ["a0", "a1", "a0", "a1"]
    nothing = interleave([Numbers("a", [])], [10], ones, repeat=True)
    assert nothing.tokens == [0]


def test_rows():
    taken = [
        Taken(np.array([1, 2, 3], np.int32), 0, 0),
        Taken(np.array([4, 5], np.int32), 1, 1),
    ]
    tokens, labels, documents = pack(taken, 4, 99)
    assert tokens.tolist() == [[1, 2, 3, 4], [5, 99, 99, 99]]
    assert labels.tolist() == [[0, 0, 0, 1], [1, -1, -1, -1]]
    assert documents.tolist() == [[0, 0, 0, 1], [1, -1, -1, -1]]
    tokens, labels, documents = window(taken, 4, 99)
    assert tokens.tolist() == [[1, 2, 3, 99], [4, 5, 99, 99]]
    assert labels.tolist() == [[0, 0, 0, -1], [1, 1, -1, -1]]
    assert documents.tolist() == [[0, 0, 0, -1], [1, 1, -1, -1]]
