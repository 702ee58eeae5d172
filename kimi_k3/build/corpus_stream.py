"""The documents of one corpus in the order in which samples take them.

Each document once, shuffled by the mix's seed, and of one part only: calibration or
held out. Of a source that is larger than the buffer, what lies further on is only read
as documents are taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .documents import Document, Render, is_held_out, order_key, read_documents
from .mix import Corpus, Dataset, Mix

CALIBRATION, HELD_OUT, ALL = "calibration", "held_out", "all"
PARTS = (CALIBRATION, HELD_OUT, ALL)

#: Characters of documents that are shuffled at a time, at most.
BUFFERED = 8_000_000

#: A dataset comes over a network: no more than so many characters for each token wanted.
BUFFERED_PER_TOKEN = 64

#: What is going on, how much of it is done, and of how much (0 where nobody knows).
Progress = Callable[[str, int, int], None]


@dataclass
class Counts:
    """What was met in a corpus and not used."""

    duplicates: int = 0
    empty: int = 0
    left_out: list[str] = field(default_factory=list)


class CorpusStream:
    """Iterates over the documents of ``corpus`` that belong to ``part``.

    Args:
        seen: digests of documents that were met, shared by the corpora of a mix: the
            first corpus that reads a text has it.
        render: a conversation as text; see :func:`read_documents`.
    """

    def __init__(
        self,
        corpus: Corpus,
        mix: Mix,
        part: str,
        seen: set[str],
        render: Render,
        progress: Progress | None = None,
    ):
        self.name = corpus.name
        self.counts = Counts()
        self._corpus, self._mix, self._part = corpus, mix, part
        self._seen = seen
        self._render = render
        self._progress = progress
        self._buffered = BUFFERED
        if isinstance(corpus.source, Dataset):
            wanted = mix.wanted[mix.corpora.index(corpus)]
            self._buffered = min(BUFFERED, BUFFERED_PER_TOKEN * wanted)
        self._documents = self._shuffled()

    def next(self) -> Document | None:
        """The next document; None when there are no more."""
        return next(self._documents, None)

    def _shuffled(self) -> Iterator[Document]:
        # Ordered by a hash of seed and text, so the order of the source does not
        # matter as long as all of it is in the buffer.
        heap: list[tuple[str, int, Document]] = []
        characters = 0
        for number, document in enumerate(self._unique()):
            key = order_key(self._mix.seed, document.digest)
            heappush(heap, (key, number, document))
            characters += len(document.text)
            while characters > self._buffered:
                document = heappop(heap)[-1]
                characters -= len(document.text)
                yield document
        while heap:
            yield heappop(heap)[-1]

    def _unique(self) -> Iterator[Document]:
        mix, counts = self._mix, self.counts
        seed, left_out = mix.seed, counts.left_out.append
        read = 0
        for document in read_documents(
            self._corpus, mix.base, seed, self._render, left_out
        ):
            if document is None:
                counts.empty += 1
            elif self._is_of_part(document):
                if document.digest in self._seen:
                    counts.duplicates += 1
                    continue
                self._seen.add(document.digest)
                read += len(document.text)
                if self._progress and read <= self._buffered:
                    self._progress(f"reading {self.name}, characters", read, 0)
                yield document

    def _is_of_part(self, document: Document) -> bool:
        if self._part == ALL:
            return True
        held_out = is_held_out(document.digest, self._mix.held_out)
        return held_out == (self._part == HELD_OUT)
