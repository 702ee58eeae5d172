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
from .agreement import check_agreement, check_scale_bytes
from .foreign import refuse_foreign_tensors
from .names import PREFIX, Placement, layer_of, parts_of, place_all
from .stored_format import PACKED, StoredFormat

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]

#: Stored names of one suffix of a module, by part.
Parts = dict[int, str]

_SUFFIXES = ("weight", "scales", "biases")


def module_weights(
    weights: Weights, args: ModelArgs, model: nn.Module, *, read_values: bool = True
) -> Weights:
    """``weights`` under the names of ``model``'s parameters.

    Fuses per-expert tensors and query/key/value parts, splits ``kv_b_proj``, trims
    ``A_log`` to one value a head, turns convolution weights to MLX's layout and
    dequantises the router. Vision tensors are left out. Raises CheckpointError where
    tensors contradict ``config.json``. Without ``read_values`` nothing is evaluated, so
    ``weights`` may be stand-ins that have a shape and a dtype only.
    """
    text = args.text_config
    shapes = dense_shapes(model)
    refuse_foreign_tensors(weights)
    placements = place_all(weights, text)
    check_agreement(weights, placements, args, shapes)
    if read_values:
        check_scale_bytes(weights)
    placed = _fuse_parts(weights, placements, text, shapes)
    if text.tie_word_embeddings:
        placed.pop(f"{PREFIX}lm_head.weight", None)
    padded = []
    for key in list(placed):
        if key.endswith(".self_attn.kv_b_proj.weight"):
            _split_kv_b(placed, key.removesuffix(".weight"), text)
        elif key.endswith((".A_log", ".dt_bias")) and key in shapes:
            placed[key], rest = _per_head(key, placed[key], shapes[key][0])
            padded += [(key, rest)] if rest.size else []
        elif key.endswith("_conv.conv.weight"):
            placed[key] = _conv_layout(placed[key])
    if read_values:
        _warn_of_padding(padded)
    _dequantize_routers(placed, shapes)
    _drop_orphans(placed)
    return placed


