"""Copies ranges of bytes between open files, in the kernel where it offers that."""

import errno
import os
from typing import BinaryIO

#: Bytes that are in memory at once where this process has to copy.
BUFFER_BYTES = 8 << 20

#: At most this much is asked of the kernel at once.
_KERNEL_BYTES = 1 << 30

#: What the kernel says where two file systems, or these files, cannot be copied so.
_NOT_SO = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
}


class ByteCopier:
    """Copies with ``copy_file_range`` until that is refused once, then with a buffer."""

    def __init__(self) -> None:
        self.in_kernel = hasattr(os, "copy_file_range")
        self._buffer: memoryview | None = None

    def copy(
        self, source: BinaryIO, start: int, target: int, place: int, nbytes: int
    ) -> int:
        """Copy ``nbytes`` at ``start`` of ``source``, an unbuffered file, to ``place``.

        Gives the bytes copied: less than asked for where the source ends.
        """
        done = 0
        while done < nbytes:
            count = 0
            if self.in_kernel:
                count = self._copy_in_kernel(
                    source, start + done, target, place + done, nbytes - done
                )
            if not count:  # refused, or a file system that always says 0
                count = self._copy_here(
                    source, start + done, target, place + done, nbytes - done
                )
            if not count:
                break
            done += count
        return done

    def _copy_in_kernel(
        self, source: BinaryIO, start: int, target: int, place: int, nbytes: int
    ) -> int:
        try:
            return os.copy_file_range(
                source.fileno(), target, min(nbytes, _KERNEL_BYTES), start, place
            )
        except OSError as error:
            if error.errno not in _NOT_SO:
                raise
            self.in_kernel = False
            return 0

    def _copy_here(
        self, source: BinaryIO, start: int, target: int, place: int, nbytes: int
    ) -> int:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        source.seek(start)
        count = source.readinto(self._buffer[:nbytes])  # type: ignore[attr-defined]
        write_all(target, self._buffer[:count], place)
        return count


def write_all(target: int, content: memoryview, place: int) -> None:
    """Write all of ``content`` at ``place`` of the open file ``target``."""
    done = 0
    while done < len(content):
        done += os.pwrite(target, content[done : done + _KERNEL_BYTES], place + done)
