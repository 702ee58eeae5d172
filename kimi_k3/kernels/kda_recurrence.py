"""The recurrence of Kimi Delta Attention: a delta rule with a per-channel decay."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from ._common import compiled_on_gpu
from .kda_chunks import kda_recurrence_in_chunks, suits_chunks

#: Rows of the state (value channels) that one simdgroup keeps in its registers.
ROWS = 8

#: Larger heads do not fit: a lane holds a quarter of a row.
MAX_HEAD_DIM = 256

_SOURCE = """
    // Four lanes a row of the state; a lane holds quads l, l + 4, l + 8, ... of it.
    constexpr int QUADS = K / 16;
    uint lane = thread_index_in_simdgroup;
    uint part = lane % 4;
    uint row = thread_position_in_grid.y * 8 + lane / 4;
    uint head = thread_position_in_grid.z % H;
    uint batch = thread_position_in_grid.z / H;
    uint T = key_shape[1];

    ulong at_state = ((ulong(batch) * H + head) * V + row) * K + part * 4;
    float4 memory[QUADS];
    for (int j = 0; j < QUADS; ++j) {
      memory[j] = *(const device float4*)(state + at_state + j * 16);
    }

    for (uint t = 0; t < T; ++t) {
      ulong at_token = (ulong(batch) * T + t) * H + head;
      ulong at_key = at_token * K + part * 4;
      // The same for all threads of a threadgroup.
      bool real = !MASKED || mask[batch * T + t];
      if (real) {
        float recalled = 0.0f;
        for (int j = 0; j < QUADS; ++j) {
          memory[j] *= *(const device float4*)(decay + at_key + j * 16);
          recalled += metal::dot(
              memory[j], *(const device float4*)(key + at_key + j * 16));
        }
        recalled += simd_shuffle_xor(recalled, 1);
        recalled += simd_shuffle_xor(recalled, 2);
        float change = (value[at_token * V + row] - recalled) * beta[at_token];
        for (int j = 0; j < QUADS; ++j) {
          memory[j] += change * *(const device float4*)(key + at_key + j * 16);
        }
      }
      float read = 0.0f;
      for (int j = 0; j < QUADS; ++j) {
        read += metal::dot(
            memory[j], *(const device float4*)(query + at_key + j * 16));
      }
      read += simd_shuffle_xor(read, 1);
      read += simd_shuffle_xor(read, 2);
      if (part == 0) {
        out[at_token * V + row] = read;
      }
    }
    for (int j = 0; j < QUADS; ++j) {
      *(device float4*)(state_out + at_state + j * 16) = memory[j];
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_kda_recurrence",
        input_names=["query", "key", "value", "decay", "beta", "state", "mask"],
        output_names=["out", "state_out"],
        source=_SOURCE,
    )


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
    # Products and sums: MLX's CPU multiplies small matrices with vectors slowly.
    recalled = (state * key[..., None, :]).sum(-1)
    correction = (value - recalled) * beta[..., None]
    state = state + correction[..., None] * key[..., None, :]
    return (state * query[..., None, :]).sum(-1), state


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
    lower_bound: float | None = None,
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
        lower_bound: what no ``log_decay`` is below, if that is known.
        training: take the form that has a gradient.

    Returns:
        Outputs (B, T, H, V) and the state after the last token, both float32. The
        kernel takes K up to 256 that 32 divides and V that 8 divides.
    """
    B, T, H, K = key.shape
    V = value.shape[-1]
    fits = K % 32 == 0 and K <= MAX_HEAD_DIM and V % ROWS == 0 and T > 0
    if training or not fits or not _common.can_run_metal():
        chunks = suits_chunks(T, lower_bound) and _common.runs_on_cpu()
        form = kda_recurrence_reference
        if chunks and not training:
            form = kda_recurrence_in_chunks
        return form(query, key, value, log_decay, beta, state, mask)
    query, key, value, beta, state = (
        x.astype(mx.float32) for x in (query, key, value, beta, state)
    )
    decay = mx.exp(log_decay.astype(mx.float32))
    unused = _common.constants(0.0)
    given = unused if mask is None else mx.broadcast_to(mask, (B, T))
    out, state = _kernel()(
        inputs=[query, key, value, decay, beta, state, given],
        template=[("H", H), ("K", K), ("V", V), ("MASKED", mask is not None)],
        grid=(32, V // ROWS, B * H),
        threadgroup=(32, min(4, V // ROWS), 1),
        output_shapes=[(B, T, H, V), (B, H, V, K)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return out, state


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: 64 tokens of 96 heads of 128, decays differ."""
    B, T, H, K = 1, 64, 96, 128

    def unit() -> np.ndarray:
        x = rng.standard_normal((B, T, H, K), np.float32)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return {
        "query": mx.array(unit() * K**-0.5),
        "key": mx.array(unit()),
        "value": mx.array(rng.standard_normal((B, T, H, K), np.float32)),
        "log_decay": mx.array(-5 * rng.random((B, T, H, K), np.float32)),
        "beta": mx.array(rng.random((B, T, H), np.float32)),
        "state": mx.array(rng.standard_normal((B, H, K, K), np.float32)),
    }
