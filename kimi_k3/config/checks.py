"""What values of a ``config.json`` may be, and the words for those that may not."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ..errors import ConfigError, UnknownKeyWarning

if TYPE_CHECKING:
    from .args import LinearAttentionArgs, TextArgs

#: Whole numbers that may be 0; all others are at least 1.
MAY_BE_ZERO = (
    "num_experts",
    "num_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
)

#: The largest dimension that MLX can index.
LARGEST = 2**31 - 1

#: The state of a convolution of width 1 would be empty.
LEAST_CONV_WIDTH = 2

SOURCE = "Take config.json from the checkpoint's own repository."

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of whole numbers",
}


def shown(value: Any) -> str:
    """``value`` as a message shows it, cut to a readable length."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_object(value: Any, where: str) -> dict[str, Any]:
    """``value``, which must be a JSON object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {shown(value)}; wanted a JSON object. {SOURCE}")
    return value


def require_keys(params: dict[str, Any], keys: Iterable[str], where: str) -> None:
    missing = [key for key in keys if key not in params]
    if missing:
        raise ConfigError(
            f"{where}.{missing[0]} is missing from config.json. The model is not defined "
            f"without it. {SOURCE}"
        )


def warn_unknown(params: dict[str, Any], known: set[str], where: str) -> None:
    """One warning that names every key of ``params`` that is not in ``known``."""
    unknown = sorted(set(params) - known)
    if unknown:
        names = ", ".join(f"{where}.{key}" for key in unknown)
        warnings.warn(
            f"config.json sets {names}, which kimi-k3-mlx does not know and ignores.",
            UnknownKeyWarning,
            stacklevel=4,
        )


def check_values(args: "TextArgs | LinearAttentionArgs", where: str) -> None:
    """Every field has the type of its annotation and a value in range."""
    for field in fields(args):
        value, kinds = getattr(args, field.name), _kinds(field.type)
        if value is None and type(None) in kinds:
            continue
        if kinds[0] in _WORDS and not _fits(value, kinds[0]):
            raise ConfigError(
                f"{where}.{field.name} is {shown(value)}; wanted {_WORDS[kinds[0]]}. "
                f"{SOURCE}"
            )
        _check_range(field.name, value, where)


def _kinds(annotation: Any) -> list[type]:
    """The types that a field's annotation allows; the first is not None's."""
    options = (
        get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
    )
    return [get_origin(option) or option for option in options]


def _fits(value: Any, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, int) for item in value)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_range(key: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    least = 0 if key in MAY_BE_ZERO else 1
    if key == "gate_lower_bound":
        wanted, fits = "a number below 0", value < 0
    elif key == "expert_top_p":
        wanted, fits = "a number above 0 and at most 1", 0 < value <= 1
    elif key in ("rms_norm_eps", "routed_scaling_factor") or "beta" in key:
        wanted, fits = "a number above 0", value > 0
    else:
        wanted, fits = f"{least} to {LARGEST}", least <= value <= LARGEST
    if not fits:
        raise ConfigError(f"{where}.{key} is {shown(value)}; wanted {wanted}. {SOURCE}")


def check_linear(args: "LinearAttentionArgs") -> None:
    where = "text_config.linear_attn_config"
    check_values(args, where)
    if args.short_conv_kernel_size < LEAST_CONV_WIDTH:
        raise ConfigError(
            f"{where}.short_conv_kernel_size is {args.short_conv_kernel_size}; wanted at "
            f"least {LEAST_CONV_WIDTH}."
        )


def check_sizes(args: "TextArgs") -> None:
    """Sizes that make one dimension together must stay in MLX's range."""
    linear = args.linear_attn_config
    together = {
        "linear_attn_config.num_heads · head_dim · 3": 3 * linear.projection_dim,
        "num_attention_heads · (qk_nope_head_dim + qk_rope_head_dim)": (
            args.num_attention_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim)
        ),
        "num_attention_heads · (qk_nope_head_dim + v_head_dim)": (
            args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim)
        ),
        "kv_lora_rank + qk_rope_head_dim": args.kv_lora_rank + args.qk_rope_head_dim,
        "num_shared_experts · moe_intermediate_size": (
            args.num_shared_experts * args.moe_intermediate_size
        ),
    }
    for name, size in together.items():
        if size > LARGEST:
            raise ConfigError(
                f"text_config.{name} is {size}, more than MLX can index ({LARGEST}). "
                f"{SOURCE}"
            )


