"""Whether tensors and ``config.json`` speak of the same model.

Judges only the tensors it is given. Errors name the layer or tensor, what the config
says and what is stored.
"""

from typing import Any

import mlx.core as mx

from ..config import ModelArgs, TextArgs
from ..errors import CheckpointError, ConfigError
from .names import PREFIX, Placement, layer_of
from .stored_format import StoredFormat

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]
Placements = dict[str, Placement]

#: Byte scales of a layer are looked through at load only up to this many in all.
SCALE_BYTES_CHECKED = 1 << 26

#: The scale byte that means "not a number" in the e8m0 format.
NAN_SCALE = 255


def check_agreement(
    weights: Weights, placements: Placements, args: ModelArgs, shapes: Shapes
) -> None:
    """Raise CheckpointError at the first contradiction.

    ``placements`` says what each text tensor of ``weights`` becomes; ``shapes`` are the
    dense shapes of the model's parameters by name.
    """
    text = args.text_config
    check_expert_counts(weights, placements, text)
    check_banks(placements, text, shapes)
    check_quantization(weights, placements, args, shapes)
    check_shapes(weights, placements, shapes)
    check_scale_bytes(weights)


def check_expert_counts(
    weights: Weights, placements: Placements, args: TextArgs
) -> None:
    """Router rows and banks must hold as many experts as the config says."""
    stored: dict[int, dict[str, int]] = {}
    for name, placement in placements.items():
        layer, tensor = layer_of(name), weights[name]
        if layer is None or placement.part is not None:
            continue
        place_in_layer = placement.key.split(".mlp.")[-1]
        if place_in_layer in ("gate.weight", "e_score_correction_bias"):
            stored.setdefault(layer, {})["router"] = tensor.shape[0]
        elif place_in_layer.startswith("switch_mlp.") and name.endswith(".weight"):
            bank = place_in_layer.split(".")[1]
            bank = bank if bank.startswith("bank_") else "bank"
            stored.setdefault(layer, {})[bank] = tensor.shape[0]
    source = "expert_counts" if args.expert_counts else "num_experts"
    for layer, found in sorted(stored.items()):
        wanted, split = args.experts_in_layer(layer), args.bank_split(layer)
        sizes = {
            "router": wanted,
            "bank": wanted,
            "bank_hi": split or wanted,
            "bank_lo": wanted - split,
        }
        if all(sizes[part] == rows for part, rows in found.items()):
            continue
        rows = ", ".join(f"{part} {n}" for part, n in sorted(found.items()))
        total = found.get("router", found.get("bank", sum(found.values())))
        raise CheckpointError(
            f"layer {layer}: config.json's {source} says {wanted} experts"
            f"{f', {split} of them in bank_hi' if split else ''}, but the tensors hold "
            f"{total} ({rows}). Config and shards are of different builds; download both "
            "again from one place."
        )


def check_banks(placements: Placements, args: TextArgs, shapes: Shapes) -> None:
    """A layer's experts must lie in the banks that ``expert_bank_split`` names."""
    keys: dict[int, set[str]] = {}
    for name, placement in placements.items():
        if (layer := layer_of(name)) is not None:
            keys.setdefault(layer, set()).add(placement.key)
    for layer, found in sorted(keys.items()):
        split, count = args.bank_split(layer), args.experts_in_layer(layer)
        has = {
            bank: any(f".switch_mlp.{bank}" in key for key in found)
            for bank in ("bank_hi.", "bank_lo.", "gate_proj.")
        }
        if not split and (has["bank_hi."] or has["bank_lo."]):
            raise CheckpointError(
                f"layer {layer}: the shards store two banks (switch_mlp.bank_hi/bank_lo), "
                "but config.json's expert_bank_split gives this layer one bank."
            )
        if split and has["gate_proj."]:
            raise CheckpointError(
                f"layer {layer}: expert_bank_split is {split} of {count} experts, but the "
                "shards store one bank (switch_mlp.gate_proj)."
            )
        if (
            split
            and has["bank_hi."] != has["bank_lo."]
            and _rest_is_there(layer, found, shapes)
        ):
            missing = "bank_lo" if has["bank_hi."] else "bank_hi"
            lost = count - split if has["bank_hi."] else split
            raise CheckpointError(
                f"layer {layer}: expert_bank_split is {split} of {count} experts, but "
                f"there is no switch_mlp.{missing}.*: {lost} experts are missing. The "
                "upload or the conversion is incomplete."
            )


