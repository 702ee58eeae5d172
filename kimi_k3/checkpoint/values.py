"""Looks through a shard's numbers for what no intact checkpoint holds.

Read are floating-point tensors and byte scales, a few megabytes at a time; packed codes
are not, since every bit pattern is a valid code.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ..errors import CheckpointError
from .agreement import NAN_SCALE
from .headers import ShardHeader, StoredTensor

CHUNK_BYTES = 1 << 23

#: Bits of the exponent in each floating-point type; all set means infinity or NaN.
_EXPONENT = {
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F16": (np.dtype("<u2"), 0x7C00),
    "F32": (np.dtype("<u4"), 0x7F800000),
}

#: What is told as soon as bytes have been read: how many.
Progress = Callable[[int], None]

#: Kinds of fault, in the words of a report.
NOT_FINITE = "holds NaN or infinity"
NAN_BYTE = f"holds the scale byte {NAN_SCALE}, which means NaN"
ALL_ZERO = "is all zero, as an interrupted download leaves it"
PADDED = "has values other than zero behind those of its heads"


@dataclass(frozen=True)
class ValueFault:
    """One kind of fault in one shard: the first tensor with it and how many have it."""

    shard: str
    kind: str
    first: str
    tensors: int

    def __str__(self) -> str:
        more = f" (as do {self.tensors - 1} more tensors)" if self.tensors > 1 else ""
        return (
            f"{self.shard}: {self.first} {self.kind}{more}. Download the shard again."
        )


def is_read(name: str, tensor: StoredTensor) -> bool:
    """Whether :func:`value_faults` looks at this tensor."""
    return tensor.nbytes > 0 and (
        tensor.dtype in _EXPONENT or _is_byte_scale(name, tensor)
    )


def _is_byte_scale(name: str, tensor: StoredTensor) -> bool:
    return tensor.dtype == "U8" and name.endswith((".scales", ".weight_scale"))


def value_faults(
    header: ShardHeader, heads: int, progress: Progress | None = None
) -> list[ValueFault]:
    """What is wrong with the numbers of one shard; empty if nothing is.

    ``heads`` is the number of KDA heads: ``A_log`` has one value for each, the release
    fills up with zeros. Raises CheckpointError if the file cannot be read.
    """
    found: dict[str, list[str]] = defaultdict(list)
    wanted = [(n, t) for n, t in header.tensors.items() if is_read(n, t)]
    wanted.sort(key=lambda item: item[1].start)
    try:
        with header.path.open("rb") as file:
            for name, tensor in wanted:
                for kind in _tensor_faults(file, name, tensor, heads):
                    found[kind].append(name)
                if progress is not None:
                    progress(tensor.nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{header.path.name} cannot be read through: {error.strerror}."
        ) from error
    return [
        ValueFault(header.path.name, kind, names[0], len(names))
        for kind, names in found.items()
    ]


def _tensor_faults(
    file: BinaryIO, name: str, tensor: StoredTensor, heads: int
) -> list[str]:
    if _is_byte_scale(name, tensor):
        kind, items, bad = NAN_BYTE, np.dtype("u1"), NAN_SCALE
    else:
        kind, (items, bad) = NOT_FINITE, _EXPONENT[tensor.dtype]
    faulty, all_zero, padded = False, True, False
    file.seek(tensor.start)
    position = tensor.start
    while position < tensor.stop:
        raw = file.read(min(CHUNK_BYTES, tensor.stop - position))
        if not raw:
            raise OSError(0, "the file became shorter")
        values = np.frombuffer(raw, items)
        faulty |= bool(((values & bad) == bad).any())
        if all_zero:
            all_zero = not values.any()
        if name.endswith(".A_log"):
            padded |= bool(values[heads:].any())
        position += len(raw)
    kinds = [kind] if faulty else []
    if all_zero and _must_not_be_zero(name, tensor):
        kinds.append(ALL_ZERO)
    return [*kinds, PADDED] if padded else kinds


def _must_not_be_zero(name: str, tensor: StoredTensor) -> bool:
    """Matrices, scales and norm weights; biases and gates may be zero."""
    if name.endswith((".scales", ".weight_scale", "norm.weight", "norm_weight")):
        return True
    matrix = len([size for size in tensor.shape if size > 1]) > 1
    return matrix and name.endswith(".weight")
