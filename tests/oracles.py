"""Float64 truth, part 1: the small functions a Kimi K3 layer is made of.

The oracles (this file and ``oracle_*.py``) are plain NumPy, one token sequence at a
time without a batch axis, and share no code with the package. They take tensors under
the names of Moonshot's source checkpoint and the raw ``text_config``.
"""

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), written so that no large x overflows."""
    return np.exp(-np.logaddexp(0.0, -x))


def softplus(x: Array) -> Array:
    """log(1 + e^x)."""
    return np.logaddexp(0.0, x)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Array, axis: int = -1) -> Array:
    """e^x normalised to sum 1 along ``axis``; -inf gives 0."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def linear(x: Array, weight: Array) -> Array:
    """x [..., in] times the transposed weight [out, in]."""
    return x @ weight.T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def l2_normalise(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps): epsilon joins the sum, not the mean."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)


def situ(gate: Array, up: Array, beta: float, linear_beta: float | None) -> Array:
    """SiTU-GLU: a tanh-capped SiLU of ``gate`` times a tanh-capped ``up``."""
    if linear_beta is not None:
        up = linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * up


def mlp(x: Array, weights: dict[str, Array], prefix: str, config: dict) -> Array:
    """Dense or shared SiTU MLP with gate_proj, up_proj and down_proj."""
    gate = linear(x, weights[f"{prefix}gate_proj.weight"])
    up = linear(x, weights[f"{prefix}up_proj.weight"])
    beta = config["activation_situ_beta"]
    hidden = situ(gate, up, beta, config["activation_situ_linear_beta"])
    return linear(hidden, weights[f"{prefix}down_proj.weight"])
