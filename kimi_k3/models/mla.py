"""Gated multi-head latent attention without positions (NoPE MLA).

Reference: ``KimiMLAAttention`` in Moonshot's ``modeling_kimi_linear.py``.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.mla import MultiLinear

from ..config import TextArgs
from ..kernels._common import compiled_on_gpu

#: The latent norms have an epsilon of their own, not ``rms_norm_eps``.
LATENT_NORM_EPS = 1e-6


class GatedMLA(nn.Module):
    """One full-attention layer.

    The cache is mlx-lm's KV cache with one head: its keys are the normed latent
    (B, 1, S, kv_lora_rank), its values the shared key part (B, 1, S, qk_rope_head_dim).
    No rotary embedding is ever applied to that part.
    """

    def __init__(self, args: TextArgs):
        super().__init__()
        hidden = args.hidden_size
        self.num_heads = args.num_attention_heads
        self.nope_dim = args.qk_nope_head_dim
        self.shared_dim = args.qk_rope_head_dim
        self.head_dim = self.nope_dim + self.shared_dim
        self.v_head_dim = args.v_head_dim
        self.kv_lora_rank = args.kv_lora_rank
        self.q_lora_rank = args.q_lora_rank
        self.use_gate = args.mla_use_output_gate
        self.scale = self.head_dim**-0.5

        query_width = self.num_heads * self.head_dim
        if self.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(self.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(self.q_lora_rank, query_width, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, self.kv_lora_rank + self.shared_dim, bias=False
        )
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.embed_q = MultiLinear(self.nope_dim, self.kv_lora_rank, self.num_heads)
        self.unembed_out = MultiLinear(
            self.kv_lora_rank, self.v_head_dim, self.num_heads
        )
        output_width = self.num_heads * self.v_head_dim
        if self.use_gate:
            self.g_proj = nn.Linear(hidden, output_width, bias=False)
        self.o_proj = nn.Linear(output_width, hidden, bias=False)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        """(B, T, D) → (B, T, D). ``mask`` is boolean, broadcastable to (B, 1, T, S)."""
        B, T, _ = x.shape
        q_nope, q_shared = mx.split(self._queries(x), [self.nope_dim], axis=-1)
        latent, k_shared = self._latents(x)
        if cache is not None:
            latent, k_shared = fetch(cache, latent, k_shared)

        scores = (q_shared * self.scale) @ k_shared.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)

        # One token meets the latents themselves; many are cheaper with whole heads.
        absorbed = T == 1
        if absorbed:
            queries, keys, values = self.embed_q(q_nope), latent, latent
        else:
            queries = q_nope
            keys = self.embed_q(latent, transpose=False)
            values = self.unembed_out(latent)
        dtype = x.dtype
        out = scaled_dot_product_attention(
            queries.astype(dtype),
            keys.astype(dtype),
            values.astype(dtype),
            cache=None,  # keys and values are plain whatever the cache holds
            scale=self.scale,
            mask=scores.astype(dtype),
        )
        if absorbed:
            out = self.unembed_out(out).astype(dtype)
        out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)
        if self.use_gate:
            out = gated(out, self.g_proj(x))
        return self.o_proj(out)

    def _queries(self, x: mx.array) -> mx.array:
        """Queries, (B, H, T, nope + shared)."""
        B, T, _ = x.shape
        if self.q_lora_rank is not None:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            queries = self.q_proj(x)
        return queries.reshape(B, T, self.num_heads, self.head_dim).swapaxes(1, 2)

    def _latents(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """What the cache keeps: (B, 1, T, kv_lora_rank), (B, 1, T, shared)."""
        latent, shared = mx.split(
            self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1
        )
        return self.kv_a_layernorm(latent)[:, None], shared[:, None]


@compiled_on_gpu
def gated(out: mx.array, gate: mx.array) -> mx.array:
    """``out`` times the sigmoid of ``gate``, both (B, T, H·V)."""
    return out * mx.sigmoid(gate)


def fetch(cache: Any, latent: mx.array, shared: mx.array) -> tuple[mx.array, mx.array]:
    """Put this step's latents into ``cache``; all that it holds, in plain form.

    mlx-lm's ``--kv-bits`` replaces the cache by one of quantised groups. Both parts are
    needed as numbers: the keys are multiplied by ``embed_q`` before queries meet them.
    """
    kept = cache.update_and_fetch(latent, shared)
    if not hasattr(cache, "bits"):
        return kept
    first, second = (
        mx.dequantize(*part, group_size=cache.group_size, bits=cache.bits)
        for part in kept
    )
    return first, second
