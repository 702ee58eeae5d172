"""Everything of a KDA layer between its projections, for a few tokens, as one launch."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from . import _common
from .kda_prefill import L2_NORM_EPS, kda_prefill

#: More tokens at once take the reference, whose recurrence has a kernel of its own.
MAX_TOKENS = 8

#: Four threads a channel hold the state in registers; all tokens' queries, keys, values,
#: decays and outputs of a head take 20 KB of threadgroup memory.
MAX_HEAD_DIM = 128

_SOURCE = """
    // One threadgroup a head and row; eight rows of the state a simdgroup, four lanes
    // a row; a lane holds quads l, l + 4, l + 8, ... of it.
    constexpr int QUADS = K / 16;
    constexpr int SIMDGROUPS = K / 8;
    constexpr int KEPT = WIDTH - 1;
    constexpr int CHANNELS = H * K;
    uint index = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    uint head = threadgroup_position_in_grid.y;
    uint batch = threadgroup_position_in_grid.z;
    float lower_bound = constants[0];
    float norm_eps = constants[1];
    float l2_eps = constants[2];

    // Queries, keys and values, T of each, then the decays and the outputs.
    threadgroup float4 shared_quads[5 * T * K / 4];
    threadgroup float* shared = (threadgroup float*)shared_quads;
    threadgroup float* values = shared + 2 * T * K;
    threadgroup float* decays = shared + 3 * T * K;
    threadgroup float* outputs = shared + 4 * T * K;

    uint channel = index % K;
    uint column = head * K + channel;
    if (index < 3 * K) {
      uint kind = index / K;
      column += kind * CHANNELS;
      float window[T + KEPT];
      for (int i = 0; i < KEPT; ++i) {
        window[i] = float(conv_state[(batch * KEPT + i) * 3 * CHANNELS + column]);
      }
      for (int t = 0; t < T; ++t) {
        window[KEPT + t] = float(qkv[(batch * T + t) * 3 * CHANNELS + column]);
      }
      for (int t = 0; t < T; ++t) {
        float sum = 0.0f;
        for (int i = 0; i < WIDTH; ++i) {
          sum += window[t + i] * float(conv_weight[column * WIDTH + i]);
        }
        float y = sum / (1.0f + metal::exp(-sum));
        shared[(kind * T + t) * K + channel] = float(static_cast<X>(y));
      }
      for (int t = EVERY ? 0 : T - 1; t < T; ++t) {
        uint slot = EVERY ? batch * T + t : batch;
        for (int i = 0; i < KEPT; ++i) {
          conv_out[(slot * KEPT + i) * 3 * CHANNELS + column] =
              static_cast<X>(window[t + 1 + i]);
        }
      }
    } else {
      float rate = metal::exp(float(A_log[head]));
      for (int t = 0; t < T; ++t) {
        float g = float(gate[(batch * T + t) * CHANNELS + column])
            + float(dt_bias[column]);
        float log_decay;
        if (BOUNDED) {
          log_decay = lower_bound / (1.0f + metal::exp(-rate * g));
        } else {
          // softplus that neither overflows nor loses small values.
          float small = metal::exp(-metal::abs(g));
          float tail = small < 1e-4f ? small : metal::log(1.0f + small);
          log_decay = -rate * (metal::max(g, 0.0f) + tail);
        }
        decays[t * K + channel] = metal::exp(log_decay);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // L2 norm of each query and key, queries also scaled.
    for (uint i = simdgroup; i < 2 * T; i += SIMDGROUPS) {
      float total = 0.0f;
      for (uint c = lane; c < K; c += 32) {
        total += shared[i * K + c] * shared[i * K + c];
      }
      float factor = metal::rsqrt(simd_sum(total) + l2_eps);
      if (i < T) {
        factor *= metal::rsqrt(float(K));
      }
      for (uint c = lane; c < K; c += 32) {
        shared[i * K + c] *= factor;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint part = lane % 4;
    uint row = simdgroup * 8 + lane / 4;
    ulong in_head = ulong(row) * K + part * 4;
    float4 memory[QUADS];
    for (int j = 0; j < QUADS; ++j) {
      memory[j] = *(const device float4*)(
          state + (ulong(batch) * H + head) * K * K + in_head + j * 16);
    }
    for (int t = 0; t < T; ++t) {
      threadgroup const float4* query = shared_quads + t * K / 4 + part;
      threadgroup const float4* key = shared_quads + (T + t) * K / 4 + part;
      threadgroup const float4* decay = shared_quads + (3 * T + t) * K / 4 + part;
      float recalled = 0.0f;
      for (int j = 0; j < QUADS; ++j) {
        memory[j] *= decay[j * 4];
        recalled += metal::dot(memory[j], key[j * 4]);
      }
      recalled += simd_shuffle_xor(recalled, 1);
      recalled += simd_shuffle_xor(recalled, 2);
      float strength = float(beta[(batch * T + t) * H + head]);
      strength = 1.0f / (1.0f + metal::exp(-strength));
      float change = (values[t * K + row] - recalled) * strength;
      float read = 0.0f;
      for (int j = 0; j < QUADS; ++j) {
        memory[j] += change * key[j * 4];
        read += metal::dot(memory[j], query[j * 4]);
      }
      read += simd_shuffle_xor(read, 1);
      read += simd_shuffle_xor(read, 2);
      if (part == 0) {
        outputs[t * K + row] = read;
      }
      if (EVERY || t == T - 1) {
        ulong slot = EVERY ? batch * T + t : batch;
        for (int j = 0; j < QUADS; ++j) {
          *(device float4*)(
              state_out + (slot * H + head) * K * K + in_head + j * 16) = memory[j];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint t = simdgroup; t < T; t += SIMDGROUPS) {
      float total = 0.0f;
      for (uint c = lane; c < K; c += 32) {
        total += outputs[t * K + c] * outputs[t * K + c];
      }
      float factor = metal::rsqrt(simd_sum(total) / float(K) + norm_eps);
      for (uint c = lane; c < K; c += 32) {
        uint at = (batch * T + t) * CHANNELS + head * K + c;
        float y = outputs[t * K + c] * factor * float(norm_weight[c]);
        y /= 1.0f + metal::exp(-float(output_gate[at]));
        out[at] = static_cast<X>(y);
      }
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="kimi_k3_kda_decode",
        input_names=[
            "qkv",
            "gate",
            "beta",
            "output_gate",
            "conv_state",
            "state",
            "conv_weight",
            "A_log",
            "dt_bias",
            "norm_weight",
            "constants",
        ],
        output_names=["out", "conv_out", "state_out"],
        source=_SOURCE,
    )


def kda_decode_reference(
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
    *,
    every_state: bool = False,
    training: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`kda_decode` in MLX ops; also takes gradients."""

    def run(
        part: slice, conv_state: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        return kda_prefill(
            qkv[:, part],
            gate[:, part],
            beta[:, part],
            output_gate[:, part],
            conv_state,
            state,
            conv_weight,
            A_log,
            dt_bias,
            norm_weight,
            lower_bound,
            norm_eps,
            training=training,
        )

    T = qkv.shape[1]
    if not every_state:
        return run(slice(0, T), conv_state, state)
    outs, conv_states, states = [], [], []
    for t in range(T):
        out, conv_state, state = run(slice(t, t + 1), conv_state, state)
        outs.append(out)
        conv_states.append(conv_state)
        states.append(state)
    return (
        mx.concatenate(outs, axis=1),
        mx.stack(conv_states, axis=1),
        mx.stack(states, axis=1),
    )


def kda_decode(
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
    *,
    every_state: bool = False,
    training: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """As :func:`.kda_prefill.kda_prefill` without padding, in one launch if it fits.

    Args:
        every_state: return the states after each token and not only after the last:
            conv states (B, T, width - 1, 3·H·K) and recurrent ones (B, T, H, K, K).
        training: take the form that has a gradient.

    The kernel takes up to 8 tokens of heads of 32, 64, 96 or 128, and states of the
    types that the model itself writes.
    """
    B, T, channels = qkv.shape
    H, width = A_log.shape[0], conv_weight.shape[1]
    K = channels // (3 * H)
    fits = (
        K % 32 == 0
        and K <= MAX_HEAD_DIM
        and 0 < T <= MAX_TOKENS
        and width > 1
        and conv_state.dtype == qkv.dtype
        and state.dtype == mx.float32
    )
    if training or not fits or not _common.can_run_metal():
        return kda_decode_reference(
            qkv,
            gate,
            beta,
            output_gate,
            conv_state,
            state,
            conv_weight,
            A_log,
            dt_bias,
            norm_weight,
            lower_bound,
            norm_eps,
            every_state=every_state,
            training=training,
        )
    constants = _common.constants(lower_bound or 0.0, norm_eps, L2_NORM_EPS)
    blocks = (B, T) if every_state else (B,)
    out, conv_out, state_out = _kernel()(
        inputs=[
            qkv,
            gate,
            beta,
            output_gate,
            conv_state,
            state,
            conv_weight,
            A_log,
            dt_bias,
            norm_weight,
            constants,
        ],
        template=[
            ("X", qkv.dtype),
            ("H", H),
            ("K", K),
            ("T", T),
            ("WIDTH", width),
            ("BOUNDED", lower_bound is not None),
            ("EVERY", every_state),
        ],
        grid=(4 * K, H, B),
        threadgroup=(4 * K, 1, 1),
        output_shapes=[
            (B, T, H * K),
            (*blocks, width - 1, channels),
            (*blocks, H, K, K),
        ],
        output_dtypes=[qkv.dtype, qkv.dtype, mx.float32],
    )
    return out, conv_out, state_out


def example(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments at Kimi K3's shape: one token, 96 heads of 128, all of them different."""
    H, K, width, model = 96, 128, 4, mx.bfloat16
    channels = H * K

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    return {
        "qkv": normal(1, 1, 3 * channels).astype(model),
        "gate": normal(1, 1, channels).astype(model),
        "beta": normal(1, 1, H).astype(model),
        "output_gate": normal(1, 1, channels).astype(model),
        "conv_state": normal(1, width - 1, 3 * channels).astype(model),
        "state": normal(1, H, K, K),
        "conv_weight": 0.5 * normal(3 * channels, width, 1),
        "A_log": normal(H),
        "dt_bias": normal(channels),
        "norm_weight": 1 + 0.1 * normal(K),
        "lower_bound": -5.0,
        "norm_eps": 1e-5,
    }
