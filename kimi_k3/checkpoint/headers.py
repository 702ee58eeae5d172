"""What a safetensors file says it holds, read without touching its data.

Layout: the header's length as a little-endian 64-bit number, the header in JSON, then
the data. Each entry has a type, a shape and a byte range counted from the data's start;
ranges follow each other without gaps. Nothing in a header is trusted before it is
checked. Source: the safetensors format description.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, TruncatedShardError

#: Bits of one element of each type that the format knows.
ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
}

#: The longest header that the format allows.
LONGEST_HEADER = 100_000_000

#: What MLX can index, and more dimensions than any tensor here has.
_LARGEST, _MOST_DIMENSIONS = 2**31 - 1, 8

_LENGTH = struct.Struct("<Q")

_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry: ``start`` and ``stop`` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ShardHeader:
    """A whole, readable shard. ``nbytes`` is the file's size."""

    path: Path
    tensors: dict[str, StoredTensor]
    nbytes: int


def read_header(path: Path) -> ShardHeader:
    """The header of the safetensors file ``path``, checked against the file's size.

    Raises TruncatedShardError if the file is shorter or longer than its header
    describes, CheckpointError if it is not safetensors or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = _header_length(path, file.read(_LENGTH.size), size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    entries = _parse(path, raw)
    start = _LENGTH.size + length
    tensors = {name: _tensor(path, name, e, start) for name, e in entries.items()}
    described = _end_of_data(path, tensors, start)
    if size != described:
        raise TruncatedShardError(
            f"{path.name} is {size} bytes but its header describes {described}: "
            f"{'incomplete download' if size < described else 'a damaged file'}. "
            "Download it again."
        )
    return ShardHeader(path, tensors, size)


def _header_length(path: Path, first: bytes, size: int) -> int:
    if len(first) < _LENGTH.size:
        raise TruncatedShardError(
            f"{path.name} is {size} bytes, less than a safetensors file can be: "
            "incomplete download. Download it again."
        )
    (length,) = _LENGTH.unpack(first)
    if _GIT_LFS.startswith(first):
        raise CheckpointError(
            f"{path.name} is a git-lfs pointer, not the file itself. Run `git lfs pull` "
            "in its folder."
        )
    if not 2 <= length <= LONGEST_HEADER:
        raise CheckpointError(
            f"{path.name} is not a safetensors file: it begins with {first!r}, where the "
            "length of a header should be. Download it again."
        )
    if _LENGTH.size + length > size:
        raise TruncatedShardError(
            f"{path.name} is {size} bytes but its header alone is {length}: incomplete "
            "download. Download it again."
        )
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """The header's entries without its metadata."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice!r} is there twice")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} has a damaged header ({error}). Download it again."
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path.name} has a header that is not a JSON object. Download it again."
        )
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    """One entry, its byte range counted from the file's start (``data``: the data's)."""
    if not _makes_sense(name, entry):
        raise CheckpointError(
            f"{path.name}: the header's entry for {ascii(name)[:120]} makes no sense: "
            f"{json.dumps(entry)[:120]}. Download the shard again."
        )
    start, stop = entry["data_offsets"]
    return StoredTensor(
        entry["dtype"], tuple(entry["shape"]), data + start, data + stop
    )


def _makes_sense(name: str, entry: Any) -> bool:
    if not isinstance(entry, dict) or not is_text(name):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    bits = ITEM_BITS.get(str(entry.get("dtype")))
    if not (isinstance(shape, list) and isinstance(offsets, list)) or bits is None:
        return False
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        return False
    if any(type(size) is not int or size < 0 for size in (*shape, *offsets)):
        return False
    if any(size > _LARGEST for size in shape):
        return False
    return 8 * (offsets[1] - offsets[0]) == math.prod(shape) * bits


def is_text(name: str) -> bool:
    """Whether ``name`` can be shown and stored: JSON may spell half a character."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _end_of_data(path: Path, tensors: dict[str, StoredTensor], start: int) -> int:
    """Where the data ends; byte ranges must follow each other."""
    by_place = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    for name, tensor in by_place:
        if tensor.start != start:
            kind = "overlaps the one before" if tensor.start < start else "leaves a gap"
            raise CheckpointError(
                f"{path.name}: the header places {name} at byte {tensor.start}, which "
                f"{kind} (wanted {start}). Download the shard again."
            )
        start = tensor.stop
    return start
