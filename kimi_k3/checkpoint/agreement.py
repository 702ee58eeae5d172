"""Whether tensors and ``config.json`` speak of the same model.

Judges only the tensors it is given. Errors name the layer or tensor, what the config
says and what is stored.
"""

import mlx.core as mx

from ..config import ModelArgs, TextArgs
from ..errors import CheckpointError
from .names import PREFIX, Placement, layer_of
from .stored_shapes import check_shapes
from .stored_widths import check_widths

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]
Placements = dict[str, Placement]

#: Byte scales are looked through at load only up to this many in all.
SCALE_BYTES_CHECKED = 1 << 26

#: The scale byte that means "not a number" in the e8m0 format.
NAN_SCALE = 255


def check_agreement(
    weights: Weights, placements: Placements, args: ModelArgs, shapes: Shapes
) -> None:
    """Raise CheckpointError at the first contradiction; reads no values.

    ``placements`` says what each text tensor of ``weights`` becomes; ``shapes`` are the
    dense shapes of the model's parameters by name.
    """
    text = args.text_config
    check_banks(placements, text, shapes)
    check_expert_counts(weights, placements, text)
    check_shapes(weights, placements, text, shapes)
    check_widths(weights, placements, args, shapes)


def check_expert_counts(
    weights: Weights, placements: Placements, args: TextArgs
) -> None:
    """Router rows and banks must hold as many experts as the config says."""
    # By parameter: the rows of a whole tensor, or the highest of single experts.
    rows: dict[str, tuple[int, bool]] = {}
    for name, placement in placements.items():
        key, part = placement.key, placement.part
        if part is None:
            if ".mlp." in key and weights[name].ndim:
                rows[key] = weights[name].shape[0], False
        elif rows.get(key, (0, True))[0] <= part:
            rows[key] = part + 1, True
    stored: dict[int, dict[str, int]] = {}
    for key, (count, single) in rows.items():
        layer, kind = layer_of(key), _holds_experts(key)
        if layer is not None and kind is not None:
            found = stored.setdefault(layer, {})
            kind = "experts" if single else kind
            found[kind] = max(count, found.get(kind, 0)) if single else count
    for layer, found in sorted(stored.items()):
        _check_layer_counts(layer, found, args)


def _holds_experts(key: str) -> str | None:
    """What a parameter with one row an expert is called in a message; None for others."""
    in_layer = key.partition(".mlp.")[2]
    if in_layer in ("gate.weight", "e_score_correction_bias"):
        return "router" if in_layer == "gate.weight" else "bias"
    if not in_layer.startswith("switch_mlp."):
        return None
    bank = in_layer.split(".")[1]
    return bank if bank.startswith("bank_") else "bank"


def _check_layer_counts(layer: int, found: dict[str, int], args: TextArgs) -> None:
    wanted, split = args.experts_in_layer(layer), args.bank_split(layer)
    sizes = {
        "router": wanted,
        "bias": wanted,
        "bank": wanted,
        "bank_hi": split or wanted,
        "bank_lo": wanted - split,
    }
    single = found.get("experts", 0)
    odd = [part for part, rows in found.items() if rows != sizes.get(part, rows)]
    if single <= wanted and not odd:
        return
    banks = sum(rows for part, rows in found.items() if part.startswith("bank_"))
    total = single if single > wanted else found[odd[0]]
    if odd and odd[0].startswith("bank_"):
        total = banks
    source = "expert_counts" if args.expert_counts else "num_experts"
    rows = ", ".join(f"{part} {n}" for part, n in sorted(found.items()))
    raise CheckpointError(
        f"layer {layer}: config.json's {source} says {wanted} experts"
        f"{f', {split} of them in bank_hi' if split else ''}, but the tensors hold "
        f"{total} ({rows}). Config and shards are of different builds; "
        "download both again from one place."
    )


def check_banks(placements: Placements, args: TextArgs, shapes: Shapes) -> None:
    """A layer's experts must lie in the banks that ``expert_bank_split`` names."""
    keys: dict[int, set[str]] = {}
    for key in {placement.key for placement in placements.values()}:
        if (layer := layer_of(key)) is not None:
            keys.setdefault(layer, set()).add(key)
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


def check_scale_bytes(weights: Weights) -> None:
    """Refuse e8m0 scales that are not a number.

    Looking reads the scales, so it happens here only for a small model; of a large one
    ``kimi-k3 verify`` reads them.
    """
    scales = {
        name: tensor
        for name, tensor in weights.items()
        if name.endswith((".scales", ".weight_scale")) and tensor.dtype == mx.uint8
    }
    if sum(tensor.nbytes for tensor in scales.values()) > SCALE_BYTES_CHECKED:
        return
    for name, tensor in scales.items():
        if mx.any(tensor == NAN_SCALE).item():
            raise CheckpointError(
                f"{name} holds the scale byte {NAN_SCALE}, which means NaN; the shard is "
                "damaged. Download it again."
            )
