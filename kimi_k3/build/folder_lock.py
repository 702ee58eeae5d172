"""A folder that one process has to itself while it fills it.

The lock is a file in a subfolder, which holds whatever else an unfinished run keeps; both
are gone once nobody needs them. A process that dies gives its lock back.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import KimiK3Error

LOCK = "lock"

#: Times that a lock is looked for that another process is just removing.
_TRIES = 20


@contextmanager
def locked_folder(
    out: Path, partial: str, doing: str, error: type[KimiK3Error]
) -> Iterator[None]:
    """``out`` is this process's alone until the block ends, or the process does.

    Args:
        out: is made if it is not there.
        partial: name of the subfolder for the lock; removed at the end if nothing else
            is in it.
        doing: what is done with ``out``: "calibrated".
        error: class of what is raised if another process has ``out``, or if it cannot be
            written.
    """
    path = out / partial / LOCK
    with _lock(out, path, doing, error) as lock:
        with suppress(OSError):  # on a full disk nobody learns the number
            lock.truncate(0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # another process may be looking whether it is free
                path.parent.rmdir()


def _lock(out: Path, path: Path, doing: str, error: type[KimiK3Error]) -> IO[str]:
    """The file whose lock this process has until it is closed."""
    for _ in range(_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+")
        except FileNotFoundError:
            continue  # another process that ends has just removed the folder
        except OSError as problem:
            raise error(
                f"{out} cannot be written: {problem.strerror}. Name a folder that can be."
            ) from problem
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise error(
                f"{out} is being {doing} by another process (number {holder}). Wait for "
                "it, stop it, or name another folder."
            ) from problem
        except OSError as problem:
            lock.close()
            raise error(
                f"{path} cannot be locked: {problem.strerror}. Name a folder on a disk of "
                "this machine."
            ) from problem
        # A lock on a file that its last holder has removed keeps nobody out.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
    raise error(
        f"{path} cannot be made, or other processes keep removing it. Name another folder."
    )