def _rest_is_there(layer: int, found: set[str], shapes: Shapes) -> bool:
    """Whether all of a layer but its experts is present (so nothing comes later)."""
    start = f"{PREFIX}model.layers.{layer}."
    own = {key for key in shapes if key.startswith(start)}
    plain = {
        key for key in own if ".switch_mlp." not in key and ".self_attn." not in key
    }
    return plain <= found


def check_quantization(
    weights: Weights, placements: Placements, args: ModelArgs, shapes: Shapes
) -> None:
    """Per-module quantisation entries of the config must be what is stored."""
    entries = _entries(args)
    if not entries:
        return
    for name, placement in placements.items():
        if not name.endswith(".weight"):
            continue
        tensor, base = weights[name], name.removesuffix(".weight")
        entry = entries.get(base.removeprefix(PREFIX))
        if entry is None:
            continue
        scales = weights.get(f"{base}.scales")
        if scales is None:
            _check_dense_entry(name, tensor, entry, placement)
            continue
        shape = shapes.get(placement.key)
        if shape is None:
            continue
        stored = StoredFormat.of_tensors(name, tensor, scales, shape[-1])
        if entry is False or StoredFormat.of_entry(entry) != stored:
            said = "not quantised" if entry is False else StoredFormat.of_entry(entry)
            raise CheckpointError(
                f"{name}: config.json's quantization says {said}, but the stored tensor "
                f"is {stored}. Correct the entry or download the shard again."
            )


def _entries(args: ModelArgs) -> dict[str, Any]:
    """Per-module quantisation entries by path without the language-model prefix."""
    entries = {}
    for path, entry in (args.quantization or {}).items():
        if isinstance(entry, dict) or (entry is False and "." in path):
            if isinstance(entry, dict) and not {"bits", "group_size"} <= set(entry):
                raise ConfigError(
                    f"config.json's quantization entry {path} lacks bits or group_size."
                )
            entries[path.removeprefix(PREFIX)] = entry
    return entries


def _check_dense_entry(
    name: str, tensor: mx.array, entry: Any, placement: Placement
) -> None:
    if entry is False or placement.key.endswith(".mlp.gate.weight"):
        return
    raise CheckpointError(
        f"{name}: config.json's quantization says {StoredFormat.of_entry(entry)}, but the "
        f"stored tensor is {tensor.dtype} without scales."
    )


def check_shapes(weights: Weights, placements: Placements, shapes: Shapes) -> None:
    """Dense tensors that become a whole parameter must have its shape."""
    for name, placement in placements.items():
        if placement.part is not None:
            continue
        tensor = weights[name]
        wanted = shapes.get(placement.key)
        packed = f"{name.rpartition('.')[0]}.scales" in weights
        reshaped = name.endswith((".A_log", ".dt_bias", "conv.weight", "conv1d.weight"))
        if wanted is None or packed or reshaped or tensor.shape == wanted:
            continue
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, but config.json makes it "
            f"{tuple(wanted)}. Config and shards are of different models."
        )


def check_scale_bytes(weights: Weights) -> None:
    """Refuse e8m0 scales that are not a number.

    Looking reads the scales, so it happens here only for a small model; of a large one
    the folder check reads them.
    """
    scales = {
        name: tensor
        for name, tensor in weights.items()
        if tensor.dtype == mx.uint8 and name.endswith((".scales", ".weight_scale"))
    }
    if sum(tensor.nbytes for tensor in scales.values()) > SCALE_BYTES_CHECKED:
        return
    for name, tensor in scales.items():
        if mx.any(tensor == NAN_SCALE).item():
            raise CheckpointError(
                f"{name} holds the scale byte {NAN_SCALE}, which means NaN; the shard is "
                "damaged. Download it again."
            )
