"""SHA-256 of whole source files, computed in a thread while shards are written."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as settle
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from ..errors import CheckpointError

#: Bytes that are hashed between two looks whether somebody still waits.
_STEP = 8 << 20


class SourceHashes:
    """Hashes files one after the other; a context manager, which stops at its end.

    ``nbytes`` counts what has been hashed so far, of ``nbytes_all``.
    """

    def __init__(self, paths: list[Path]):
        self.nbytes, self.nbytes_all = 0, sum(path.stat().st_size for path in paths)
        self._stop = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kimi-k3-hash")
        self._futures: dict[str, Future[str]] = {
            path.name: self._pool.submit(self._hash, path) for path in paths
        }

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
                wait()
                settle([future], timeout=0.2)
            if future.done():
                found[name] = future.result()
                del self._futures[name]
        return found

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while not self._stop.is_set() and (block := file.read(_STEP)):
                    digest.update(block)
                    self.nbytes += len(block)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}."
            ) from error
        return digest.hexdigest()
