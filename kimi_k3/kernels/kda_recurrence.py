"""The recurrence of Kimi Delta Attention: a delta rule with a per-channel decay."""

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from ._common import can_run_metal, compiled_on_gpu


@compiled_on_gpu
def _step(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """One token: (B, H, K) ×2, (B, H, V), (B, H, K), (B, H), (B, H, V, K)."""
    state = state * decay[..., None, :]
    recalled = (state @ key[..., None]).squeeze(-1)
    correction = (value - recalled) * beta[..., None]
    state = state + correction[..., None] * key[..., None, :]
    return (state @ query[..., None]).squeeze(-1), state


def kda_recurrence_reference(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """:func:`kda_recurrence` in MLX ops, token by token; also takes gradients."""
    query, key, value, beta = (x.astype(mx.float32) for x in (query, key, value, beta))
    decay = mx.exp(log_decay)
    if mask is not None:
        decay = mx.where(mask[..., None, None], decay, 1.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    outputs = []
    for t in range(query.shape[1]):
        output, state = _step(
            query[:, t], key[:, t], value[:, t], decay[:, t], beta[:, t], state
        )
        outputs.append(output)
    return mx.stack(outputs, axis=1), state


def kda_recurrence(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    training: bool = False,
) -> tuple[mx.array, mx.array]:
    """``S ← diag(g)·S;  S ← S + k·β·(v − Sᵀk)ᵀ;  o = Sᵀq`` along the tokens.

    Args:
        query, key: L2-normalised, query also scaled, (B, T, H, K).
        value: (B, T, H, V).
        log_decay: log g, (B, T, H, K), float32, at most 0.
        beta: write strength, (B, T, H).
        state: S, stored value dimension first, (B, H, V, K), float32.
        mask: (B, T); a token where it is False leaves the state as it is.
        training: take the form that has a gradient.

    Returns:
        Outputs (B, T, H, V) and the state after the last token.
    """
    packs = key.shape[-1] % 32 == 0
    if training or not packs or not can_run_metal():
        return kda_recurrence_reference(query, key, value, log_decay, beta, state, mask)
    decay = mx.exp(log_decay)
    return gated_delta_kernel(query, key, value, decay, beta, state, mask)