def check_layer_lists(args: "TextArgs") -> None:
    """``kda_layers`` and ``full_attn_layers`` name every layer once, from 1 on."""
    linear, layers = args.linear_attn_config, args.num_hidden_layers
    named = sorted((*linear.kda_layers, *linear.full_attn_layers))
    if both := sorted(set(linear.kda_layers) & set(linear.full_attn_layers)):
        raise ConfigError(
            f"linear_attn_config lists layer {both[0]} as KDA and as full attention."
        )
    known = set(named)
    # A config may claim any number of layers; the first gap comes soon.
    missing = next((n for n in range(1, layers + 1) if n not in known), None)
    odd = next((n for n in named if not 1 <= n <= layers), None)
    twice = next((n for n, m in zip(named, named[1:], strict=False) if n == m), None)
    for layer, what in ((missing, "is missing"), (odd, "is none"), (twice, "is twice")):
        if layer is not None:
            raise ConfigError(
                "linear_attn_config.kda_layers and full_attn_layers must name the layers "
                f"1..{layers} (num_hidden_layers) once each, counted from 1; layer "
                f"{layer} {what}."
            )


def check_heads(args: "TextArgs") -> None:
    """MLA has no key-value groups."""
    groups = args.num_key_value_heads
    if groups is not None and groups != args.num_attention_heads:
        raise ConfigError(
            f"text_config.num_key_value_heads is {groups} but num_attention_heads is "
            f"{args.num_attention_heads}; MLA has one latent for all heads and no groups."
        )


def check_experts(args: "TextArgs") -> None:
    """Counts, banks and router groups of every layer."""
    layers = args.num_hidden_layers
    for name in ("expert_counts", "expert_bank_split"):
        values = getattr(args, name)
        if values is not None and len(values) != layers:
            raise ConfigError(
                f"text_config.{name} has {len(values)} entries but the model has "
                f"{layers} layers; dense layers need an entry (0) too."
            )
    if args.topk_group > args.num_expert_group:
        raise ConfigError(
            f"text_config.topk_group is {args.topk_group}, but there are only "
            f"{args.num_expert_group} groups (num_expert_group)."
        )
    grouped = args.topk_group < args.num_expert_group
    if grouped and not args.use_grouped_topk:
        raise ConfigError(
            f"text_config.use_grouped_topk is false, but topk_group {args.topk_group} of "
            f"num_expert_group {args.num_expert_group} limits the choice to groups. Set "
            "both to 1 for a router without groups."
        )
    for layer in range(layers):
        _check_expert_layer(args, layer)


def _check_expert_layer(args: "TextArgs", layer: int) -> None:
    if not args.is_moe_layer(layer):
        if args.expert_counts and args.expert_counts[layer]:
            raise ConfigError(
                f"layer {layer}: expert_counts says {args.expert_counts[layer]} experts, "
                "but this layer is dense and must have 0."
            )
        return
    count, wanted = args.experts_in_layer(layer), args.num_experts_per_token
    if count < wanted:
        raise ConfigError(
            f"layer {layer} keeps {count} experts but the router picks "
            f"{wanted}; keep at least as many."
        )
    groups = args.num_expert_group
    if count % groups:
        raise ConfigError(
            f"layer {layer} keeps {count} experts, which num_expert_group "
            f"{groups} does not divide."
        )
    # The score of a group is the sum of its best two.
    if args.topk_group < groups and count // groups < max(
        2, -(-wanted // args.topk_group)
    ):
        raise ConfigError(
            f"layer {layer} has {count // groups} experts in each of {groups} groups; the "
            f"router needs two of a group, and {wanted} in {args.topk_group} groups."
        )
    split = args.expert_bank_split[layer] if args.expert_bank_split else 0
    if not 0 <= split <= count:
        raise ConfigError(
            f"layer {layer}: expert_bank_split is {split}, which is not within its "
            f"{count} experts."
        )
