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

        out = self._attend(q_nope, q_shared, latent, k_shared, mask)
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

    def _attend(
        self,
        q_nope: mx.array,
        q_shared: mx.array,
        latent: mx.array,
        k_shared: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """Outputs of all heads, (B, H, T, V), some heads and rows at a time."""
        B, _, T, _ = q_nope.shape
        heads, rows = self._block(B, T, latent.shape[2], q_nope.dtype.size)
        if heads == self.num_heads:
            parts = (q_nope, q_shared, latent, k_shared, mask)
            return self._attend_heads(self.embed_q, self.unembed_out, *parts, rows)
        of_heads: list[mx.array] = []
        for head in range(0, self.num_heads, heads):
            own = slice(head, head + heads)
            out = self._attend_heads(
                _heads(self.embed_q, own),
                _heads(self.unembed_out, own),
                q_nope[:, own],
                q_shared[:, own],
                latent,
                k_shared,
                mask,
                rows,
            )
            # A block waits for the one before, or all could be at work at once.
            q_nope, q_shared, latent = mx.depends([q_nope, q_shared, latent], [out])
            of_heads.append(out)
        return mx.concatenate(of_heads, axis=1)

    def _attend_heads(
        self,
        embed_q: Any,
        unembed_out: Any,
        q_nope: mx.array,
        q_shared: mx.array,
        latent: mx.array,
        k_shared: mx.array,
        mask: mx.array | None,
        rows: int,
    ) -> mx.array:
        """The same of some heads, whose projections these are."""
        absorbs = self._absorbs(q_nope.shape[2])
        if absorbs:
            queries, keys, values = embed_q(q_nope), latent, latent
        else:
            queries = q_nope
            keys = embed_q(latent, transpose=False)
            values = unembed_out(latent)
        arrays = (queries, keys, values, q_shared, k_shared, mask)
        out = _attend_rows(*arrays, scale=self.scale, rows=rows)
        return unembed_out(out).astype(q_nope.dtype) if absorbs else out

    def _block(self, batch: int, tokens: int, keys: int, size: int) -> tuple[int, int]:
        """Heads and rows of a block whose scores, of ``size`` bytes each, fit in.

        A single token is never cut: it has few scores, and decoding should not wait.
        """
        fit = max(1, self.block_bytes // (batch * keys * size))
        if tokens == 1 or fit >= self.num_heads * tokens:
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


def _attend_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    q_shared: mx.array,
    k_shared: mx.array,
    mask: mx.array | None,
    *,
    scale: float,
    rows: int,
) -> mx.array:
    """:func:`_scored`, ``rows`` queries at a time.

    A causal mask hides every key behind a row's own from it, so rows that come early
    meet fewer keys.
    """
    T, S = queries.shape[2], keys.shape[2]
    if rows >= T:
        return _scored(queries, keys, values, q_shared, k_shared, mask, scale=scale)
    outs: list[mx.array] = []
    for row in range(0, T, rows):
        block = slice(row, row + rows)
        last = S if mask is None else S - T + min(row + rows, T)
        out = _scored(
            queries[:, :, block],
            keys[..., :last, :],
            values[..., :last, :],
            q_shared[:, :, block],
            k_shared[..., :last, :],
            None if mask is None else mask[..., block, :last],
            scale=scale,
        )
        queries, q_shared = mx.depends([queries, q_shared], [out])
        outs.append(out)
    return mx.concatenate(outs, axis=2)


def _scored(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    q_shared: mx.array,
    k_shared: mx.array,
    mask: mx.array | None,
    *,
    scale: float,
) -> mx.array:
    """Attention whose scores are those of queries and keys plus those of shared parts."""
    dtype = q_shared.dtype
    scores = (q_shared * scale) @ k_shared.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scaled_dot_product_attention(
        queries.astype(dtype),
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
