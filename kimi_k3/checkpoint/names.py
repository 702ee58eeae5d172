"""Every tensor name of every Kimi K3 format, and the model parameter it becomes.

Formats: Moonshot's source, mlx-lm's (also mlx-vlm's), and the pipenetwork port's, with
or without the ``language_model.`` prefix. The parameter names of the model are mlx-lm's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import TextArgs
from ..errors import CheckpointError

PREFIX = "language_model."

#: Tensors of the vision half and of prediction heads, which the text model leaves out.
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "mm_projector.",
    "multi_modal_projector.",
    "mtp.",
    "model.mtp.",
)

_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
        (
            r"\b(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$",
            r"\1_\2.weight",
        ),
        (r"\.weight_packed$", ".weight"),
        (r"\.weight_scale$", ".scales"),
        (r"\.([qkv])_conv1d\.weight$", r".\1_conv.conv.weight"),
    )
)

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(w[123])\.(weight|scales|biases)$")
_EXPERT_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_QKV = re.compile(r"\.self_attn\.([qkv])_(proj|conv\.conv)\.(weight|scales|biases)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Placement:
    """The parameter a tensor becomes, and which part of it when several tensors do.

    ``part`` is the expert number, or 0, 1, 2 for the query, key and value rows of a
    fused projection; None when the tensor is the whole parameter.
    """

    key: str
    part: int | None = None


def layer_of(name: str) -> int | None:
    """The 0-based layer that a tensor or parameter name speaks of, if any."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def place(name: str, args: TextArgs) -> Placement | None:
    """Where the checkpoint tensor ``name`` goes; None if not into the text model.

    Raises CheckpointError for a layer that the config does not have.
    """
    name = name.removeprefix(PREFIX)
    if name.startswith(OTHER_PARTS):
        return None
    layer = layer_of(name)
    if layer is not None and layer >= args.num_hidden_layers:
        raise CheckpointError(
            f"{name}: the checkpoint has a layer {layer}, but config.json's "
            f"num_hidden_layers is {args.num_hidden_layers}."
        )
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if layer is None:
        return Placement(PREFIX + name)
    if found := _EXPERT.search(name):
        matrix = _EXPERT_MATRICES[found[2]]
        key = f"{name[: found.start()]}.mlp.switch_mlp.{matrix}.{found[3]}"
        return Placement(PREFIX + key, int(found[1]))
    if args.is_kda_layer(layer) and (found := _QKV.search(name)):
        key = f"{name[: found.start()]}.self_attn.qkv_{found[2]}.{found[3]}"
        return Placement(PREFIX + key, "qkv".index(found[1]))
    if args.experts_in_layer(layer) and not args.bank_split(layer):
        # A high bank that holds every expert is the one bank.
        full = args.expert_bank_split and args.expert_bank_split[layer]
        if full:
            name = name.replace(".switch_mlp.bank_hi.", ".switch_mlp.")
    return Placement(PREFIX + name)


def place_all(names: Iterable[str], args: TextArgs) -> dict[str, Placement]:
    """The placement of each of ``names`` that goes into the text model.

    The release has half a million names that differ in an expert number only; one of
    each kind is looked at.
    """
    placements: dict[str, Placement] = {}
    kinds: dict[str, Placement | None] = {}
    for name in names:
        found = _EXPERT_NUMBER.search(name)
        if found is None:
            placement = place(name, args)
        else:
            kind = f"{name[: found.start(1)]}0{name[found.end(1) :]}"
            if kind not in kinds:
                kinds[kind] = place(kind, args)
            placement = kinds[kind]
            if placement is not None and placement.part is None:
                placement = place(name, args)
            elif placement is not None:
                placement = Placement(placement.key, int(found[1]))
        if placement is not None:
            placements[name] = placement
    return placements


def parts_of(key: str, args: TextArgs) -> int:
    """How many tensors make up the parameter ``key`` when it is stored in parts."""
    if ".switch_mlp." in key:
        return args.experts_in_layer(layer_of(key) or 0)
    return 3


def scales_name(name: str) -> str:
    """The stored name of the scales that belong to the weight called ``name``."""
    if name.endswith(".weight_packed"):
        return name.removesuffix("packed") + "scale"
    return name.removesuffix(".weight") + ".scales"


def biases_name(name: str) -> str:
    """The stored name of the affine biases that belong to the weight ``name``."""
    return name.removesuffix(".weight") + ".biases"
