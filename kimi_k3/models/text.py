"""The language model: decoder layers, the residual stack, the head.

Module names are mlx-lm's, so a uniform build saved from here loads there as well.
"""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, KVCache

from ..config import TextArgs
from .attention_residuals import ResidualStack, ScoreProjection, mix, mix_and_norm
from .kda import KimiDeltaAttention
from .latent_moe import LatentMoE
from .mla import GatedMLA
from .mlp import MLP


class DecoderLayer(nn.Module):
    """One layer: attention of its kind, then experts or a dense MLP."""

    def __init__(self, args: TextArgs, layer: int):
        super().__init__()
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.is_linear = args.is_kda_layer(layer)
        self.self_attn = KimiDeltaAttention(args) if self.is_linear else GatedMLA(args)
        self.mlp = (
            LatentMoE(args, layer)
            if args.is_moe_layer(layer)
            else MLP(args, args.intermediate_size)
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.use_attn_res = args.attn_res_block_size is not None
        if args.attn_res_block_size is not None:
            self.starts_block = layer % args.attn_res_block_size == 0
            self.self_attention_res_proj = ScoreProjection(hidden)
            self.self_attention_res_norm = nn.RMSNorm(hidden, eps=eps)
            self.mlp_res_proj = ScoreProjection(hidden)
            self.mlp_res_norm = nn.RMSNorm(hidden, eps=eps)

    def __call__(
        self,
        prefix: mx.array,
        stack: ResidualStack,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        """The residual sum (B, T, D) after this layer; ``stack`` may grow by a block."""
        if not self.use_attn_res:
            prefix = prefix + self.self_attn(self.input_layernorm(prefix), mask, cache)
            return prefix + self.mlp(self.post_attention_layernorm(prefix))

        x, prefix = mix_and_norm(
            stack,
            prefix,
            None,
            self.self_attention_res_norm,
            self.self_attention_res_proj,
            self.input_layernorm,
        )
        attended = self.self_attn(x, mask, cache)
        added: mx.array | None = attended
        if self.starts_block:
            stack.push(prefix)
            prefix, added = attended, None
        x, prefix = mix_and_norm(
            stack,
            prefix,
            added,
            self.mlp_res_norm,
            self.mlp_res_proj,
            self.post_attention_layernorm,
        )
        if isinstance(self.mlp, LatentMoE):
            return self.mlp(x, prefix)
        return prefix + self.mlp(x)


class TextModel(nn.Module):
    """Embedding, layers and final norm; in a pipeline, one rank's share of them."""

    def __init__(self, args: TextArgs):
        super().__init__()
        self.args = args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.use_attn_res = args.attn_res_block_size is not None
        if self.use_attn_res:
            self.output_attn_res_proj = ScoreProjection(args.hidden_size)
            self.output_attn_res_norm = nn.RMSNorm(
                args.hidden_size, eps=args.rms_norm_eps
            )
        self.start_idx = 0
        self.end_idx = args.num_hidden_layers
        self.pipeline_group: mx.distributed.Group | None = None

    def pipeline(self, group: mx.distributed.Group) -> None:
        """Keep only this rank's layers; rank 0 holds the last ones, as mlx-lm has it."""
        base, extra = divmod(len(self.layers), group.size())
        segment = group.size() - group.rank() - 1
        self.start_idx = segment * base + min(segment, extra)
        self.end_idx = self.start_idx + base + (segment < extra)
        self.layers = self.layers[: self.end_idx]
        self.layers[: self.start_idx] = cast(
            list[DecoderLayer], [None] * self.start_idx
        )
        self.pipeline_group = group if group.size() > 1 else None

    @property
    def local_layers(self) -> list[DecoderLayer]:
        return self.layers[self.start_idx : self.end_idx]

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Token ids (B, T), or embeddings (B, T, D) in their place → (B, T, D)."""
        if input_embeddings is None:
            h = self.embed_tokens(inputs)
        else:
            h = input_embeddings
        caches = cache if cache is not None else [None] * len(self.local_layers)
        stack = ResidualStack(self.args.rms_norm_eps)
        masks = self._masks(h, caches)
        group = self.pipeline_group
        if group is not None and group.rank() < group.size() - 1:
            h = self._receive(h, stack, group)

        for layer, layer_cache in zip(self.local_layers, caches, strict=True):
            h = layer(h, stack, masks[layer.is_linear], layer_cache)

        if group is None or group.rank() == 0:
            if self.use_attn_res:
                norm, projection = self.output_attn_res_norm, self.output_attn_res_proj
                h = mix(stack, h, norm, projection)
        else:
            h = self._send(h, stack, group, caches)
        if group is not None:
            h = mx.distributed.all_gather(h, group=group)[: h.shape[0]]
        return self.norm(_with_cache_metadata(h, caches))

    def _masks(self, h: mx.array, caches: list[Any]) -> dict[bool, mx.array | None]:
        """Masks by ``is_linear``: (B, T) for KDA, causal (…, T, S) for MLA."""
        first: dict[bool, Any] = {}
        for layer, layer_cache in zip(self.local_layers, caches, strict=True):
            first.setdefault(layer.is_linear, layer_cache)
        masks: dict[bool, mx.array | None] = {True: None, False: None}
        if True in first:
            masks[True] = create_ssm_mask(h, first[True])
        if False in first:
            causal = create_attention_mask(h, first[False], return_array=True)
            masks[False] = cast(mx.array | None, causal)
        return masks

    def _receive(
        self, h: mx.array, stack: ResidualStack, group: mx.distributed.Group
    ) -> mx.array:
        """The residual sum from the rank before, and its stored blocks into ``stack``."""
        source = group.rank() + 1
        if not self.use_attn_res:
            return mx.distributed.recv_like(h, source, group=group)
        size = self.args.attn_res_block_size or 1
        blocks = -(-self.start_idx // size)
        packed = mx.distributed.recv(
            (blocks + 1, *h.shape), h.dtype, source, group=group
        )
        stack.extend(packed[:-1])
        return packed[-1]

    def _send(
        self,
        h: mx.array,
        stack: ResidualStack,
        group: mx.distributed.Group,
        caches: list[Any],
    ) -> mx.array:
        """Pass the residual sum and the stored blocks on to the next rank."""
        target = group.rank() - 1
        packed = h[None]
        if stack.blocks is not None:
            packed = mx.concatenate([stack.blocks, packed])
        h = mx.distributed.send(packed, target, group=group)[-1]
        # Evaluating the caches alone must send as well, or the next rank waits.
        last = caches[-1]
        if isinstance(last, ArraysCache):
            last[0] = mx.depends(last[0], h)
        elif last is not None:
            last.keys = mx.depends(last.keys, h)
        return h


class LanguageModel(nn.Module):
    """The text model and its head."""

    def __init__(self, args: TextArgs):
        super().__init__()
        self.args = args
        self.model = TextModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits, (B, T, vocab)."""
        out = self.model(inputs, cache, input_embeddings)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(out)
        return self.lm_head(out)

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.local_layers

    def make_cache(self) -> list[Any]:
        """One mlx-lm cache a layer: ``ArraysCache`` for KDA, ``KVCache`` for MLA."""
        return [
            ArraysCache(size=2) if layer.is_linear else KVCache()
            for layer in self.layers
        ]


def _with_cache_metadata(h: mx.array, caches: list[Any]) -> mx.array:
    """``h``, whose evaluation also evaluates what the caches count beside their state."""
    metadata = [value for cache in caches for value in _cache_metadata(cache)]
    return mx.depends(h, metadata) if metadata else h


def _cache_metadata(cache: Any) -> list[mx.array]:
    """Arrays a cache keeps beside its state: padding, lengths, per-row offsets.

    mlx-lm updates them lazily each step and may never look at them again; whoever
    runs the step has to see that they are evaluated, or their graphs grow for ever.
    """
    found = (
        getattr(cache, name, None) for name in ("left_padding", "lengths", "offset")
    )
    return [value for value in found if isinstance(value, mx.array)]
