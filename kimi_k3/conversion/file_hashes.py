"""SHA-256 of whole files, computed in threads while shards are written."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as settle
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Self

from ..errors import CheckpointError
from .provenance import hub_sha256

#: Bytes that are hashed between two looks whether somebody still waits.
_STEP = 2 << 20

#: A thread hashes about 1 GB/s where the processor has instructions for it.
_MOST_THREADS = 4


class FileHashes:
    """Hashes files of one folder; a context manager, which stops at its end.

    ``nbytes`` counts what has been hashed so far, of ``nbytes_all``, in ``seconds``.
    """

    def __init__(self, paths: Iterable[Path] = (), threads: int = 1):
        self.nbytes = self.nbytes_all = 0
        self._started = time.monotonic()
        self._lock = Lock()
        self._stop = Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kimi-k3-hash")
        self._futures: dict[str, Future[str]] = {}
        for path in paths:
            self.add(path)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, path: Path) -> None:
        """Hash ``path``, too, after those that were named before."""
        self.nbytes_all += path.stat().st_size
        self._futures[path.name] = self._pool.submit(self._hash, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, *, wait: Callable[[], None] | None = None) -> dict[str, str]:
        """File → hash of those that are done and were not taken before.

        With ``wait``, of all others, too; it is called every now and then meanwhile.
        """
        found: dict[str, str] = {}
        for name, future in list(self._futures.items()):
            while wait is not None and not future.done():
                settle([future], timeout=0.2)
                wait()
            if future.done():
                found[name] = future.result()
                del self._futures[name]
        return found

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                block = memoryview(bytearray(_STEP))
                while not self._stop.is_set() and (count := file.readinto(block)):
                    digest.update(block[:count])
                    with self._lock:
                        self.nbytes += count
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}."
            ) from error
        return digest.hexdigest()


def hashing_threads() -> int:
    """Threads for hashing what this process writes meanwhile."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))


def check_hub_hash(path: Path, found: str) -> None:
    """Raise CheckpointError if the hub recorded another hash than ``found``."""
    wanted = hub_sha256(path)
    if wanted not in (None, found):
        raise CheckpointError(
            f"{path.name} is damaged: its SHA-256 is {found}, but the hub recorded "
            f"{wanted} for it. Download it again, then go on with --resume."
        )
