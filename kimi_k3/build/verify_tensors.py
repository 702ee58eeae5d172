"""Everything of a build but its experts and routers, against the source's tensors.

The source's tensors become the model's parameters by the loader's own way
(:func:`~kimi_k3.checkpoint.sanitize.module_weights`): parts are fused, ``kv_b_proj`` is
split, ``A_log`` loses its padding. What the plan does not quantise must then be equal
bit for bit; what it quantises must be as near as its width allows.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from ..checkpoint.folder import Folder
from ..checkpoint.names import OTHER_PARTS, layer_of
from ..checkpoint.sanitize import module_weights
from ..checkpoint.stored_format import StoredFormat
from ..models import Model
from ..planning.matrix_classes import matrix_class
from .quantised_error import quantised_error
from .stored_bytes import StoredBytes
from .verify_record import RecordedBuild
from .verify_report import Finding

#: Kinds of tensors, in the words of the report.
FLOAT32, BFLOAT16, QUANTISED, VISION = "float32", "bfloat16", "quantised", "vision"

_BITS = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}


@dataclass(frozen=True)
class Compared:
    """One parameter that was compared; ``error`` and ``format`` if it is quantised."""

    kind: str
    name: str
    format: StoredFormat | None = None
    error: float = 0.0


class TensorComparison:
    """Compares a build's tensors with those of ``source``, a layer at a time.

    Args:
        model: of the source, built lazily.
    """

    def __init__(
        self, build: RecordedBuild, ours: StoredBytes, source: Folder, model: Model
    ):
        self.build = build
        self.ours = ours
        self.source = source
        self.model = model
        self._theirs = StoredBytes(source)
        self._names: dict[int | None, list[str]] = defaultdict(list)
        self._vision: list[str] = []
        for name in source.index.shard_of:
            if name.startswith(OTHER_PARTS):
                self._vision.append(name)
            elif not _is_routed(name):
                self._names[layer_of(name)].append(name)
        self._wanted = {
            tensor.name: tensor
            for shard in build.layout.shards
            for tensor in shard.tensors
            if not _is_routed(tensor.name)
        }

    @property
    def layers(self) -> list[int | None]:
        """Every layer, and None for what belongs to none."""
        return [*range(self.build.folder.args.text_config.num_hidden_layers), None]

    def wanted(self, kind: str) -> int:
        """How many parameters of a kind there are to compare."""
        return sum(
            self._kind(name) == kind
            for name in self._wanted
            if not name.endswith((".scales", ".biases"))
        )

    def nbytes(self, layer: int | None) -> int:
        """Bytes of the source that comparing ``layer`` reads."""
        vision = self._vision if layer is None else []
        names = [*self._names[layer], *vision]
        return sum(self._theirs.nbytes(name) for name in names)

    def compare(self, layer: int | None) -> Iterator[Compared | Finding]:
        """Each parameter of ``layer`` that could be compared, and what is wrong."""
        names = self._names[layer]
        stored: dict[str, mx.array] = {}
        for shard in sorted({self._theirs.shard(name) for name in names}):
            lazily = cast(dict[str, mx.array], mx.load(str(_path(self.source, shard))))
            stored |= {name: lazily[name] for name in names if name in lazily}
        with warnings.catch_warnings():
            # What is to be said of the source was said when it was opened.
            warnings.simplefilter("ignore")
            placed = module_weights(
                stored, self.source.args, self.model, read_values=False
            )
        stored.clear()
        for name in sorted(placed):
            # One at a time: what an array is made of is freed before the next is read.
            wanted = placed.pop(name)
            if name in self._wanted:
                yield from self._compare(name, wanted)
        if layer is None:
            yield from self._compare_vision()

    def _compare(self, name: str, wanted: mx.array) -> Iterator[Compared | Finding]:
        kind = self._kind(name)
        if kind == QUANTISED:
            yield from self._compare_quantised(name, wanted)
            return
        if name not in self.build.as_planned:
            return
        found = self.ours.array(name)
        yield Compared(kind, name)
        if not _same_bits(found, wanted):
            yield Finding(f"{name} is not the source's: {_difference(found, wanted)}.")

    def _compare_quantised(
        self, name: str, wanted: mx.array
    ) -> Iterator[Compared | Finding]:
        module = name.removesuffix(".weight")
        stored = self.build.formats[module]
        names = [f"{module}.{suffix}" for suffix in ("weight", "scales", "biases")]
        if not self.build.as_planned.issuperset(names):
            return
        found = quantised_error(
            [self.ours.array(name) for name in names],
            wanted,
            stored,
            # No activations multiply the embedding, so its errors are all alike.
            weighed=self.build.record.moments is not None
            and not module.endswith(".embed_tokens"),
        )
        yield Compared(QUANTISED, name, stored, found.relative)
        if found.fault:
            yield Finding(
                f"{name} ({stored}) has {found.fault}: it is of another matrix, or "
                "damaged. Convert again."
            )

    def _compare_vision(self) -> Iterator[Compared | Finding]:
        for name in self._vision:
            if name not in self.build.as_planned:
                continue
            found, wanted = self.ours.read(name), self._theirs.read(name)
            yield Compared(VISION, name)
            if not np.array_equal(found, wanted):
                yield Finding(
                    f"{name} is not the source's: {int((found != wanted).sum()):,} of "
                    f"{wanted.size:,} bytes differ. Convert again."
                )

    def _kind(self, name: str) -> str:
        if name.startswith(OTHER_PARTS):
            return VISION
        if name.removesuffix(".weight") in self.build.formats:
            return QUANTISED
        return FLOAT32 if self._wanted[name].dtype == "F32" else BFLOAT16

    def class_of(self, compared: Compared) -> str:
        """The class of matrices that a quantised parameter belongs to."""
        text = self.build.folder.args.text_config
        return matrix_class(compared.name.removesuffix(".weight"), text)


def _is_routed(name: str) -> bool:
    """Whether it belongs to routed experts or their router, in either format."""
    return any(
        part in name
        for part in (
            ".experts.",
            ".switch_mlp.",
            ".mlp.gate.weight",
            ".block_sparse_moe.gate.",
            ".e_score_correction_bias",
        )
    )


def _path(folder: Folder, shard: str) -> Path:
    return folder.headers[shard].path


def _same_bits(found: mx.array, wanted: mx.array) -> bool:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    bits = _BITS[found.itemsize]
    return bool(mx.array_equal(found.view(bits), mx.contiguous(wanted).view(bits)))


def _difference(found: mx.array, wanted: mx.array) -> str:
    """What was done to ``wanted``, as well as the values tell."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype} {found.shape} instead of {wanted.dtype} {wanted.shape}"
    if wanted.dtype == mx.float32:
        for title, dtype in (("bfloat16", mx.bfloat16), ("float16", mx.float16)):
            if _same_bits(found, wanted.astype(dtype).astype(mx.float32)):
                return f"it was rounded to {title} and must not be; convert again"
    bits = _BITS[found.itemsize]
    differ = found.view(bits) != mx.contiguous(wanted).view(bits)
    count = int(np.array(differ).sum())
    return (
        f"{count:,} of {wanted.size:,} values differ; its shard is of another conversion, "
        "or was changed. Convert again"
    )
