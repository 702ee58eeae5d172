"""Gated multi-head latent attention without positions (NoPE MLA).

Reference: ``KimiMLAAttention`` in Moonshot's ``modeling_kimi_linear.py``.
"""

from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.mla import MultiLinear

from ..config import TextArgs
from ..kernels._common import compiled_on_gpu

#: The latent norms have an epsilon of their own, not ``rms_norm_eps``.
LATENT_NORM_EPS = 1e-6

#: Rows of a block where not all fit: enough for a matmul to be at its best.
BLOCK_ROWS = 512


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
        self.block_bytes = args.attention_block_bytes

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
        """(B, T, D) → (B, T, D).

        ``mask`` is causal, boolean, broadcastable to (B, 1, T, S).
        """
        B, T, _ = x.shape
        q_nope, q_shared = mx.split(self._queries(x), [self.nope_dim], axis=-1)
        latent, k_shared = self._latents(x)
        if cache is not None:
            latent, k_shared = fetch(cache, latent, k_shared)

        if self._absorbs(T):
            out = self._attend_latents(q_nope, q_shared, latent, k_shared, mask)
        else:
            out = self._attend_heads(q_nope, q_shared, latent, k_shared, mask)
        out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)
        if self.use_gate:
            out = gated(out, self.g_proj(x))
        return self.o_proj(out)

    def _absorbs(self, tokens: int) -> bool:
        """Whether ``tokens`` queries are cheaper against latents than against heads.

        A query against latents multiplies more numbers with every key; keys and values
        of whole heads have to be made of the latents first.
        """
        whole = self.nope_dim + self.v_head_dim
        return tokens == 1 or tokens * (2 * self.kv_lora_rank - whole) <= (
            self.kv_lora_rank * whole
        )

    def _attend_latents(
        self,
        q_nope: mx.array,
        q_shared: mx.array,
        latent: mx.array,
        k_shared: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """Outputs of all heads, (B, H, T, V): queries in the space of the latents."""
        out = _attend(
            self.embed_q(q_nope), latent, latent, q_shared, k_shared, self.scale, mask
        )
        return self.unembed_out(out).astype(q_nope.dtype)

    def _attend_heads(
        self,
        q_nope: mx.array,
        q_shared: mx.array,
        latent: mx.array,
        k_shared: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """The same with keys and values of whole heads, some heads and rows at a time.

        A causal mask hides every key behind a row's own from it, so rows that come
        early meet fewer keys.
        """
        B, _, T, _ = q_nope.shape
        S = latent.shape[2]
        heads, rows = self._block(B, T, S, q_nope.dtype.size)
        of_heads: list[mx.array] = []
        for head in range(0, self.num_heads, heads):
            own = slice(head, head + heads)
            keys = _heads(self.embed_q, own)(latent, transpose=False)
            values = _heads(self.unembed_out, own)(latent)
            of_rows: list[mx.array] = []
            for row in range(0, T, rows):
                block = slice(row, row + rows)
                last = S if mask is None else S - T + min(row + rows, T)
                out = _attend(
                    q_nope[:, own, block],
                    keys[..., :last, :],
                    values[..., :last, :],
                    q_shared[:, own, block],
                    k_shared[..., :last, :],
                    self.scale,
                    None if mask is None else mask[..., block, :last],
                )
                # Each block waits for the one before, or all could be at work at once.
                q_nope, q_shared, latent = mx.depends([q_nope, q_shared, latent], [out])
                of_rows.append(out)
            of_heads.append(mx.concatenate(of_rows, axis=2))
        return mx.concatenate(of_heads, axis=1)

    def _block(self, batch: int, tokens: int, keys: int, size: int) -> tuple[int, int]:
        """Heads and rows of a block whose scores, of ``size`` bytes each, fit in."""
        fit = max(1, self.block_bytes // (batch * keys * size))
        if fit >= self.num_heads * tokens:
            return self.num_heads, tokens
        rows = min(tokens, BLOCK_ROWS)
        heads = min(self.num_heads, max(1, fit // rows))
        return heads, min(tokens, max(1, fit // heads))

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


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    q_shared: mx.array,
    k_shared: mx.array,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """Attention whose scores are those of queries and keys plus those of shared parts."""
    dtype = queries.dtype
    scores = (q_shared * scale) @ k_shared.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scaled_dot_product_attention(
        queries,
        keys.astype(dtype),
        values.astype(dtype),
        cache=None,  # keys and values are plain whatever the cache holds
        scale=scale,
        mask=scores.astype(dtype),
    )


def _heads(projection: Any, heads: slice) -> Any:
    """A projection of ``heads`` only, plain or quantised."""
    part = copy(projection)
    for name, value in projection.items():
        part[name] = value if value is None else value[heads]
    return part


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
