"""How a weight is packed: read off the tensors, and compared with the config."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError

#: Integers that hold packed codes; bytes only in the source's per-expert tensors.
PACKED = (mx.uint32, mx.uint8)

#: (bits, group size) of the modes whose scales are bytes.
_BYTE_SCALE_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}

#: Widths and group sizes of the affine mode.
_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class StoredFormat:
    """A quantisation mode of MLX with its width and group size."""

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit group {self.group_size}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments for ``to_quantized`` and ``mx.dequantize``."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @classmethod
    def of_tensors(
        cls, name: str, weight: mx.array, scales: mx.array, inputs: int
    ) -> "StoredFormat":
        """The format of packed ``weight`` and ``scales`` for ``inputs`` columns.

        Raises CheckpointError when the shapes fit no format.
        """
        columns, groups = weight.shape[-1], scales.shape[-1]
        if weight.dtype == mx.uint8:  # the source keeps words as bytes
            columns //= 4
        bits = columns * 32 // inputs
        group_size = inputs // groups if groups else 0
        affine = scales.dtype != mx.uint8
        if affine:
            fits = bits in _AFFINE_BITS and group_size in _AFFINE_GROUPS
        else:
            fits = (bits, group_size) in _BYTE_SCALE_MODES
        if not fits or columns * 32 != bits * inputs or inputs != groups * group_size:
            raise CheckpointError(
                f"{name}: {columns} packed columns and {groups} "
                f"{'' if affine else 'byte '}scales a row are no format that MLX has for "
                f"{inputs} inputs; the shard does not belong to this config.json."
            )
        mode = "affine" if affine else _BYTE_SCALE_MODES[bits, group_size]
        return cls(mode, bits, group_size)

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> "StoredFormat":
        """The format that a quantisation entry of ``config.json`` names."""
        return cls(entry.get("mode", "affine"), entry["bits"], entry["group_size"])

    def is_whole(self, biases: mx.array | None) -> bool:
        """Whether a packed weight can be made dense: affine codes need biases."""
        return biases is not None or self.mode != "affine"

    def dequantize(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None
    ) -> mx.array:
        """The dense weight in float32, exact."""
        if biases is None:
            dense = mx.dequantize(weight, scales, **self.parameters)
            return dense.astype(mx.float32)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(weight, scales, biases, **self.parameters)

    def densify(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None
    ) -> mx.array:
        """The dense weight in the dtype its layer computes in: that of affine scales.

        Formats with byte scales become bfloat16, which holds their values exactly.
        """
        dtype = mx.bfloat16 if biases is None else scales.dtype
        return self.dequantize(weight, scales, biases).astype(dtype)
