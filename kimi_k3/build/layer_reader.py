"""Reads the stored tensors of one part of a checkpoint into memory, all at once.

Tensors that are the parts of one expert matrix are read side by side into the stacked
matrix that the model has, so stacking needs no second copy. Files are read in the order
in which they lie. Nothing here knows threads; a stop is asked for between tensors.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from ..checkpoint.agreement import NAN_SCALE
from ..checkpoint.folder import Folder
from ..checkpoint.headers import ShardHeader, StoredTensor
from ..checkpoint.names import Placement, parts_of
from ..errors import ChangedShardError, CheckpointError, TruncatedShardError
from ..folder_check import STORED_DTYPES
from .raw_arrays import raw_array

#: At most this much is asked of the system at once; more than 2 GB is refused by some.
READ_BYTES = 1 << 28


@dataclass(frozen=True)
class _Piece:
    """One stored tensor, the array that it goes to, and its row there if it is a part."""

    name: str
    tensor: StoredTensor
    target: str
    row: int | None


class Stopped(Exception):
    """Nobody wants the tensors any more."""


class LayerReader:
    """The shards of a folder as they were when it was opened."""

    def __init__(self, folder: Folder, placements: dict[str, Placement]):
        self.text = folder.args.text_config
        self.headers = folder.headers
        self.placements = placements
        self.stamps = {shard: _stamp(h.path) for shard, h in self.headers.items()}
        self.shard_of = folder.index.shard_of
        for shard, header in self.headers.items():
            if self.stamps[shard][0] != header.nbytes:
                raise _changed(header)

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes that reading the tensors ``names`` takes."""
        return sum(self._tensor(name).nbytes for name in names)

    def read(
        self, names: list[str], stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, mx.array]:
        """The tensors ``names``; parts of expert matrices stacked, under the model's name.

        Raises TruncatedShardError or ChangedShardError for a shard that is not what it
        was, CheckpointError if it cannot be read or holds scales that are no numbers,
        :class:`Stopped` soon after ``stopped`` says so.
        """
        shards: dict[str, list[_Piece]] = defaultdict(list)
        arrays: dict[str, mx.array] = {}
        memory: dict[str, np.ndarray] = {}
        for piece in self._pieces(names):
            shards[self.shard_of[piece.name]].append(piece)
        rows = defaultdict(int)
        for pieces in shards.values():
            for piece in pieces:
                rows[piece.target] += piece.row is not None
        for shard, pieces in shards.items():
            pieces.sort(key=lambda piece: piece.tensor.start)
            with self.open(shard) as file:
                for piece in pieces:
                    if piece.target not in arrays:
                        arrays[piece.target], memory[piece.target] = _allocate(
                            piece, rows[piece.target]
                        )
                    self._fill(file, piece, memory[piece.target], stopped)
                self.check_unchanged(shard, file)
        arrays = {name: _as_words(name, array) for name, array in arrays.items()}
        # Nothing may be left to compute: another thread cannot finish this one's work.
        mx.eval(arrays)
        return arrays

    def _tensor(self, name: str) -> StoredTensor:
        return self.headers[self.shard_of[name]].tensors[name]

    def _pieces(self, names: list[str]) -> list[_Piece]:
        """What to read; parts of an expert matrix share a target if all are there."""
        parts: dict[str, dict[int, str]] = defaultdict(dict)
        for name in names:
            placement = self.placements[name]
            if placement.part is not None and ".switch_mlp." in placement.key:
                parts[placement.key][placement.part] = name
        whole = {
            key
            for key, found in parts.items()
            if sorted(found) == list(range(parts_of(key, self.text)))
            and len({self._look(name) for name in found.values()}) == 1
        }
        pieces = []
        for name in names:
            placement = self.placements[name]
            stacked = placement.key in whole and placement.part is not None
            target, row = (placement.key, placement.part) if stacked else (name, None)
            pieces.append(_Piece(name, self._tensor(name), target, row))
        return pieces

    def _look(self, name: str) -> tuple:
        tensor = self._tensor(name)
        return tensor.dtype, tensor.shape

    def open(self, shard: str) -> BinaryIO:
        """The file ``shard``, unbuffered; raises like :meth:`read`."""
        header = self.headers[shard]
        try:
            file = header.path.open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(header, error) from error
        try:
            self.check_unchanged(shard, file)
        except CheckpointError:
            file.close()
            raise
        return file  # type: ignore[return-value]

    def check_unchanged(self, shard: str, file: BinaryIO) -> None:
        """Raise if the open file ``shard`` is not what it was."""
        header, stat = self.headers[shard], os.fstat(file.fileno())
        if stat.st_size < header.nbytes:
            raise truncated(header, stat.st_size)
        if (stat.st_size, stat.st_mtime_ns) != self.stamps[shard]:
            raise _changed(header)

    def _fill(
        self,
        file: BinaryIO,
        piece: _Piece,
        memory: np.ndarray,
        stopped: Callable[[], bool],
    ) -> None:
        """Read one tensor to its place."""
        header, tensor = self.headers[self.shard_of[piece.name]], piece.tensor
        if piece.row is not None:
            start = piece.row * tensor.nbytes
            memory = memory[start : start + tensor.nbytes]
        try:
            file.seek(tensor.start)
            done = 0
            while done < tensor.nbytes:
                if stopped():
                    raise Stopped
                count = file.readinto(memory[done : done + READ_BYTES])  # type: ignore
                if not count:
                    raise truncated(header, tensor.start + done)
                done += count
        except OSError as error:
            raise _unreadable(header, error) from error
        scale = tensor.dtype == "U8" and piece.name.endswith(
            (".scales", ".weight_scale")
        )
        if scale and tensor.nbytes and memory.max() == NAN_SCALE:
            raise CheckpointError(
                f"{header.path.name}: {piece.name} holds the scale byte {NAN_SCALE}, "
                "which means NaN; the shard is damaged. Download it again."
            )


def _allocate(piece: _Piece, rows: int) -> tuple[mx.array, np.ndarray]:
    shape = piece.tensor.shape if piece.row is None else (rows, *piece.tensor.shape)
    return raw_array(shape, STORED_DTYPES[piece.tensor.dtype])


def _as_words(name: str, array: mx.array) -> mx.array:
    """Codes that the source keeps as bytes, as the 32-bit words that MLX has."""
    if ".switch_mlp." in name and name.endswith(".weight") and array.dtype == mx.uint8:
        return mx.view(array, mx.uint32, stream=mx.cpu)
    return array


def _stamp(path: Path) -> tuple[int, int]:
    """Size in bytes and time of the last change."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return stat.st_size, stat.st_mtime_ns


def truncated(header: ShardHeader, found: int) -> TruncatedShardError:
    """The error for a shard that ends at byte ``found``."""
    return TruncatedShardError(
        f"{header.path.name} ends at byte {found} but its header describes "
        f"{header.nbytes}: it became shorter while it was used. Download it again."
    )


def _changed(header: ShardHeader) -> ChangedShardError:
    return ChangedShardError(
        f"{header.path.name} changed after it was opened. Let what writes to the folder "
        "finish, then start again."
    )


def _unreadable(header: ShardHeader, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{header.path.name} cannot be read: {error.strerror}. Check the disk, or "
        "download the shard again."
    )
