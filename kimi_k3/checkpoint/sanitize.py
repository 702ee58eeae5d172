"""From checkpoint tensors of any format to the model's parameters.

Everything here judges only the tensors it is given: mlx-lm's sharded load hands over
none of them first, and one rank's shards later.
"""

import warnings
from collections import defaultdict
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import ModelArgs, TextArgs
from ..errors import CheckpointError
from .agreement import check_agreement
from .names import PREFIX, QUANTIZED_SUFFIXES, Placement, layer_of, parts_of, place_all
from .stored_format import StoredFormat

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]


def module_weights(weights: Weights, args: ModelArgs, model: nn.Module) -> Weights:
    """``weights`` under the names of ``model``'s parameters.

    Fuses per-expert tensors and query/key/value parts, splits ``kv_b_proj``, trims
    ``A_log`` to one value a head, turns convolution weights to MLX's layout and
    dequantises the router. Vision tensors are left out. Raises CheckpointError where
    tensors contradict ``config.json``.
    """
    text = args.text_config
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shapes: Shapes = {key: array.shape for key, array in parameters}
    placements = place_all(weights, text)
    check_agreement(weights, placements, args, shapes)
    placed = _fuse_parts(weights, placements, text, shapes)
    if text.tie_word_embeddings:
        placed.pop(f"{PREFIX}lm_head.weight", None)
    for key in list(placed):
        if key.endswith(".self_attn.kv_b_proj.weight"):
            _split_kv_b(placed, key.removesuffix(".weight"), text)
        elif key.endswith((".A_log", ".dt_bias")):
            placed[key] = _per_head(key, placed[key], shapes[key])
        elif key.endswith("_conv.conv.weight"):
            placed[key] = _conv_layout(placed[key])
    _dequantize_routers(placed, shapes)
    return placed


def quantize_as_stored(model: nn.Module, weights: Weights) -> None:
    """Quantise the modules of ``model`` whose weights are stored packed, in place.

    For a config without any quantisation block: mlx-lm then leaves this to the model.
    """

    def stored(path: str, module: nn.Module) -> bool | dict:
        scales = weights.get(f"{path}.scales")
        if scales is None:
            return False
        weight, inputs = weights[f"{path}.weight"], module["weight"].shape[-1]
        return StoredFormat.of_tensors(path, weight, scales, inputs).parameters

    if any(key.endswith(".scales") for key in weights):
        nn.quantize(model, class_predicate=stored)


def _fuse_parts(
    weights: Weights, placements: dict[str, Placement], args: TextArgs, shapes: Shapes
) -> Weights:
    """Rename, and join what is stored in parts; incomplete groups keep their names."""
    placed: Weights = {}
    origin: dict[str, str] = {}
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for name, placement in placements.items():
        key, part = placement.key, placement.part
        twin = origin.get(key) if part is None else groups[key].get(part)
        if twin is not None:
            raise CheckpointError(
                f"{twin} and {name} are the same tensor of the model; the folder mixes "
                "shards of two checkpoints. Remove the left-over shards."
            )
        if part is None:
            placed[key], origin[key] = weights[name], name
        else:
            groups[key][part] = name

    for key, names in groups.items():
        if key in placed:
            raise CheckpointError(
                f"{origin[key]} and {next(iter(names.values()))} are the same tensor of "
                "the model; the folder mixes shards of two checkpoints."
            )
        if len(names) < parts_of(key, args):
            placed |= {name: weights[name] for name in names.values()}
            continue
        parts = [weights[names[i]] for i in range(len(names))]
        if ".switch_mlp." in key:
            placed[key] = _stack_experts(key, parts)
        elif len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
            placed[key] = mx.concatenate([_conv_layout(p) for p in parts], axis=0)
        else:
            base = key.rpartition(".")[0]
            placed[f"{base}.weight"] = _concatenate_dense(base, groups, weights, shapes)
    return _without_half_fused(placed)


def _without_half_fused(placed: Weights) -> Weights:
    """Drop scales and biases of a fused projection that had to be made dense."""
    for key in [k for k in placed if k.endswith("qkv_proj.weight")]:
        if placed[key].dtype != mx.uint32:
            base = key.removesuffix(".weight")
            placed.pop(f"{base}.scales", None)
            placed.pop(f"{base}.biases", None)
    return placed


