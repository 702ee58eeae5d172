"""Makes one shard of a build from the source: a layer's experts, then the rest of it.

Experts of the high bank are copied as bytes, expert by expert as the source has them, and
so is what is but renamed. Experts of the low bank are made dense, which is exact, and
quantised one at a time. What is in memory is one expert and the rest of one layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.headers import StoredTensor
from ..checkpoint.names import OTHER_PARTS, PREFIX, Placement, layer_of
from ..checkpoint.sanitize import module_weights
from ..checkpoint.source_layout import SourceTensor, expert_prefix
from ..checkpoint.stored_format import StoredFormat
from ..config import ModelArgs
from ..errors import CheckpointError, ConversionError
from ..models import Model
from ..planning.expert_plan import HIGH, ExpertPlan
from .build_config import module_formats
from .build_layout import BuildLayout, BuildShard, BuildTensor
from .importance import Importance
from .quantizer import quantize
from .shard_writer import ShardWriter
from .source_files import EXPERT_PARTS, SourceFiles

#: Parameters whose first axis is the experts of the router.
_BY_EXPERT = (".mlp.gate.weight", ".mlp.e_score_correction_bias")

#: Values of a tensor that are looked at together.
_LOOKED_AT = 1 << 22

_SUFFIXES = ("weight", "scales", "biases")


@dataclass(frozen=True)
class ShardMaker:
    """What every shard is made from.

    Attributes:
        source: the checkpoint.
        plan: what to do with it.
        layout: what comes out.
        importance: weighs errors of what is quantised; None: all channels alike.
    """

    source: SourceFiles
    plan: ExpertPlan
    layout: BuildLayout
    importance: Importance | None = None

    def fill(self, writer: ShardWriter, shard: BuildShard) -> Iterator[int]:
        """Write every tensor of ``shard``; yields the bytes that have just been written.

        Warnings say what is odd in the source but hinders nothing.
        """
        if shard.layer is not None:
            yield from self._experts(writer, shard.layer)
            names = self.source.plain_names[shard.layer]
            yield from self._plain(writer, names, _only(self._model, shard.layer))
        elif _is_vision(shard):
            pieces = ((tensor.name, tensor.name, 0) for tensor in shard.tensors)
            yield from self.source.copy(pieces, writer)
        else:
            # One after the other: embedding and head are the largest matrices there are.
            for name in self.source.plain_names[None]:
                yield from self._plain(writer, [name], self._model)

    def source_names(self, shard: BuildShard) -> list[str]:
        """The tensors of the source that ``shard`` is made from; of experts, the first
        tensor of each.
        """
        if shard.layer is None:
            vision = _is_vision(shard)
            return self.source.vision_names if vision else self.source.plain_names[None]
        experts = [
            f"{expert_prefix(shard.layer, expert)}w1.weight_packed"
            for expert in self.plan.order(shard.layer)
        ]
        return self.source.plain_names[shard.layer] + experts

    @cached_property
    def _model(self) -> Model:
        """The source's model, which says what its parameters look like."""
        return Model(self.source.args)

    @cached_property
    def quantised(self) -> dict[str, StoredFormat]:
        """Module path → format of everything that is quantised again."""
        return quantised_modules(self.layout, self.plan)

    @cached_property
    def _wanted(self) -> dict[str, BuildTensor]:
        """Every tensor of the build by name."""
        return {t.name: t for shard in self.layout.shards for t in shard.tensors}

    def _experts(self, writer: ShardWriter, layer: int) -> Iterator[int]:
        if layer not in self.plan.layers:
            return
        experts = f"{PREFIX}model.layers.{layer}.mlp.switch_mlp."
        plan = self.plan.layers[layer]
        two = bool(self.plan.split(layer))
        yield from self.source.copy(
            self._pieces(layer, plan.high, experts + ("bank_hi." if two else "")),
            writer,
        )
        bank = experts + ("bank_lo." if two else "")
        rows = {expert: row for row, expert in enumerate(plan.low)}
        for expert in sorted(rows):
            yield self._low_expert(writer, layer, expert, bank, rows[expert])

    def _pieces(
        self, layer: int, experts: tuple[int, ...], bank: str
    ) -> Iterator[tuple[str, str, int]]:
        """Every tensor of ``experts``, and where in ``bank`` its bytes belong."""
        for row, expert in enumerate(experts):
            prefix = expert_prefix(layer, expert)
            for matrix, part in EXPERT_PARTS.items():
                for stored, suffix in (("packed", "weight"), ("scale", "scales")):
                    name = f"{prefix}{part}.weight_{stored}"
                    nbytes = self.source.tensors[name].nbytes
                    yield name, f"{bank}{matrix}.{suffix}", row * nbytes

    def _low_expert(
        self, writer: ShardWriter, layer: int, expert: int, bank: str, row: int
    ) -> int:
        written = 0
        for matrix, (codes, scales) in self.source.expert(layer, expert).items():
            module = f"{bank}{matrix}"
            dense = HIGH.densify(codes, scales, None)
            weights = self.importance and self.importance.expert(module, expert)
            written += self._quantised(writer, module, dense[None], weights, row)
        mx.clear_cache()
        return written

    def _plain(
        self, writer: ShardWriter, names: list[str], model: nn.Module
    ) -> Iterator[int]:
        """Everything of ``model`` that is made from ``names``, but experts."""
        places = self.source.reader.placements
        same = {
            name
            for name in names
            if stays_as_it_is(places[name], self.source.tensors[name], self._wanted)
        }
        pieces = ((name, places[name].key, 0) for name in names if name in same)
        yield from self.source.copy(pieces, writer)
        stored = self.source.reader.read([name for name in names if name not in same])
        for name, array in stored.items():
            self._check_values(name, array)
        placed = module_weights(stored, self.source.args, model)
        stored.clear()
        for name in sorted(placed):
            array = placed.pop(name)
            if name.endswith(_BY_EXPERT):
                array = array[mx.array(self.plan.order(layer_of(name) or 0))]
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and module in self.quantised:
                weights = self.importance and self.importance.of(module)
                yield self._quantised(writer, module, array, weights, None)
            else:
                yield writer.put(name, array)
            del array
            mx.clear_cache()

    def _check_values(self, name: str, array: mx.array) -> None:
        """Raise CheckpointError for a tensor of the source with values that are none."""
        if not mx.issubdtype(array.dtype, mx.floating):
            return
        rows = max(1, _LOOKED_AT // max(1, array[0].size))
        for start in range(0, array.shape[0], rows):
            if not mx.isfinite(array[start : start + rows]).all().item():
                raise CheckpointError(
                    f"{self.source.shard_of[name]}: {name} holds NaN or infinity; the "
                    "shard is damaged. Download it again."
                )

    def _quantised(
        self,
        writer: ShardWriter,
        module: str,
        weight: mx.array,
        importance: mx.array | None,
        row: int | None,
    ) -> int:
        stored = self.quantised[module]
        try:
            parts = quantize(
                weight,
                bits=stored.bits,
                group_size=stored.group_size,
                importance=importance,
            )
        except ConversionError as error:
            raise ConversionError(f"{module} cannot be quantised: {error}") from error
        return sum(
            writer.put(f"{module}.{suffix}", part, row)
            for suffix, part in zip(_SUFFIXES, parts, strict=True)
        )


def quantised_modules(layout: BuildLayout, plan: ExpertPlan) -> dict[str, StoredFormat]:
    """Module path → format of everything that ``plan`` quantises again."""
    config = dict(layout.config) | {"quantization": HIGH.parameters}
    formats = module_formats(Model(ModelArgs.from_dict(config)), plan)
    return {path: stored for path, stored in formats.items() if stored != HIGH}


def stays_as_it_is(
    placement: Placement,
    stored: StoredTensor | SourceTensor,
    wanted: Mapping[str, BuildTensor],
) -> bool:
    """Whether a tensor of the source that is no expert's has the same bytes in a build.

    Then it is but renamed: whatever is split, turned, cut or quantised has another name,
    shape or type there.
    """
    found = wanted.get(placement.key)
    if placement.part is not None or placement.key.endswith(_BY_EXPERT):
        return False
    return found is not None and (found.shape, found.dtype) == (
        stored.shape,
        stored.dtype,
    )


def _only(model: Model, layer: int) -> nn.Module:
    """``model`` as if it had one layer: looking through all for each takes its time."""
    only, text = nn.Module(), nn.Module()
    text.layers = [nn.Module() for _ in range(layer)] + [model.model.layers[layer]]
    only.language_model = nn.Module()
    only.language_model.model = text
    return only


def _is_vision(shard: BuildShard) -> bool:
    return shard.tensors[0].name.startswith(OTHER_PARTS)
