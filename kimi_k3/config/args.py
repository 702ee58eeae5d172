"""The one reading of a Kimi K3 ``config.json``.

Layer kinds, expert counts and bank sizes are asked here and nowhere else. Keys of
``text_config`` stand in three lists (:mod:`.keys`): required, defaulted and known to be
inert. A missing required key or an unsupported value is a
:class:`~kimi_k3.errors.ConfigError`; a key in none of the lists gives one
:class:`~kimi_k3.errors.UnknownKeyWarning`.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError
from . import checks
from .keys import (
    DEFAULTS,
    INERT,
    LINEAR_DEFAULTS,
    LINEAR_REQUIRED,
    NULLABLE,
    OPTIONS,
    REQUIRED,
    SUPPORTED,
)
from .quantization import stored_quantization


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
    def from_dict(cls, params: Any) -> "LinearAttentionArgs":
        """Read and check ``linear_attn_config``; raises ConfigError naming the key."""
        where = "text_config.linear_attn_config"
        params = checks.require_object(params, where)
        checks.require_keys(params, LINEAR_REQUIRED, where)
        checks.warn_unknown(params, {*LINEAR_REQUIRED, *LINEAR_DEFAULTS}, where)
        return cls(**_known_values(cls, params))

    def __post_init__(self) -> None:
        checks.check_linear(self)


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
    expert_top_p: float | None = None
    attention_block_bytes: int = 2**26

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

    @property
    def moe_layers(self) -> list[int]:
        """The 0-based layers that route to experts."""
        return [n for n in range(self.num_hidden_layers) if self.is_moe_layer(n)]

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
    def from_dict(cls, params: Any) -> "TextArgs":
        """Read and check ``text_config``; raises ConfigError naming the key."""
        where = "text_config"
        params = checks.require_object(params, where)
        checks.require_keys(params, REQUIRED, where)
        checks.warn_unknown(params, {*REQUIRED, *DEFAULTS, *INERT}, where)
        values: dict[str, Any] = _known_values(cls, params)
        # A default's null means the default; a required key's null may be a choice.
        values = {k: v for k, v in values.items() if v is not None or k in NULLABLE}
        missing = [key for key in REQUIRED if key not in values]
        if missing:
            raise ConfigError(
                f"{where}.{missing[0]} is null; the model is not defined without it. "
                f"{checks.SOURCE}"
            )
        linear = values["linear_attn_config"]
        if not isinstance(linear, LinearAttentionArgs):
            values["linear_attn_config"] = LinearAttentionArgs.from_dict(linear)
        return cls(**values)

    def __post_init__(self) -> None:
        checks.check_values(self, "text_config")
        for key, allowed in SUPPORTED.items():
            if (value := getattr(self, key)) not in allowed:
                raise ConfigError(
                    f"text_config.{key} is {value!r}; only {allowed[0]!r} is supported."
                )
        checks.check_sizes(self)
        checks.check_layer_lists(self)
        checks.check_heads(self)
        checks.check_experts(self)


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
    def from_dict(cls, params: Any) -> "ModelArgs":
        """Read a parsed ``config.json``; a flat one is taken as its ``text_config``.

        What is nobody's size but a choice, :data:`~.keys.OPTIONS`, may also stand at
        the top, where hosts put options, and wins there.
        """
        from ..checkpoint.foreign import refuse_foreign_config

        params = checks.require_object(params, "config.json")
        refuse_foreign_config(params)
        text = params.get("text_config")
        if text is None:
            text = {k: v for k, v in params.items() if k != "model_type"}
        elif not isinstance(text, TextArgs):
            text = checks.require_object(text, "text_config")
            text = text | {key: params[key] for key in OPTIONS if key in params}
        if not isinstance(text, TextArgs):
            text = TextArgs.from_dict(text)
        vision = params.get("vision_config")
        if vision is not None:
            vision = checks.require_object(vision, "vision_config")
        return cls(
            text_config=text,
            model_type=params.get("model_type", "kimi_k3"),
            vision_config=vision,
            quantization=stored_quantization(params),
        )


def _known_values(cls: Any, params: dict[str, Any]) -> dict[str, Any]:
    """What ``params`` holds for the fields of ``cls``; lists become tuples."""
    found = {f.name: params[f.name] for f in fields(cls) if f.name in params}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
