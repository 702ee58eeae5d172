"""Kimi Delta Attention (KDA), the linear attention of three layers in four.

Reference: ``KimiDeltaAttention`` in Moonshot's ``modeling_kimi_linear.py`` and the
``kda`` operators of flash-linear-attention.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..config import TextArgs
from ..kernels._common import compiled_on_gpu
from ..kernels.kda_recurrence import kda_recurrence

#: Added to the *sum* of squares of a query or key head before the square root.
L2_NORM_EPS = 1e-6


@compiled_on_gpu
def log_decay(
    gate: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None
) -> mx.array:
    """Log of the forget gate per head and channel, (B, T, H, K), float32, at most 0.

    ``gate`` is (B, T, H, K), ``A_log`` (H,) and ``dt_bias`` (H, K). With a lower bound
    it is ``lower_bound · sigmoid(exp(A_log) · (gate + dt_bias))``, a sigmoid and not a
    clamp; without one, ``-exp(A_log) · softplus(gate + dt_bias)`` as in Kimi-Linear.
    """
    rate = mx.exp(A_log.astype(mx.float32))[:, None]
    gate = gate.astype(mx.float32) + dt_bias.astype(mx.float32)
    if lower_bound is not None:
        return lower_bound * mx.sigmoid(rate * gate)
    return -rate * nn.softplus(gate)


def l2_normalize(x: mx.array, scale: float = 1.0) -> mx.array:
    """``x`` divided by its L2 norm over the last axis, times ``scale``, float32."""
    x = x.astype(mx.float32)
    return x * (mx.rsqrt(mx.square(x).sum(-1, keepdims=True) + L2_NORM_EPS) * scale)


class DepthwiseConv(nn.Module):
    """Holds the weight of a causal depthwise convolution, (channels, width, 1)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        bound = width**-0.5
        self.weight = mx.random.uniform(-bound, bound, (channels, width, 1))


class ShortConv(nn.Module):
    """Causal depthwise convolution followed by SiLU, in float32, with a state."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.width = width
        self.conv = DepthwiseConv(channels, width)

    def __call__(
        self, x: mx.array, state: mx.array | None, lengths: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Convolve (B, T, C); the state is the last ``width - 1`` inputs, (B, 3, C).

        ``lengths`` (B,) says how many of the T tokens of a row are real when rows are
        padded on the right; the state is then taken at each row's own end.
        """
        B, T, C = x.shape
        kept = self.width - 1
        if state is None:
            state = mx.zeros((B, kept, C), dtype=x.dtype)
        window = mx.concatenate([state, x], axis=1)
        weight = self.conv.weight.astype(mx.float32)[..., 0].T
        convolved = sum(window[:, i : i + T] * weight[i] for i in range(self.width))
        if lengths is None:
            state = mx.contiguous(window[:, -kept:])
        else:
            first = mx.clip(lengths, 0, T)[:, None] + mx.arange(kept)
            state = mx.take_along_axis(window, first[..., None], axis=1)
        return nn.silu(convolved).astype(x.dtype), state


class KimiDeltaAttention(nn.Module):
    """One KDA layer.

    The cache is an ``ArraysCache`` of two slots: the convolution state (B, 3, 3·H·K),
    query, key and value channels in this order, and the recurrent state (B, H, V, K)
    in float32.
    """

    def __init__(self, args: TextArgs):
        super().__init__()
        linear = args.linear_attn_config
        hidden = args.hidden_size
        width = linear.projection_dim
        self.num_heads = linear.num_heads
        self.head_dim = linear.head_dim
        self.lower_bound = linear.gate_lower_bound
        self.use_full_rank_gate = linear.use_full_rank_gate

        self.qkv_proj = nn.Linear(hidden, 3 * width, bias=False)
        self.qkv_conv = ShortConv(3 * width, linear.short_conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_heads, bias=False)
        if self.use_full_rank_gate:
            self.g_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.A_log = mx.log(mx.random.uniform(1.0, 16.0, (self.num_heads,)))
        self.dt_bias = mx.zeros((width,))
        self.o_norm = nn.RMSNorm(self.head_dim, eps=args.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,
        cache: ArraysCache | None = None,
    ) -> mx.array:
        """(B, T, D) → (B, T, D). ``mask`` (B, T) is False where a row is padded."""
        B, T, _ = x.shape
        conv_state, state, lengths = None, None, None
        if cache is not None:
            conv_state, state, lengths = cache[0], cache[1], cache.lengths

        qkv = self.qkv_proj(x)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, mx.zeros_like(qkv))
        qkv, conv_state = self.qkv_conv(qkv, conv_state, lengths)
        query, key, value = self._heads(qkv, 3)
        query = l2_normalize(query, self.head_dim**-0.5)
        key = l2_normalize(key)
        (gate,) = self._heads(self.f_b_proj(self.f_a_proj(x)), 1)
        if state is None:
            shape = (B, self.num_heads, self.head_dim, self.head_dim)
            state = mx.zeros(shape, dtype=mx.float32)

        out, state = kda_recurrence(
            query,
            key,
            value.astype(mx.float32),
            log_decay(
                gate,
                self.A_log,
                self.dt_bias.reshape(self.num_heads, self.head_dim),
                self.lower_bound,
            ),
            mx.sigmoid(self.b_proj(x).astype(mx.float32)),
            state,
            mask,
            training=self.training,
        )
        if cache is not None:
            cache[0], cache[1] = conv_state, state
            cache.advance(T)
        return self.o_proj(self._gated_output(out, x))

    def _gated_output(self, out: mx.array, x: mx.array) -> mx.array:
        """RMS-norm each head of ``out`` and gate it, (B, T, H·V) in ``x``'s dtype."""
        gate = (
            self.g_proj(x)
            if self.use_full_rank_gate
            else self.g_b_proj(self.g_a_proj(x))
        )
        (gate,) = self._heads(gate, 1)
        out = self.o_norm(out.astype(mx.float32)) * mx.sigmoid(gate.astype(mx.float32))
        return out.flatten(-2, -1).astype(x.dtype)

    def _heads(self, x: mx.array, parts: int) -> list[mx.array]:
        """Split (B, T, parts·H·K) into ``parts`` arrays of (B, T, H, K)."""
        B, T, _ = x.shape
        heads = x.reshape(B, T, parts, self.num_heads, self.head_dim)
        return [heads[:, :, part] for part in range(parts)]


def cache_metadata(cache: Any) -> list[mx.array]:
    """Arrays a cache keeps beside its state: padding, lengths, per-row offsets.

    mlx-lm updates them lazily each step and may never look at them again; whoever
    runs the step has to see that they are evaluated, or their graphs grow for ever.
    """
    found = (
        getattr(cache, name, None) for name in ("left_padding", "lengths", "offset")
    )
    return [value for value in found if isinstance(value, mx.array)]
