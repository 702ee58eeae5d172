"""Float64 truth, part 3: Kimi Delta Attention, one sequence, token by token."""

from dataclasses import dataclass

import numpy as np
from oracles import l2_normalise, linear, rms_norm, sigmoid, silu, softplus

Array = np.ndarray


@dataclass
class KdaState:
    """What a KDA layer carries on: ``conv`` [3, W-1, P], ``recurrent`` [H, K, V].

    ``conv`` holds the last W-1 inputs of the q, k and v convolutions, newest last.
    """

    conv: Array
    recurrent: Array

    @classmethod
    def empty(cls, linear_config: dict) -> "KdaState":
        heads, size = linear_config["num_heads"], linear_config["head_dim"]
        window = linear_config["short_conv_kernel_size"] - 1
        return cls(np.zeros((3, window, heads * size)), np.zeros((heads, size, size)))


def short_convolution(x: Array, weight: Array, tail: Array) -> tuple[Array, Array]:
    """SiLU of a causal depthwise convolution, and the new tail.

    x [T, P]; weight [P, W], its last column meets the newest token; tail [W-1, P] are
    the inputs before x.
    """
    window = weight.shape[1]
    padded = np.concatenate([tail, x])
    out = sum(padded[j : j + len(x)] * weight[:, j] for j in range(window))
    return silu(np.asarray(out)), padded[len(padded) - (window - 1) :]


def log_decay(
    raw: Array, A_log: Array, dt_bias: Array, lower_bound: float | None
) -> Array:
    """Log of the forget gate, [T, H, K], never above 0.

    raw [T, H, K]; A_log has one value per head, entries past H are padding; dt_bias
    [H*K] has one value per head and channel. A lower bound scales a sigmoid, without
    one the gate is Mamba's softplus form.
    """
    heads, size = raw.shape[-2:]
    rate = np.exp(A_log.reshape(-1)[:heads])[:, None]
    shifted = raw + dt_bias.reshape(heads, size)
    if lower_bound is None:
        return -rate * softplus(shifted)
    return lower_bound * sigmoid(rate * shifted)


def delta_rule(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule: outputs [T, H, V] and the last state [H, K, V].

    q, k [T, H, K] are normalised (and q scaled), v [T, H, V], decay [T, H, K] lies in
    (0, 1], beta [T, H]. The state forgets, then moves what it returns for k towards v.
    """
    outputs = []
    for t in range(len(q)):
        state = decay[t][:, :, None] * state
        returned = np.einsum("hkv,hk->hv", state, k[t])
        error = beta[t][:, None] * (v[t] - returned)
        state = state + k[t][:, :, None] * error[:, None, :]
        outputs.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.array(outputs).reshape(v.shape), state


def kda(
    x: Array, weights: dict[str, Array], config: dict, state: KdaState | None = None
) -> tuple[Array, KdaState, dict[str, Array]]:
    """One KDA layer on x [T, hidden]: output, the state afterwards, its insides.

    ``weights`` holds the layer's ``self_attn`` tensors by their last names. The insides
    are named as in the golden files: q and k before they are normalised.
    """
    linear_config = config["linear_attn_config"]
    heads, size = linear_config["num_heads"], linear_config["head_dim"]
    state = state or KdaState.empty(linear_config)

    def per_head(y: Array) -> Array:
        return y.reshape(len(x), heads, size)

    mixed, tails = {}, []
    for name, tail in zip("qkv", state.conv, strict=True):
        projected = linear(x, weights[f"{name}_proj.weight"])
        kernel = weights[f"{name}_conv1d.weight"][:, 0, :]
        y, tail = short_convolution(projected, kernel, tail)
        mixed[name] = per_head(y)
        tails.append(tail)

    raw = linear(linear(x, weights["f_a_proj.weight"]), weights["f_b_proj.weight"])
    decay = log_decay(
        per_head(raw),
        weights["A_log"],
        weights["dt_bias"],
        linear_config.get("gate_lower_bound"),
    )
    beta = linear(x, weights["b_proj.weight"])
    o, recurrent = delta_rule(
        l2_normalise(mixed["q"]) * size**-0.5,
        l2_normalise(mixed["k"]),
        mixed["v"],
        np.exp(decay),
        sigmoid(beta),
        state.recurrent,
    )
    if linear_config["use_full_rank_gate"]:
        gate = linear(x, weights["g_proj.weight"])
    else:
        low = linear(x, weights["g_a_proj.weight"])
        gate = linear(low, weights["g_b_proj.weight"])
    normed = rms_norm(o, weights["o_norm.weight"], config["rms_norm_eps"])
    gated = (normed * sigmoid(per_head(gate))).reshape(len(x), -1)
    out = linear(gated, weights["o_proj.weight"])
    insides = {**mixed, "g_raw": per_head(raw), "beta_raw": beta, "g_log": decay}
    insides = {f"kda.{k}": v for k, v in {**insides, "o": o}.items()}
    return out, KdaState(np.stack(tails), recurrent), insides
