"""The shards of a conversion: one is made durable while the next is written."""

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ..errors import ConversionError
from .build_layout import BuildShard
from .conversion_journal import ConversionJournal, FinishedShard
from .convert_shard import ShardMaker
from .file_hashes import FileHashes, check_hub_hash, hashing_threads
from .provenance import ShardRecord
from .shard_writer import ShardWriter


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
        shard, shards: the one in work, from 0 on, and how many there are.
        bytes_done, bytes_all: of this process's share of the build.
        seconds: since this process began.
        hashing: what is still hashed when all shards are written, "the build" or "the
            source"; bytes are its own then.
        finished: whether this shard is done and safe on disk.
    """

    shard: int
    shards: int
    bytes_done: int
    bytes_all: int
    seconds: float
    hashing: str = ""
    finished: bool = False

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What is left to do, at the speed so far; None at the very beginning."""
        if not self.bytes_per_second:
            return None
        return (self.bytes_all - self.bytes_done) / self.bytes_per_second


@dataclass(frozen=True)
class _Waiting:
    """A shard that is written, its file, and what it is once it is durable."""

    shard: BuildShard
    file: ExitStack
    record: Future[ShardRecord]


Watch = Callable[[Progress], None]
Tell = Callable[[str], None]


class ConversionRun:
    """What is left to do of one conversion, in the locked folder of its journal.

    Attributes:
        left: shards that are not finished.
    """

    def __init__(
        self,
        maker: ShardMaker,
        journal: ConversionJournal,
        hash_source: bool,
        progress: Watch | None,
        tell: Tell,
    ):
        self.maker, self.journal = maker, journal
        self.progress, self.tell = progress, tell
        self.shards = maker.layout.shards
        self.stamps = {
            shard.file: maker.source.stamps(maker.source_names(shard))
            for shard in self.shards
        }
        self.left = [
            shard
            for shard in self.shards
            if not journal.is_finished(shard.file, self.stamps[shard.file])
        ]
        stale = sum(shard.file in journal.finished for shard in self.left)
        if stale:
            tell(f"{stale} shards are written again: their source files were changed.")
        if done := len(self.shards) - len(self.left):
            tell(f"{done} of {len(self.shards)} shards were done before.")
        self._hash_source = hash_source
        self._said: set[str] = set()
        self._started = time.monotonic()
        self._bytes_all = sum(shard.nbytes for shard in self.left)
        self._bytes_done = 0

    def write_shards(self) -> None:
        """Write what is left; the journal knows all of it then."""
        with self.writing():
            self.journal.write()
        hashes = self._hashes() if self._hash_source else None
        with hashes or nullcontext(), FileHashes(threads=hashing_threads()) as written:
            left = {shard.file for shard in self.left}
            for file, shard in self.journal.finished.items():
                if file not in left and shard.record.sha256 is None:
                    written.add(self.journal.out / file)
            self._write_left(hashes, written)
            show = partial(show_hashing, self.progress, len(self.shards))
            self._take_written(written.take(wait=partial(show, written, "the build")))
            if hashes is not None:
                self._take(hashes.take(wait=partial(show, hashes, "the source")))
            with self.writing():
                self.journal.write()

    def _write_left(self, hashes: FileHashes | None, written: FileHashes) -> None:
        """One shard is made durable, which is waiting, while the next is written."""
        waiting: _Waiting | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="kimi-k3-sync") as pool:
            try:
                for shard in self.left:
                    with self.writing(), ExitStack() as open_file:
                        path = self.journal.out / shard.file
                        writer = open_file.enter_context(
                            ShardWriter(path, shard.tensors)
                        )
                        self._fill(writer, shard)
                        if waiting is not None:
                            before, waiting = waiting, None
                            self._settle(before, hashes, written)
                        waiting = _Waiting(
                            shard, open_file.pop_all(), pool.submit(writer.finish)
                        )
            finally:
                if waiting is not None:
                    with self.writing():
                        self._settle(waiting, hashes, written)

    def _settle(
        self, waiting: "_Waiting", hashes: FileHashes | None, written: FileHashes
    ) -> None:
        """Wait until a shard is durable; the journal has it then."""
        shard = waiting.shard
        with waiting.file:
            record = waiting.record.result()
        stamps = self.stamps[shard.file]
        self.journal.finished[shard.file] = FinishedShard(record, stamps)
        written.add(self.journal.out / shard.file)
        self._take_written(written.take())
        if hashes is not None:
            self._take(hashes.take())
        self.journal.write()
        self._show(shard, finished=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Says of a disk that takes no more what is kept, and how to go on."""
        try:
            yield
        except OSError as error:
            done = len(self.journal.finished)
            raise ConversionError(
                f"{error.filename or self.journal.out} cannot be written: "
                f"{error.strerror}. {done} of {len(self.shards)} shards are finished and "
                "kept: make room, then go on with --resume."
            ) from error

    def _fill(self, writer: ShardWriter, shard: BuildShard) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for nbytes in self.maker.fill(writer, shard):
                self._bytes_done += nbytes
                self._show(shard)
        mx.clear_cache()
        for warning in caught:
            self._say(str(warning.message))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.tell(text)

    def _hashes(self) -> FileHashes:
        """Hashes the source files whose hashes are not known, in order."""
        source = self.maker.source
        for shard, (_, stamp) in list(self.journal.hashes.items()):
            if source.reader.stamps[shard][1] != stamp:
                del self.journal.hashes[shard]
        headers = source.folder.headers
        return FileHashes(
            [headers[s].path for s in sorted(headers) if s not in self.journal.hashes]
        )

    def _take(self, hashes: dict[str, str]) -> None:
        """Note ``hashes``; raises CheckpointError if the hub knows another."""
        source = self.maker.source
        for shard, found in hashes.items():
            check_hub_hash(source.folder.headers[shard].path, found)
            self.journal.hashes[shard] = found, source.reader.stamps[shard][1]

    def _take_written(self, hashes: dict[str, str]) -> None:
        """Note ``hashes`` of finished shards of the build."""
        finished = self.journal.finished
        for file, found in hashes.items():
            record = replace(finished[file].record, sha256=found)
            finished[file] = replace(finished[file], record=record)

    def _show(self, shard: BuildShard, *, finished: bool = False) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    shard=self.shards.index(shard),
                    shards=len(self.shards),
                    bytes_done=self._bytes_done,
                    bytes_all=self._bytes_all,
                    seconds=time.monotonic() - self._started,
                    finished=finished,
                )
            )


def show_hashing(
    progress: Watch | None, shards: int, hashes: FileHashes, what: str
) -> None:
    """Show how far ``hashes`` of ``what`` are; all ``shards`` are written."""
    if progress is not None:
        progress(
            Progress(
                shard=shards - 1,
                shards=shards,
                bytes_done=hashes.nbytes,
                bytes_all=hashes.nbytes_all,
                seconds=hashes.seconds,
                hashing=what,
            )
        )