def dense_shapes(model: nn.Module) -> Shapes:
    """The shape of each parameter of ``model``, of packed weights as if they were not."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shapes: Shapes = {key: array.shape for key, array in parameters}
    for path, module in model.named_modules():
        if "scales" in module:
            *rows, columns = shapes[f"{path}.weight"]
            shapes[f"{path}.weight"] = (*rows, columns * 32 // module.bits)
    return shapes


def quantize_as_stored(model: nn.Module, weights: Weights) -> None:
    """Quantise the modules of ``model`` whose weights are stored packed, in place.

    For a config without any quantisation block: mlx-lm then leaves this to the model.
    """

    def stored(path: str, module: nn.Module) -> bool | dict:
        weight = weights.get(f"{path}.weight")
        scales = weights.get(f"{path}.scales")
        if weight is None or scales is None:
            return False
        inputs = module["weight"].shape[-1]
        return StoredFormat.of_tensors(path, weight, scales, inputs).parameters

    if any(key.endswith(".scales") for key in weights):
        nn.quantize(model, class_predicate=stored)


def _fuse_parts(
    weights: Weights, placements: dict[str, Placement], args: TextArgs, shapes: Shapes
) -> Weights:
    """Rename, and join what is stored in parts; incomplete groups keep their names."""
    origin: dict[str, str] = {}
    groups: dict[str, dict[str, Parts]] = defaultdict(lambda: defaultdict(dict))
    for name, placement in placements.items():
        key, part = placement.key, placement.part
        if part is None:
            twin, origin[key] = origin.get(key), name
        else:
            base, _, suffix = key.rpartition(".")
            parts = groups[base][suffix]
            twin, parts[part] = parts.get(part), name
        if twin is not None:
            raise _same_tensor(twin, name)

    placed = {key: weights[name] for key, name in origin.items()}
    for base, suffixes in groups.items():
        for suffix, parts in suffixes.items():
            if (key := f"{base}.{suffix}") in origin:
                raise _same_tensor(origin[key], next(iter(parts.values())))
        placed |= _fuse(base, suffixes, weights, args, shapes)
    return placed


def _same_tensor(one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{one} and {other} are the same tensor of the model; the folder mixes shards of "
        "two checkpoints. Remove the left-over shards."
    )


def _fuse(
    base: str,
    suffixes: dict[str, Parts],
    weights: Weights,
    args: TextArgs,
    shapes: Shapes,
) -> Weights:
    """The module ``base`` from its parts; the parts as they are if some are missing."""
    total = parts_of(base, args)
    tensors = {
        suffix: {part: weights[name] for part, name in parts.items()}
        for suffix, parts in suffixes.items()
    }
    stored = tensors.get("weight", {})
    scales, biases = tensors.get("scales", {}), tensors.get("biases", {})
    packed = {part for part, tensor in stored.items() if tensor.dtype in PACKED}
    affine = {part for part, tensor in scales.items() if tensor.dtype != mx.uint8}
    if len(stored) < total or packed != set(scales) or affine != set(biases):
        named = (name for parts in suffixes.values() for name in parts.values())
        return {name: weights[name] for name in named}
    ordered = range(total)
    kinds = [
        tuple(_kind(tensors[suffix].get(part)) for suffix in tensors)
        for part in ordered
    ]
    odd = next((part for part in ordered if kinds[part] != kinds[0]), None)
    if ".switch_mlp." in base:
        if odd is not None:
            raise CheckpointError(
                f"{suffixes['weight'][odd]} is stored in another format than "
                f"{suffixes['weight'][0]}; one bank has one format. The folder mixes "
                "shards of two builds."
            )
        stacked = {
            suffix: mx.stack([parts[part] for part in ordered])
            for suffix, parts in tensors.items()
        }
        words = stacked["weight"]
        if words.dtype == mx.uint8:  # the source's bytes: the same bits as 32-bit words
            stacked["weight"] = words.view(mx.uint32)
        return {f"{base}.{suffix}": tensor for suffix, tensor in stacked.items()}
    if odd is None:
        return {
            f"{base}.{suffix}": mx.concatenate(
                [_conv_layout(parts[part]) for part in ordered]
            )
            for suffix, parts in tensors.items()
        }
    # Rows of different widths have no common packing: the projection becomes dense.
    inputs = shapes[f"{base}.weight"][-1]
    rows = []
    for part in ordered:
        weight = _conv_layout(stored[part])
        if part in packed:
            packing = StoredFormat.of_tensors(base, weight, scales[part], inputs)
            weight = packing.densify(weight, scales[part], biases.get(part))
        rows.append(weight)
    return {f"{base}.weight": mx.concatenate(rows)}


def _kind(tensor: mx.array | None) -> tuple | None:
    """Dtype and row length: what tensors must share to be joined."""
    if tensor is None:
        return None
    return tensor.dtype, _conv_layout(tensor).shape[1:]


def _split_kv_b(placed: Weights, base: str, args: TextArgs) -> None:
    """Replace ``kv_b_proj`` by its key and value halves, per head.

    The value half keeps its rows and so its packing. The key half is transposed, which
    no packing survives: it becomes dense.
    """
    weight, scales = placed[f"{base}.weight"], placed.get(f"{base}.scales")
    if weight.dtype in PACKED and scales is None:
        return  # the scales may come with other shards
    biases, packing = placed.get(f"{base}.biases"), None
    if scales is not None:
        packing = StoredFormat.of_tensors(base, weight, scales, args.kv_lora_rank)
        if not packing.is_whole(biases):
            return
    for suffix in _SUFFIXES:
        placed.pop(f"{base}.{suffix}", None)
    attention = base.removesuffix(".kv_b_proj")
    heads, nope = args.num_attention_heads, args.qk_nope_head_dim

    def by_head(tensor: mx.array) -> mx.array:
        return tensor.reshape(heads, nope + args.v_head_dim, -1)

    for suffix, tensor in zip(_SUFFIXES, (weight, scales, biases), strict=True):
        if tensor is not None:
            values = mx.contiguous(by_head(tensor)[:, nope:])
            placed[f"{attention}.unembed_out.{suffix}"] = values
    dense = weight
    if packing is not None and scales is not None:
        dense = packing.densify(weight, scales, biases)
    keys = mx.contiguous(by_head(dense)[:, :nope].swapaxes(-1, -2))
    placed[f"{attention}.embed_q.weight"] = keys


def _per_head(key: str, tensor: mx.array, wanted: int) -> tuple[mx.array, mx.array]:
    """``tensor`` flat and cut to ``wanted`` values, and the rest.

    The release pads ``A_log`` with zeros; nothing else may be longer.
    """
    tensor = tensor.reshape(-1)
    if tensor.size < wanted or (tensor.size > wanted and not key.endswith(".A_log")):
        raise CheckpointError(
            f"{key} has {tensor.size} values, but the config asks for {wanted}; "
            "linear_attn_config and the shards are of different models."
        )
    return tensor[:wanted], tensor[wanted:]


def _warn_of_padding(padded: list[tuple[str, mx.array]]) -> None:
    """One warning if ``A_log`` is padded with anything but zeros."""
    found = [(key, rest) for key, rest in padded if mx.any(rest != 0).item()]
    if found:
        key, rest = found[0]
        others = f" (as in {len(found) - 1} more layers)" if len(found) > 1 else ""
        warnings.warn(
            f"{key} holds {rest.size} values more than there are heads, and they are not "
            f"zero{others}; the first ones are used, the rest is ignored.",
            stacklevel=4,
        )


def _drop_orphans(placed: Weights) -> None:
    """Leave out scales and biases without a weight: mlx-lm looks theirs up.

    It comes with other shards, or the model has no use for it.
    """
    for key in [k for k in placed if k.endswith((".scales", ".biases"))]:
        if f"{key.rpartition('.')[0]}.weight" not in placed:
            del placed[key]


def _conv_layout(weight: mx.array) -> mx.array:
    """A depthwise weight as (channels, width, 1), from (channels, 1, width) too."""
    if weight.ndim == 3 and weight.shape[1] == 1 and weight.shape[2] > 1:
        return weight.swapaxes(1, 2)
    return weight


def _dequantize_routers(placed: Weights, shapes: Shapes) -> None:
    """Make quantised router weights float32 again, with one warning for all."""
    found = []
    for key in [k for k in placed if k.endswith(".mlp.gate.scales")]:
        base = key.removesuffix(".scales")
        weight, inputs = placed.get(f"{base}.weight"), shapes.get(f"{base}.weight")
        if weight is None or inputs is None:
            continue
        scales, biases = placed[key], placed.get(f"{base}.biases")
        stored = StoredFormat.of_tensors(base, weight, scales, inputs[-1])
        if not stored.is_whole(biases):
            continue  # the biases may come with other shards
        del placed[key]
        placed.pop(f"{base}.biases", None)
        placed[f"{base}.weight"] = stored.dequantize(weight, scales, biases)
        found.append(layer_of(key) or 0)
    if found:
        warnings.warn(
            f"this build stores the router of {len(found)} layers (first: layer "
            f"{min(found)}) quantised; it is computed in float32 from the rounded weights, "
            "which choose other experts than the release for some tokens.",
            stacklevel=4,
        )
