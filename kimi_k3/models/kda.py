"""Kimi Delta Attention (KDA), the linear attention of three layers in four.

Reference: ``KimiDeltaAttention`` in Moonshot's ``modeling_kimi_linear.py``.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..config import TextArgs
from ..kernels.kda_decode import MAX_TOKENS, kda_decode
from ..kernels.kda_prefill import kda_prefill


class DepthwiseConv(nn.Module):
    """Holds the weight of a causal depthwise convolution, (channels, width, 1)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        bound = width**-0.5
        self.weight = mx.random.uniform(-bound, bound, (channels, width, 1))


class ShortConv(nn.Module):
    """Gives the convolution's weight the name that builds store it under."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.conv = DepthwiseConv(channels, width)


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
        qkv = self.qkv_proj(x)
        gate = self.f_b_proj(self.f_a_proj(x))
        output_gate = (
            self.g_proj(x)
            if self.use_full_rank_gate
            else self.g_b_proj(self.g_a_proj(x))
        )
        conv_weight = self.qkv_conv.conv.weight
        conv_state, state, lengths = None, None, None
        if cache is not None:
            conv_state, state, lengths = cache[0], cache[1], cache.lengths
        if conv_state is None:
            shape = (B, conv_weight.shape[1] - 1, qkv.shape[-1])
            conv_state = mx.zeros(shape, dtype=qkv.dtype)
        if state is None:
            shape = (B, self.num_heads, self.head_dim, self.head_dim)
            state = mx.zeros(shape, dtype=mx.float32)

        inputs = (qkv, gate, self.b_proj(x), output_gate, conv_state, state)
        weights = (conv_weight, self.A_log, self.dt_bias, self.o_norm.weight)
        inputs = (*inputs, *weights, self.lower_bound, self.o_norm.eps)
        if T <= MAX_TOKENS and mask is None and lengths is None:
            out, conv_state, state = kda_decode(*inputs, training=self.training)
        else:
            out, conv_state, state = kda_prefill(
                *inputs, mask, lengths, training=self.training
            )
        if cache is not None:
            cache[0], cache[1] = conv_state, state
            cache.advance(T)
        return self.o_proj(out)
