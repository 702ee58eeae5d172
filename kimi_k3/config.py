"""The one reading of a Kimi K3 ``config.json``.

Layer kinds, expert counts and bank sizes are asked here and nowhere else. Keys of
``text_config`` stand in three lists: required (:data:`REQUIRED`), defaulted
(:data:`DEFAULTS`) and known to be inert (:data:`INERT`). A missing required key or an
unsupported value is a :class:`~kimi_k3.errors.ConfigError`; a key in none of the lists
gives one :class:`~kimi_k3.errors.UnknownKeyWarning`.
"""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError, UnknownKeyWarning

#: Keys that decide what the model computes and have no safe default.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "linear_attn_config",
    "attn_res_block_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "mla_use_output_gate",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
)

#: Keys that may be left out, and what is then assumed.
DEFAULTS: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_key_value_heads": None,  # equal to num_attention_heads: MLA has no groups
    "max_position_embeddings": 1048576,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "norm_type": "rmsnorm",
    "expert_counts": None,  # num_experts in every MoE layer
    "expert_bank_split": None,  # one bank in every layer
}

LINEAR_REQUIRED = (
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
)

LINEAR_DEFAULTS: dict[str, Any] = {
    "gate_lower_bound": None,  # the softplus gate of Kimi-Linear
}

#: Values for which there is code; anything else is refused.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("situ",),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "mla_use_nope": (True,),
    "num_nextn_predict_layers": (0, None),
    "norm_type": ("rmsnorm",),
}

#: Hugging Face boilerplate and what host libraries inject. Changes nothing here.
INERT = frozenset(
    [
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "ignore_index",
        "image_placeholder",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "media_placeholder_token_id",
        "min_length",
        "model_max_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "quantization",
        "quantization_config",
        "quantize_activations",
        "reap",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "vision_config",
    ]
)


@dataclass(frozen=True)
class LinearAttentionArgs:
    """``text_config.linear_attn_config``: the KDA layers. Layer lists are 1-based."""

    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    use_full_rank_gate: bool
    gate_lower_bound: float | None = None

    @property
    def projection_dim(self) -> int:
        return self.num_heads * self.head_dim

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "LinearAttentionArgs":
        where = "text_config.linear_attn_config"
        _require(params, LINEAR_REQUIRED, where)
        _warn_unknown(params, {*LINEAR_REQUIRED, *LINEAR_DEFAULTS}, where)
        values = {key: params[key] for key in LINEAR_REQUIRED}
        values["kda_layers"] = tuple(values["kda_layers"])
        values["full_attn_layers"] = tuple(values["full_attn_layers"])
        return cls(**values, gate_lower_bound=params.get("gate_lower_bound"))


