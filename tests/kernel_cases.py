"""The smallest arguments at which every kernel of the package is right or wrong.

Sizes leave a ragged edge where a kernel has one; values differ in every place.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from expert_matrices import bank_pair

from kimi_k3.kernels import attention_residual_mix


def normal(*shape: int, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal(shape, np.float32))


#: Six experts, three in each bank, among them the last of both; 63 is no multiple of 4.
SLOTS: dict[str, Any] = {
    "ids": mx.array([[0, 2, 3, 5]]),
    "weights": mx.array([[0.4, 0.3, 0.2, 0.1]]),
}


def gate_up() -> dict[str, Any]:
    banks = [bank_pair("mxfp4", "affine2-64", 3, 6, 63, 64, seed=s) for s in (1, 2)]
    named = {"gate": banks[0], "up": banks[1], "beta": 4.0, "linear_beta": 25.0}
    return {"x": 3 * normal(1, 64), **SLOTS, **named}


def down() -> dict[str, Any]:
    bank = bank_pair("mxfp4", "affine2-64", 3, 6, 63, 64, seed=3)
    return {"hidden": normal(1, 4, 64), **SLOTS, "down": bank, "dtype": mx.float32}


def mix() -> dict[str, Any]:
    """The example in float32, cut to 512 channels: TSan follows 255 threads at most."""
    given = attention_residual_mix.example(np.random.default_rng(0))
    for name, value in given.items():
        if isinstance(value, mx.array):
            given[name] = value[..., :512].astype(mx.float32)
    given["blocks_inverse_rms"] = attention_residual_mix.inverse_rms(
        given["blocks"], given["eps"]
    )
    return given


def logits() -> dict[str, Any]:
    return {"x": normal(1, 1, 64), "weight": normal(33, 64, seed=1)}


def choice() -> dict[str, Any]:
    return {
        "logits": normal(1, 2, 33),
        "correction_bias": normal(33, seed=1),
        "top_k": 4,
        "groups": 1,
        "top_groups": 1,
        "renormalize": True,
        "scale": 1.0,
    }


def decode() -> dict[str, Any]:
    H, K, T, width = 2, 32, 3, 4
    return {
        "qkv": normal(1, T, 3 * H * K),
        "gate": normal(1, T, H * K, seed=1),
        "beta": normal(1, T, H, seed=2),
        "output_gate": normal(1, T, H * K, seed=3),
        "conv_state": normal(1, width - 1, 3 * H * K, seed=4),
        "state": normal(1, H, K, K, seed=5),
        "conv_weight": normal(3 * H * K, width, 1, seed=6),
        "A_log": normal(H, seed=7),
        "dt_bias": normal(H * K, seed=8),
        "norm_weight": normal(K, seed=9),
        "lower_bound": -5.0,
        "norm_eps": 1e-5,
    }


def recurrence() -> dict[str, Any]:
    B, T, H, K = 1, 3, 2, 32
    return {
        "query": 0.1 * normal(B, T, H, K),
        "key": 0.1 * normal(B, T, H, K, seed=1),
        "value": normal(B, T, H, K, seed=2),
        "log_decay": -mx.abs(normal(B, T, H, K, seed=3)),
        "beta": mx.sigmoid(normal(B, T, H, seed=4)),
        "state": normal(B, H, K, K, seed=5),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "expert_gate_up": gate_up,
    "expert_down_combine": down,
    "attention_residual_mix": mix,
    "router_logits": logits,
    "select_experts": choice,
    "kda_decode": decode,
    "kda_recurrence": recurrence,
}
