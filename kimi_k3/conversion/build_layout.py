"""Every tensor of a build, shard by shard, from the source's config and a plan.

Names and shapes are those of the lazily built model, quantised as the plan says; types
are the source's where nothing is quantised. Decoder layer L lies whole in shard L + 1,
as in the release; what belongs to no layer follows, then the vision tensors as they are.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.headers import ITEM_BITS
from ..checkpoint.names import layer_of, place
from ..checkpoint.source_layout import SourceTensor, shard_name, source_tensors
from ..config import ModelArgs
from ..models import Model
from ..planning.expert_plan import ExpertPlan
from .build_config import build_config, module_formats


@dataclass(frozen=True)
class BuildTensor:
    """One tensor of a build; ``dtype`` is its safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class BuildShard:
    """One file; ``layer`` is the decoder layer it holds, None for the others."""

    file: str
    layer: int | None
    tensors: tuple[BuildTensor, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors; the header is not counted."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class BuildLayout:
    """What a conversion writes.

    Attributes:
        config: the build's ``config.json`` without the record of the conversion.
        shards: in the order in which they are written.
    """

    config: Mapping[str, Any]
    shards: tuple[BuildShard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor → file, for the index."""
        return {
            tensor.name: shard.file for shard in self.shards for tensor in shard.tensors
        }


def build_layout(source: Mapping[str, Any], plan: ExpertPlan) -> BuildLayout:
    """What converting the checkpoint of the config ``source`` by ``plan`` writes.

    Raises PlanError for a plan of another checkpoint, ConfigError for a config that is
    none of Kimi K3.
    """
    config = build_config(source, plan)
    model = build_model(config, plan)
    args = ModelArgs.from_dict(dict(source))
    kept_types = _source_types(args)
    layers: dict[int | None, list[BuildTensor]] = defaultdict(list)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    for name, array in parameters:
        dtype = _packed_type(name, array) or kept_types.get(name, "BF16")
        layers[layer_of(name)].append(BuildTensor(name, tuple(array.shape), dtype))
    vision = [
        BuildTensor(tensor.name, tensor.shape, tensor.dtype)
        for tensor in source_tensors(args)
        if _is_vision(tensor)
    ]
    total = args.text_config.num_hidden_layers
    groups = [(layer, layers[layer]) for layer in range(total)]
    groups += [(None, layers[None])] + ([(None, vision)] if vision else [])
    shards = tuple(
        BuildShard(shard_name(number, len(groups)), layer, tuple(tensors))
        for number, (layer, tensors) in enumerate(groups, start=1)
    )
    return BuildLayout(config, shards)


def build_model(config: Mapping[str, Any], plan: ExpertPlan) -> Model:
    """The model of a build's ``config``, quantised as ``plan`` says, never evaluated."""
    model = Model(ModelArgs.from_dict(dict(config)))
    formats = module_formats(model, plan)

    def stored(path: str, _: nn.Module) -> bool | dict[str, Any]:
        return formats[path].parameters if path in formats else False

    nn.quantize(model, class_predicate=stored)
    return model


def _packed_type(name: str, array: mx.array) -> str | None:
    """The type of codes, byte scales and affine scales; None for other tensors."""
    if array.dtype == mx.uint32:
        return "U32"
    if array.dtype == mx.uint8:
        return "U8"
    return "BF16" if name.endswith((".scales", ".biases")) else None


def _source_types(args: ModelArgs) -> dict[str, str]:
    """Parameter → the type that the source stores it, or its parts, in."""
    types: dict[str, str] = {}
    for tensor in source_tensors(args):
        if ".experts." not in tensor.name and not _is_vision(tensor):
            placement = place(tensor.name, args.text_config)
            if placement is not None:
                types[placement.key] = tensor.dtype
    return types


def _is_vision(tensor: SourceTensor) -> bool:
    return not tensor.name.startswith("language_model.")
