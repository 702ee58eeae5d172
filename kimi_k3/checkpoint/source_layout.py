"""Every tensor of a Kimi K3 checkpoint in Moonshot's own format, from its config.

This is the one home of the source format's names, shapes and stored types. The real
configuration (:func:`full_size_config`) gives the release's 497,220 tensors and
1,560,860,324,864 bytes.

Stored types are the safetensors names ``BF16``, ``F32`` and ``U8``. A routed expert
has three matrices, ``w1`` (gate), ``w2`` (down) and ``w3`` (up), each as
``weight_packed``, two E2M1 codes a byte, and ``weight_scale``, one E8M0 byte for 32
weights of a row.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from ..config import ModelArgs, TextArgs
from ..errors import ConfigError

#: Weights of a row that share one E8M0 scale.
EXPERT_GROUP = 32

#: Bytes of one element of each stored type.
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

#: Files of the release.
RELEASE_SHARDS = 96

_TEXT = "language_model."
_BIAS_KEYS = ("attn_bias", "linear_bias", "patch_embed_proj_bias")


class SourceTensor(NamedTuple):
    """One stored tensor; ``layer`` is its 0-based decoder layer or None."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Model parameters held: two a byte of codes, none in a scale."""
        if self.name.endswith(".weight_scale"):
            return 0
        count = math.prod(self.shape)
        return 2 * count if self.name.endswith(".weight_packed") else count


def source_tensors(
    args: ModelArgs, *, a_log_shape: tuple[int, ...] | None = None
) -> Iterator[SourceTensor]:
    """Yield every tensor of the source checkpoint of ``args``, layer by layer.

    The six tensors of an expert follow each other. ``a_log_shape`` is how ``A_log`` is
    stored: ``(head_dim,)``, padded behind the heads, unless said otherwise, as in the
    release. Vision tensors come last, if ``args`` has a ``vision_config``.
    """
    text = args.text_config
    width = text.hidden_size
    if a_log_shape is None:
        a_log_shape = (text.linear_attn_config.head_dim,)
    yield _bf16(f"{_TEXT}model.embed_tokens.weight", text.vocab_size, width)
    for layer in range(text.num_hidden_layers):
        yield from layer_tensors(text, layer, a_log_shape)
    yield _bf16(f"{_TEXT}model.norm.weight", width)
    if text.attn_res_block_size:
        yield _bf16(f"{_TEXT}model.output_attn_res_norm.weight", width)
        yield _bf16(f"{_TEXT}model.output_attn_res_proj.weight", 1, width)
    if not text.tie_word_embeddings:
        yield _bf16(f"{_TEXT}lm_head.weight", text.vocab_size, width)
    if args.vision_config:
        yield from _vision(args.vision_config)


def layer_tensors(
    text: TextArgs, layer: int, a_log_shape: tuple[int, ...]
) -> Iterator[SourceTensor]:
    """Yield the source tensors of 0-based decoder ``layer``."""
    width = text.hidden_size
    prefix = layer_prefix(layer)
    bf16 = partial(_bf16, layer=layer)
    yield bf16(f"{prefix}input_layernorm.weight", width)
    yield bf16(f"{prefix}post_attention_layernorm.weight", width)
    if text.attn_res_block_size:
        for name in ("self_attention_res", "mlp_res"):
            yield bf16(f"{prefix}{name}_norm.weight", width)
            yield bf16(f"{prefix}{name}_proj.weight", 1, width)
    if text.is_kda_layer(layer):
        yield from _kda(text, layer, a_log_shape)
    else:
        yield from _mla(text, layer)
    if text.is_moe_layer(layer):
        yield from _moe(text, layer)
    else:
        yield from _mlp(f"{prefix}mlp.", width, text.intermediate_size, layer)


