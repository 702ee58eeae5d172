"""Writes one safetensors file whose tensors come in pieces and in any order.

The same tensors always give the same bytes: header and data are in the order of the
layout. What is written is held against the layout first, so a file is never another one
than was planned.
"""

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import mlx.core as mx

from ..build.raw_arrays import raw_bytes
from ..errors import ConversionError
from ..folder_check import STORED_DTYPES
from .build_layout import BuildTensor
from .byte_copy import ByteCopier, write_all
from .durable_files import rename_durably, unfinished_path
from .provenance import ShardRecord

#: mlx-lm and mlx-vlm take a file with this for one of MLX.
METADATA = {"format": "mlx"}

_LENGTH = struct.Struct("<Q")

#: Data begins at a multiple of this, behind spaces that end the header.
_ALIGNMENT = 8


def shard_header(tensors: Sequence[BuildTensor]) -> bytes:
    """Everything that lies before the data of a file of ``tensors``."""
    header: dict[str, object] = {"__metadata__": METADATA}
    start = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start := start + tensor.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def shard_size(tensors: Sequence[BuildTensor]) -> int:
    """Bytes of the file of ``tensors``."""
    return len(shard_header(tensors)) + sum(tensor.nbytes for tensor in tensors)


class ShardWriter:
    """The file ``path`` while it is written, under another name until :meth:`finish`.

    A context manager: what is not finished at its end is deleted.
    """

    def __init__(self, path: Path, tensors: Sequence[BuildTensor]):
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._header = shard_header(tensors)
        self._starts: dict[str, int] = {}
        place = len(self._header)
        for tensor in tensors:
            self._starts[tensor.name] = place
            place += tensor.nbytes
        self._size = place
        self._left = {tensor.name: tensor.nbytes for tensor in tensors}
        self._unfinished = unfinished_path(path)
        self._file = -1

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._file = os.open(self._unfinished, flags, 0o666)
        try:
            os.ftruncate(self._file, self._size)
            write_all(self._file, memoryview(self._header), 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def put(self, name: str, array: mx.array, row: int | None = None) -> int:
        """Write the tensor ``name``, or its rows from ``row`` on; the bytes written.

        Raises ConversionError unless ``array`` has the shape and type of the layout.
        """
        tensor = self._planned(name)
        shape = tuple(array.shape)
        fits = shape == tensor.shape
        if row is not None:
            fits = shape[1:] == tensor.shape[1:] and row + shape[0] <= tensor.shape[0]
        if not fits or array.dtype != STORED_DTYPES[tensor.dtype]:
            raise ConversionError(
                f"{self.path.name}: {name} would be {array.dtype} {shape}, but the layout "
                f"says {tensor.dtype} {tensor.shape}. {_BUG}"
            )
        start = 0 if row is None else row * tensor.nbytes // tensor.shape[0]
        self.put_bytes(name, raw_bytes(array).data, start)
        return array.nbytes

    def put_bytes(self, name: str, content: bytes | memoryview, start: int = 0) -> None:
        """Write ``content`` at byte ``start`` of the tensor ``name``."""
        place = self._place(name, start, len(content))
        write_all(self._file, memoryview(content), place)

    def copy(
        self,
        name: str,
        start: int,
        copier: ByteCopier,
        source: BinaryIO,
        source_start: int,
        nbytes: int,
    ) -> int:
        """Copy bytes of an open file to byte ``start`` of ``name``; how many there were."""
        place = self._place(name, start, nbytes)
        return copier.copy(source, source_start, self._file, place, nbytes)

    def finish(self) -> ShardRecord:
        """Make the file durable and give it its name; what it is.

        Raises ConversionError if a tensor was not written, or written twice.
        """
        odd = next((name for name, left in self._left.items() if left), None)
        if odd is not None:
            raise ConversionError(
                f"{self.path.name}: {self._left[odd]} bytes of {odd} were not written. "
                f"{_BUG}"
            )
        os.fsync(self._file)
        rename_durably(self._unfinished, self.path)
        return ShardRecord.of(self.path)

    def _planned(self, name: str) -> BuildTensor:
        if name not in self.tensors:
            raise ConversionError(
                f"{self.path.name}: {name} is not in the layout. {_BUG}"
            )
        return self.tensors[name]

    def _place(self, name: str, start: int, nbytes: int) -> int:
        """Where in the file to write, which counts as written then."""
        tensor = self._planned(name)
        self._left[name] -= nbytes
        if start < 0 or start + nbytes > tensor.nbytes or self._left[name] < 0:
            raise ConversionError(
                f"{self.path.name}: bytes {start} to {start + nbytes} of {name} would be "
                f"written, but it has {tensor.nbytes}, each once. {_BUG}"
            )
        return self._starts[name] + start

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._unfinished.unlink(missing_ok=True)


_BUG = "This is a fault of kimi-k3-mlx, not of your files: please report it."
