"""Everything of a KDA layer between its projections, for any number of tokens.

Reference: the ``kda`` operators of flash-linear-attention.
"""

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ._common import compiled_on_gpu
from .kda_recurrence import kda_recurrence

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
    size = x.shape[-1]
    weight = _full(size, scale * size**-0.5)
    return mx.fast.rms_norm(x.astype(mx.float32), weight, L2_NORM_EPS / size)


@cache
def _full(size: int, value: float) -> mx.array:
    return mx.array([value] * size, dtype=mx.float32)


@compiled_on_gpu
def _convolve(window: mx.array, weight: mx.array) -> mx.array:
    """SiLU of the convolution of (B, width - 1 + T, C), rounded to ``window``'s dtype."""
    width = weight.shape[1]
    T = window.shape[1] - width + 1
    taps = weight.astype(mx.float32).squeeze(-1).T
    convolved = sum(
        window[:, i : i + T].astype(mx.float32) * taps[i : i + 1] for i in range(width)
    )
    return nn.silu(convolved).astype(window.dtype).astype(mx.float32)


def short_conv(
    x: mx.array, state: mx.array, weight: mx.array, lengths: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Causal depthwise convolution of (B, T, C), then SiLU; float32 and a new state.

    ``weight`` is (C, width, 1), its last column meets the newest token. The state is
    the last ``width - 1`` inputs, (B, width - 1, C). ``lengths`` (B,) says how many of
    the T tokens of a row are real when rows are padded on the right; the state is then
    taken at each row's own end.
    """
    T, kept = x.shape[1], weight.shape[1] - 1
    window = mx.concatenate([state, x], axis=1)
    if lengths is None:
        state = mx.contiguous(window[:, -kept:])
    else:
        first = mx.clip(lengths, 0, T)[:, None] + mx.arange(kept)
        state = mx.take_along_axis(window, first[..., None], axis=1)
    return _convolve(window, weight), state


@compiled_on_gpu
def _gated(normed: mx.array, gate: mx.array) -> mx.array:
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(gate.dtype)


def gated_norm(
    out: mx.array, gate: mx.array, norm_weight: mx.array, eps: float
) -> mx.array:
    """RMS-norm each head of ``out`` (B, T, H, V) and gate it, in ``gate``'s dtype."""
    normed = mx.fast.rms_norm(out, norm_weight, eps)
    return _gated(normed, gate.reshape(out.shape))


@compiled_on_gpu
def _strength(beta: mx.array) -> mx.array:
    return mx.sigmoid(beta.astype(mx.float32))


def kda_prefill(
    qkv: mx.array,
    gate: mx.array,
    beta: mx.array,
    output_gate: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    lower_bound: float | None,
    norm_eps: float,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    training: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolution, norms, gates, recurrence and gated output norm.

    Args:
        qkv: projected queries, keys and values in this order, (B, T, 3·H·K).
        gate: projected forget gate, (B, T, H·K).
        beta: projected write strength, (B, T, H), before its sigmoid.
        output_gate: projected output gate, (B, T, H·K), before its sigmoid.
        conv_state: the inputs before ``qkv``, (B, width - 1, 3·H·K).
        state: recurrent state, value dimension first, (B, H, K, K), float32.
        conv_weight: (3·H·K, width, 1).
        A_log, dt_bias: (H,) and (H·K,), of :func:`log_decay`.
        norm_weight: of the output norm, (K,).
        lower_bound: of :func:`log_decay`.
        norm_eps: of the output norm.
        mask: (B, T), False where a row is padded.
        lengths: (B,), see :func:`short_conv`.
        training: take the form that has a gradient.

    Returns:
        Output (B, T, H·K) in ``qkv``'s dtype, and both states after the last token.
    """
    B, T, _ = qkv.shape
    H = A_log.shape[0]
    K = dt_bias.size // H
    if mask is not None:
        qkv = mx.where(mask[..., None], qkv, mx.zeros_like(qkv))
    mixed, conv_state = short_conv(qkv, conv_state, conv_weight, lengths)
    # Slices, which are views: an index would be a gather.
    query, key, value = (
        part.squeeze(2) for part in mx.split(mixed.reshape(B, T, 3, H, K), 3, axis=2)
    )
    out, state = kda_recurrence(
        l2_normalize(query, K**-0.5),
        l2_normalize(key),
        value,
        log_decay(gate.reshape(B, T, H, K), A_log, dt_bias.reshape(H, K), lower_bound),
        _strength(beta),
        state,
        mask,
        lower_bound=lower_bound,
        training=training,
    )
    out = gated_norm(out, output_gate, norm_weight, norm_eps)
    return out.flatten(-2, -1).astype(qkv.dtype), conv_state, state
