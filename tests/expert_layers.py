"""Small layers of routed experts, their float64 truth, and what to feed them."""

from typing import Any

import mlx.core as mx
import numpy as np
from closeness import to_numpy
from oracles import situ
from tiny_k3 import t0_config

from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.models import TwoBankSwitchGLU
from kimi_k3.models.expert_banks import ExpertBank, RoutedExperts

WIDTH, INNER, EXPERTS = 64, 96, 12
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

WIDTHS: dict[str, dict[str, Any] | None] = {
    "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
    "affine2": {"mode": "affine", "bits": 2, "group_size": 32},
    "affine3": {"mode": "affine", "bits": 3, "group_size": 32},
    "affine6": {"mode": "affine", "bits": 6, "group_size": 32},
    "dense": None,
}


def text_args(**text: Any) -> TextArgs:
    sizes = {"routed_expert_hidden_size": WIDTH, "moe_intermediate_size": INNER}
    return ModelArgs.from_dict(t0_config(**sizes, **text)).text_config


def quantize(bank: ExpertBank, width: str) -> None:
    if settings := WIDTHS[width]:
        for name in PROJECTIONS:
            bank[name] = bank[name].to_quantized(**settings)


def two_banks(
    split: int, high: str = "mxfp4", low: str = "affine2", **text: Any
) -> TwoBankSwitchGLU:
    mx.random.seed(split)
    experts = TwoBankSwitchGLU(text_args(**text), EXPERTS, split)
    quantize(experts.bank_hi, high if split else "dense")
    quantize(experts.bank_lo, low if split < EXPERTS else "dense")
    return experts.eval()  # pyright: ignore[reportReturnType]


def stored_values(bank: ExpertBank, projection: str) -> np.ndarray:
    layer = bank[projection]
    if "scales" not in layer:
        return to_numpy(layer.weight).astype(np.float64)
    settings = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    values = mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), dtype=mx.float32, **settings
    )
    return to_numpy(values).astype(np.float64)


def truth(experts: RoutedExperts, x: mx.array, ids: mx.array) -> np.ndarray:
    """Every pair through its own expert, float64 (..., K, D)."""
    gates, ups, downs = (
        np.concatenate([stored_values(bank, name) for bank, _ in experts.banks()])
        for name in PROJECTIONS
    )
    rows = to_numpy(x).astype(np.float64).reshape(-1, x.shape[-1])
    slots = to_numpy(ids).reshape(-1, ids.shape[-1])
    out = [
        [
            downs[e] @ situ(gates[e] @ row, ups[e] @ row, experts.beta, 25.0)
            for e in chosen
        ]
        for row, chosen in zip(rows, slots, strict=True)
    ]
    return np.array(out).reshape(*ids.shape, -1)


def problem(tokens: int, slots: int = 4) -> tuple[mx.array, mx.array, mx.array]:
    """Activations, ids with repeats, and weights with some zeros."""
    keys = mx.random.split(mx.random.key(tokens), 3)
    x = mx.random.normal((1, tokens, WIDTH), key=keys[0])
    ids = mx.random.randint(0, EXPERTS, (1, tokens, slots), key=keys[1])
    weights = mx.random.uniform(shape=(1, tokens, slots), key=keys[2])
    return x, ids.astype(mx.uint32), mx.where(weights < 0.2, 0.0, weights)
