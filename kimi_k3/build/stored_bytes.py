"""Stored tensors of a checkpoint folder as bytes or arrays, whole or one row of them."""

import mlx.core as mx
import numpy as np

from ..checkpoint.folder import Folder
from ..errors import CheckpointError, TruncatedShardError

_UNSIGNED = {"BF16": np.uint16, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}


class StoredBytes:
    """Reads tensors of ``folder`` by name, each when asked for."""

    def __init__(self, folder: Folder):
        self._headers = folder.headers
        self._shard_of = {
            name: shard for shard, h in folder.headers.items() for name in h.tensors
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def shard(self, name: str) -> str:
        """The file that holds the tensor ``name``."""
        return self._shard_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[self._shard_of[name]].tensors[name].shape

    def nbytes(self, name: str) -> int:
        return self._headers[self._shard_of[name]].tensors[name].nbytes

    def read(
        self, name: str, row: int | None = None, rows: int | None = None
    ) -> np.ndarray:
        """The bytes (N,) of a tensor, or of its entry ``row`` along the first axis.

        With ``rows`` only the first so many rows of that. Raises CheckpointError naming
        the file if they cannot be read.
        """
        header = self._headers[self._shard_of[name]]
        tensor = header.tensors[name]
        start, count, shape = tensor.start, tensor.nbytes, tensor.shape
        if row is not None:
            count //= shape[0]
            start, shape = start + row * count, shape[1:]
        if rows is not None:
            count = count // shape[0] * min(rows, shape[0])
        raw = np.empty(count, np.uint8)
        try:
            with header.path.open("rb", buffering=0) as file:
                file.seek(start)
                done = 0
                while done < count:
                    got = file.readinto(raw.data[done : done + (1 << 28)])
                    if not got:
                        raise TruncatedShardError(
                            f"{header.path.name} ended while {name} was read. Look at "
                            "the disk, and convert or download the shard again."
                        )
                    done += got
        except OSError as error:
            raise CheckpointError(
                f"{header.path.name} cannot be read: {error.strerror}."
            ) from error
        return raw

    def array(
        self, name: str, row: int | None = None, rows: int | None = None
    ) -> mx.array:
        """What :meth:`read` gives, with the tensor's type and shape.

        Bytes that hold codes of the release stay bytes.
        """
        tensor = self._headers[self._shard_of[name]].tensors[name]
        shape = tensor.shape if row is None else tensor.shape[1:]
        if rows is not None:
            shape = (min(rows, shape[0]), *shape[1:])
        raw = self.read(name, row, rows)
        array = mx.array(raw.view(_UNSIGNED[tensor.dtype])).reshape(shape)
        return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array