def layer_prefix(layer: int) -> str:
    """What the name of every source tensor of 0-based ``layer`` begins with."""
    return f"{_TEXT}model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """What the names of the six tensors of one routed expert begin with."""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}."


def shard_name(number: int, shards: int) -> str:
    """File name of the 1-based shard ``number`` of ``shards``, as the release does."""
    return f"model-{number:05d}-of-{shards:06d}.safetensors"


def release_shard_of_layer(layer: int) -> str:
    """The file of the release that holds the whole of 0-based decoder ``layer``."""
    return shard_name(layer + 1, RELEASE_SHARDS)


def full_size_config() -> dict[str, Any]:
    """The configuration of the released Kimi K3, as its ``config.json`` nests it.

    Only keys that decide what the model computes or what its files hold.
    """
    data = resources.files("kimi_k3").joinpath("data", "kimi-k3.json")
    return json.loads(data.read_text(encoding="utf-8"))


def _bf16(name: str, *shape: int, layer: int | None = None) -> SourceTensor:
    return SourceTensor(name, shape, "BF16", layer)


def _kda(
    text: TextArgs, layer: int, a_log_shape: tuple[int, ...]
) -> Iterator[SourceTensor]:
    linear, width = text.linear_attn_config, text.hidden_size
    head, inner = linear.head_dim, linear.projection_dim
    prefix = f"{layer_prefix(layer)}self_attn."
    bf16 = partial(_bf16, layer=layer)

    def f32(name: str, *shape: int) -> SourceTensor:
        return SourceTensor(f"{prefix}{name}", shape, "F32", layer)

    yield f32("A_log", *a_log_shape)
    yield f32("dt_bias", inner)
    for name in "qkv":
        yield f32(f"{name}_conv1d.weight", inner, 1, linear.short_conv_kernel_size)
    yield f32("o_norm.weight", head)
    for name in "qkv":
        yield bf16(f"{prefix}{name}_proj.weight", inner, width)
    yield bf16(f"{prefix}f_a_proj.weight", head, width)
    yield bf16(f"{prefix}f_b_proj.weight", inner, head)
    yield bf16(f"{prefix}b_proj.weight", linear.num_heads, width)
    if linear.use_full_rank_gate:
        yield bf16(f"{prefix}g_proj.weight", inner, width)
    else:
        yield bf16(f"{prefix}g_a_proj.weight", head, width)
        yield bf16(f"{prefix}g_b_proj.weight", inner, head)
    yield bf16(f"{prefix}o_proj.weight", width, inner)


def _mla(text: TextArgs, layer: int) -> Iterator[SourceTensor]:
    width, heads = text.hidden_size, text.num_attention_heads
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    latent, query = text.kv_lora_rank, text.q_lora_rank
    prefix = f"{layer_prefix(layer)}self_attn."
    bf16 = partial(_bf16, layer=layer)
    if query is None:
        yield bf16(f"{prefix}q_proj.weight", heads * (nope + rope), width)
    else:
        yield bf16(f"{prefix}q_a_proj.weight", query, width)
        yield bf16(f"{prefix}q_a_layernorm.weight", query)
        yield bf16(f"{prefix}q_b_proj.weight", heads * (nope + rope), query)
    yield bf16(f"{prefix}kv_a_proj_with_mqa.weight", latent + rope, width)
    yield bf16(f"{prefix}kv_a_layernorm.weight", latent)
    yield bf16(f"{prefix}kv_b_proj.weight", heads * (nope + value), latent)
    if text.mla_use_output_gate:
        yield bf16(f"{prefix}g_proj.weight", heads * value, width)
    yield bf16(f"{prefix}o_proj.weight", width, heads * value)


def _mlp(prefix: str, width: int, inner: int, layer: int) -> Iterator[SourceTensor]:
    yield _bf16(f"{prefix}gate_proj.weight", inner, width, layer=layer)
    yield _bf16(f"{prefix}up_proj.weight", inner, width, layer=layer)
    yield _bf16(f"{prefix}down_proj.weight", width, inner, layer=layer)


def _moe(text: TextArgs, layer: int) -> Iterator[SourceTensor]:
    width, latent = text.hidden_size, text.routed_expert_hidden_size
    experts = text.experts_in_layer(layer)
    prefix = f"{layer_prefix(layer)}block_sparse_moe."
    bf16 = partial(_bf16, layer=layer)
    bias = f"{prefix}gate.e_score_correction_bias"
    yield SourceTensor(bias, (experts,), "F32", layer)
    yield bf16(f"{prefix}gate.weight", experts, width)
    if latent is not None:
        yield bf16(f"{prefix}routed_expert_down_proj.weight", latent, width)
        yield bf16(f"{prefix}routed_expert_up_proj.weight", width, latent)
        if text.latent_moe_use_norm:
            yield bf16(f"{prefix}routed_expert_norm.weight", latent)
    if text.num_shared_experts:
        shared = text.num_shared_experts * text.moe_intermediate_size
        yield from _mlp(f"{prefix}shared_experts.", width, shared, layer)
    for expert in range(experts):
        yield from _expert(text, layer, expert)


def _expert(text: TextArgs, layer: int, expert: int) -> Iterator[SourceTensor]:
    outer, inner = text.expert_hidden_size, text.moe_intermediate_size
    prefix = expert_prefix(layer, expert)
    for name, rows, columns in (
        ("w1", inner, outer),
        ("w2", outer, inner),
        ("w3", inner, outer),
    ):
        codes, scales = (rows, columns // 2), (rows, columns // EXPERT_GROUP)
        yield SourceTensor(f"{prefix}{name}.weight_packed", codes, "U8", layer)
        yield SourceTensor(f"{prefix}{name}.weight_scale", scales, "U8", layer)


def _vision(vision: dict[str, Any]) -> Iterator[SourceTensor]:
    """The tower and the projector; the time table is computed, not stored."""
    for key in _BIAS_KEYS:
        if vision.get(key):
            raise ConfigError(
                f"vision_config.{key} is {vision[key]!r}, but Kimi K3's vision tower "
                "has no biases. Take config.json from the checkpoint's own repository."
            )
    width, qkv = vision["vt_hidden_size"], vision["qkv_hidden_size"]
    inner, patch = vision["vt_intermediate_size"], vision["patch_size"]
    rows, columns = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    yield _bf16("vision_tower.patch_embed.proj.weight", width, 3, patch, patch)
    yield _bf16("vision_tower.patch_embed.pos_emb.weight", rows, columns, width)
    for block in range(vision["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield _bf16(f"{prefix}norm0.weight", width)
        yield _bf16(f"{prefix}norm1.weight", width)
        yield _bf16(f"{prefix}wqkv.weight", 3 * qkv, width)
        yield _bf16(f"{prefix}wo.weight", width, qkv)
        yield _bf16(f"{prefix}mlp.fc0.weight", inner, width)
        yield _bf16(f"{prefix}mlp.fc1.weight", width, inner)
    yield _bf16("vision_tower.encoder.final_layernorm.weight", width)
    merged = vision["mm_hidden_size"] * math.prod(vision["merge_kernel_size"])
    text_width = vision["text_hidden_size"]
    yield _bf16("mm_projector.proj.0.weight", merged, merged)
    yield _bf16("mm_projector.proj.2.weight", text_width, merged)
    yield _bf16("mm_projector.post_norm.weight", text_width)
