"""Rows of numbers in one file on disk, with a checksum a row, and in memory if wanted."""

import math
import os
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import DamagedScratchError, ScratchError
from .raw_arrays import raw_array, raw_bytes

#: At most this much is handed to the system at once; more than 2 GB is refused by some.
WRITE_BYTES = 1 << 28

_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


class RowFile:
    """An array (rows, *row_shape), written some rows at a time and read back the same.

    While :attr:`held`, what is written stays in memory as well; :meth:`forget` lets rows
    go, after which they are read from the file. Every read of the file is checked.
    """

    def __init__(
        self, path: Path, rows: int, row_shape: tuple[int, ...], dtype: mx.Dtype
    ):
        self.path = path
        self.row_shape = row_shape
        self.dtype = dtype
        self.held = False
        self.row_bytes = math.prod(row_shape) * dtype.size
        self.checksums = np.zeros(rows, np.uint32)
        self.written = np.zeros(rows, bool)
        self._rows: dict[int, mx.array] = {}

    @property
    def nbytes(self) -> int:
        return len(self.written) * self.row_bytes

    def write(self, start: int, values: mx.array) -> None:
        """Store ``values`` (B, *row_shape) as the rows from ``start`` on.

        Raises ScratchError if the disk does not take them.
        """
        memory, done = raw_bytes(values), 0
        try:
            with self.path.open("r+b" if self.written.any() else "wb") as file:
                file.seek(start * self.row_bytes)
                while done < len(memory):
                    done += file.write(memory[done : done + WRITE_BYTES].data)
        except OSError as error:
            raise self._unwritable(error) from error
        for row, stored in enumerate(np.split(memory, len(values)), start):
            self.checksums[row] = zlib.crc32(stored.data)
            self.written[row] = True
            if self.held:
                # A copy: a slice may keep all that ``values`` is a part of.
                self._rows[row], own = raw_array(self.row_shape, self.dtype)
                own[:] = stored

    def finish(self) -> None:
        """Bring what was written to the disk itself."""
        try:
            with self.path.open("r+b") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def read(self, start: int, stop: int) -> mx.array:
        """The rows (stop - start, *row_shape).

        Raises DamagedScratchError if the file no longer holds what was written.
        """
        if all(row in self._rows for row in range(start, stop)):
            return mx.stack([self._rows[row] for row in range(start, stop)])
        values, memory = raw_array((stop - start, *self.row_shape), self.dtype)
        try:
            with self.path.open("rb") as file:
                file.seek(start * self.row_bytes)
                count = file.readinto(memory.data)
        except OSError as error:
            raise self._damaged(f"cannot be read ({error.strerror})") from error
        if count != len(memory):
            raise self._damaged(f"ends after {start * self.row_bytes + count} bytes")
        for row, found in enumerate(np.split(memory, stop - start), start):
            if zlib.crc32(found.data) != self.checksums[row]:
                raise self._damaged(f"has another checksum in row {row}")
        return values

    def forget(self, start: int, stop: int) -> None:
        """Hold these rows in memory no more."""
        for row in range(start, stop):
            self._rows.pop(row, None)

    def entry(self) -> dict[str, Any]:
        """What must be kept elsewhere for :meth:`from_entry`, as plain values."""
        names = {dtype: name for name, dtype in _DTYPES.items()}
        return {
            "file": self.path.name,
            "dtype": names[self.dtype],
            "crc32": self.checksums.astype(">u4").tobytes().hex(),
        }

    @staticmethod
    def dtype_of(entry: dict[str, Any]) -> mx.Dtype:
        """The type of the numbers of an :meth:`entry`."""
        return _DTYPES[entry["dtype"]]

    @classmethod
    def from_entry(
        cls, folder: Path, entry: dict[str, Any], shape: tuple[int, ...]
    ) -> "RowFile":
        """The file of an :meth:`entry`; nothing is read yet."""
        rows, *row_shape = shape
        path = folder / entry["file"]
        file = cls(path, rows, tuple(row_shape), cls.dtype_of(entry))
        checksums = np.frombuffer(bytes.fromhex(entry["crc32"]), ">u4")
        file.checksums = checksums.astype(np.uint32)
        file.written[:] = True
        return file

    def check(self) -> None:
        """Read the file through; DamagedScratchError if it is not as it was written."""
        for row in range(len(self.written)):
            self.read(row, row + 1)

    def hold(self) -> None:
        """Hold all rows in memory, read from the file and checked."""
        self.held = True
        for row in range(len(self.written)):
            self._rows[row] = self.read(row, row + 1)[0]
            mx.eval(self._rows[row])

    def _unwritable(self, error: OSError) -> ScratchError:
        return ScratchError(
            f"{self.path} cannot be written: {error.strerror} ({self.nbytes:,} bytes are "
            "wanted for it). What was committed before is whole: make room, then start "
            "again to go on from there."
        )

    def _damaged(self, how: str) -> DamagedScratchError:
        return DamagedScratchError(
            f"{self.path} {how}: it is not as it was written. Discard the partial "
            "results and start over."
        )