@dataclass(frozen=True)
class TextArgs:
    """``text_config``: the language model. Field names are the checkpoint's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    hidden_act: str
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    linear_attn_config: LinearAttentionArgs
    attn_res_block_size: int | None
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool
    mla_use_output_gate: bool
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    model_type: str = "kimi_linear"
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 1048576
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    moe_layer_freq: int = 1
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    norm_type: str = "rmsnorm"
    expert_counts: tuple[int, ...] | None = None
    expert_bank_split: tuple[int, ...] | None = None

    def is_kda_layer(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is Kimi Delta Attention (else it is MLA)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether 0-based ``layer`` routes to experts (else it has a dense MLP)."""
        return (
            self.num_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def experts_in_layer(self, layer: int) -> int:
        """Experts kept in 0-based ``layer``; 0 for a dense layer."""
        if not self.is_moe_layer(layer):
            return 0
        return self.expert_counts[layer] if self.expert_counts else self.num_experts

    def bank_split(self, layer: int) -> int:
        """Experts ``[0, split)`` of ``layer`` lie in the high bank; 0 for one bank."""
        if not self.expert_bank_split or not self.is_moe_layer(layer):
            return 0
        split = self.expert_bank_split[layer]
        return 0 if split == self.experts_in_layer(layer) else split

    @property
    def expert_hidden_size(self) -> int:
        """Width of what an expert reads and writes: the latent, if there is one."""
        return self.routed_expert_hidden_size or self.hidden_size

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "TextArgs":
        """Read and check ``text_config``; raises ConfigError naming the key."""
        where = "text_config"
        _require(params, REQUIRED, where)
        _warn_unknown(params, {*REQUIRED, *DEFAULTS, *INERT}, where)
        values = {
            f.name: params[f.name]
            for f in fields(cls)
            if params.get(f.name) is not None
        }
        for key in ("q_lora_rank", "attn_res_block_size", "routed_expert_hidden_size"):
            values.setdefault(key, None)
        values.setdefault("activation_situ_linear_beta", None)
        missing = [key for key in REQUIRED if key not in values]
        if missing:
            raise ConfigError(
                f"{where}.{missing[0]} is null; the model is not defined without it. "
                "Take config.json from the checkpoint's own repository."
            )
        linear = values["linear_attn_config"]
        if not isinstance(linear, LinearAttentionArgs):
            values["linear_attn_config"] = LinearAttentionArgs.from_dict(linear)
        for key in ("expert_counts", "expert_bank_split"):
            if key in values:
                values[key] = tuple(values[key])
        return cls(**values)

    def __post_init__(self) -> None:
        for key, allowed in SUPPORTED.items():
            if (value := getattr(self, key)) not in allowed:
                raise ConfigError(
                    f"text_config.{key} is {value!r}; only {allowed[0]!r} is supported."
                )
        _check_layer_lists(self)
        _check_heads(self)
        if self.num_experts:
            _check_experts(self)


@dataclass(frozen=True)
class ModelArgs:
    """The whole ``config.json`` of a ``kimi_k3`` checkpoint.

    ``quantization`` is the MLX block that says how tensors are stored, or None when
    the config has none (the tensors then decide). ``vision_config`` is kept as it is;
    None means a text-only build.
    """

    text_config: TextArgs
    model_type: str = "kimi_k3"
    vision_config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "ModelArgs":
        """Read a parsed ``config.json``; a flat one is taken as its ``text_config``."""
        from .checkpoint.foreign import refuse_foreign_config

        refuse_foreign_config(params)
        text = params.get("text_config")
        if text is None:
            text = {k: v for k, v in params.items() if k != "model_type"}
        if not isinstance(text, TextArgs):
            text = TextArgs.from_dict(text)
        return cls(
            text_config=text,
            model_type=params.get("model_type", "kimi_k3"),
            vision_config=params.get("vision_config"),
            quantization=stored_quantization(params),
        )


def stored_quantization(params: dict[str, Any]) -> dict[str, Any] | None:
    """The MLX quantisation block of a config, or None.

    ``quantization`` wins over ``quantization_config`` (top level, then
    ``text_config``). A compressed-tensors block is translated; formats other than
    ``mxfp4-pack-quantized`` are refused, since their bytes mean something else.
    """
    if (block := params.get("quantization")) is not None:
        return block
    text = params.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    block = params.get("quantization_config") or nested
    if block is None:
        return None
    if "bits" in block:
        return block
    found = block.get("format", block.get("quant_method"))
    if found in ("mxfp4-pack-quantized", "mxfp4"):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    raise ConfigError(
        f"quantization_config.format is {found!r}; Kimi K3 checkpoints store experts as "
        "'mxfp4-pack-quantized'. Convert from the original release instead."
    )


def _require(params: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in params]
    if missing:
        raise ConfigError(
            f"{where}.{missing[0]} is missing from config.json. The model is not defined "
            "without it; take config.json from the checkpoint's own repository."
        )


def _warn_unknown(params: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(params) - known)
    if unknown:
        names = ", ".join(f"{where}.{key}" for key in unknown)
        warnings.warn(
            f"config.json sets {names}, which kimi-k3-mlx does not know and ignores.",
            UnknownKeyWarning,
            stacklevel=4,
        )


def _check_layer_lists(args: TextArgs) -> None:
    linear = args.linear_attn_config
    kda, full = set(linear.kda_layers), set(linear.full_attn_layers)
    if both := sorted(kda & full):
        raise ConfigError(
            f"linear_attn_config lists layer {both[0]} as KDA and as full attention."
        )
    if kda | full != set(range(1, args.num_hidden_layers + 1)):
        odd = sorted((kda | full) ^ set(range(1, args.num_hidden_layers + 1)))
        raise ConfigError(
            f"linear_attn_config.kda_layers and full_attn_layers must name the layers "
            f"1..{args.num_hidden_layers} (num_hidden_layers) once each, counted from 1; "
            f"layer {odd[0]} is missing or too many."
        )


def _check_heads(args: TextArgs) -> None:
    groups = args.num_key_value_heads
    if groups is not None and groups != args.num_attention_heads:
        raise ConfigError(
            f"text_config.num_key_value_heads is {groups} but num_attention_heads is "
            f"{args.num_attention_heads}; MLA has one latent for all heads and no groups."
        )


def _check_experts(args: TextArgs) -> None:
    counts, splits = args.expert_counts, args.expert_bank_split
    layers = args.num_hidden_layers
    for name, values in (("expert_counts", counts), ("expert_bank_split", splits)):
        if values is not None and len(values) != layers:
            raise ConfigError(
                f"text_config.{name} has {len(values)} entries but the model has "
                f"{layers} layers; dense layers need an entry (0) too."
            )
    for layer in range(layers):
        _check_expert_layer(args, layer)


def _check_expert_layer(args: TextArgs, layer: int) -> None:
    if not args.is_moe_layer(layer):
        if args.expert_counts and args.expert_counts[layer]:
            raise ConfigError(
                f"layer {layer}: expert_counts says {args.expert_counts[layer]} experts, "
                "but this layer is dense and must have 0."
            )
        return
    count = args.experts_in_layer(layer)
    if count < args.num_experts_per_token:
        raise ConfigError(
            f"layer {layer} keeps {count} experts but the router picks "
            f"{args.num_experts_per_token}; keep at least as many."
        )
    if count % args.num_expert_group:
        raise ConfigError(
            f"layer {layer} keeps {count} experts, which num_expert_group "
            f"{args.num_expert_group} does not divide."
        )
    split = args.expert_bank_split[layer] if args.expert_bank_split else 0
    if not 0 <= split <= count:
        raise ConfigError(
            f"layer {layer}: expert_bank_split is {split}, which is not within its "
            f"{count} experts."
        )