def _stack_experts(key: str, parts: list[mx.array]) -> mx.array:
    """(E, out, …): packed bytes become MLX's 32-bit words, the bits unchanged."""
    stacked = mx.stack(parts)
    if key.endswith(".weight") and stacked.dtype == mx.uint8:
        stacked = stacked.view(mx.uint32)
    return stacked


def _concatenate_dense(
    base: str, groups: dict[str, dict[int, str]], weights: Weights, shapes: Shapes
) -> mx.array:
    """Query, key and value rows as one dense weight, when their widths differ."""
    rows = []
    for part in range(3):
        weight, scales, biases = (
            weights.get(groups[f"{base}.{suffix}"].get(part, ""))
            for suffix in QUANTIZED_SUFFIXES
        )
        assert weight is not None
        if scales is not None:
            inputs = shapes[f"{base}.weight"][-1]
            stored = StoredFormat.of_tensors(base, weight, scales, inputs)
            weight = stored.dequantize(weight, scales, biases).astype(mx.bfloat16)
        rows.append(weight)
    return mx.concatenate(rows, axis=0)


def _split_kv_b(placed: Weights, base: str, args: TextArgs) -> None:
    """Replace ``kv_b_proj`` by its key and value halves, per head.

    The value half keeps its rows and so its packing. The key half is transposed, which
    no packing survives: it becomes dense.
    """
    weight = placed.pop(f"{base}.weight")
    scales = placed.pop(f"{base}.scales", None)
    biases = placed.pop(f"{base}.biases", None)
    attention = base.removesuffix(".kv_b_proj")
    heads, nope = args.num_attention_heads, args.qk_nope_head_dim

    def by_head(tensor: mx.array) -> mx.array:
        return tensor.reshape(heads, nope + args.v_head_dim, -1)

    stored = {"weight": weight, "scales": scales, "biases": biases}
    for suffix, tensor in stored.items():
        if tensor is not None:
            values = mx.contiguous(by_head(tensor)[:, nope:])
            placed[f"{attention}.unembed_out.{suffix}"] = values
    dense = weight
    if scales is not None:
        packing = StoredFormat.of_tensors(base, weight, scales, args.kv_lora_rank)
        dtype = mx.bfloat16 if biases is None else scales.dtype
        dense = packing.dequantize(weight, scales, biases).astype(dtype)
    keys = mx.contiguous(by_head(dense)[:, :nope].swapaxes(-1, -2))
    placed[f"{attention}.embed_q.weight"] = keys


def _per_head(key: str, tensor: mx.array, shape: tuple[int, ...]) -> mx.array:
    """``tensor`` flat, cut to ``shape``; the release pads ``A_log`` with zeros."""
    tensor = tensor.reshape(-1)
    wanted = shape[0]
    if tensor.size < wanted or (tensor.size > wanted and not key.endswith(".A_log")):
        raise CheckpointError(
            f"{key} has {tensor.size} values, but the config asks for {wanted}; "
            "linear_attn_config and the shards are of different models."
        )
    if tensor.size > wanted and mx.any(tensor[wanted:] != 0).item():
        warnings.warn(
            f"{key} holds {tensor.size} values for {wanted} heads and the rest is not "
            "zero; the first ones are used, the rest is ignored.",
            stacklevel=2,
        )
    return tensor[:wanted]


def _conv_layout(weight: mx.array) -> mx.array:
    """A depthwise weight as (channels, width, 1), from (channels, 1, width) too."""
    if weight.ndim == 3 and weight.shape[1] == 1 and weight.shape[2] > 1:
        return weight.swapaxes(1, 2)
    return weight


def _dequantize_routers(placed: Weights, shapes: Shapes) -> None:
    """Make quantised router weights float32 again, with one warning for all."""
    found = [k for k in placed if k.endswith(".mlp.gate.scales")]
    for key in found:
        base = key.removesuffix(".scales")
        weight, scales = placed[f"{base}.weight"], placed.pop(key)
        biases = placed.pop(f"{base}.biases", None)
        inputs = shapes[f"{base}.weight"][-1]
        stored = StoredFormat.of_tensors(base, weight, scales, inputs)
        placed[f"{base}.weight"] = stored.dequantize(weight, scales, biases)
    if found:
        layers = sorted(layer_of(key) or 0 for key in found)
        warnings.warn(
            f"this build stores the router of {len(found)} layers (first: layer "
            f"{layers[0]}) quantised; it is computed in float32 from the rounded weights, "
            "which choose other experts than the release for some tokens.",
            stacklevel=2,
        )
