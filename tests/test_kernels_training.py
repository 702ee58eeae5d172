"""Training takes the references, which have gradients, also where kernels can run."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tiny_k3 import t0_model

TOKENS = mx.array([[3, 141, 59, 26, 5]])


def gradients(model: nn.Module) -> dict[str, mx.array]:
    def loss(model: Any) -> mx.array:
        return model(TOKENS).square().mean()

    _, grads = nn.value_and_grad(model, loss)(model)
    mx.eval(grads)
    return dict(tree_flatten(grads))


def test_training_runs_no_kernel(simulated_kernels: Callable[..., Any]) -> None:
    model = t0_model()
    model.train()
    with simulated_kernels() as launches:
        found = gradients(model)
    assert not launches.records
    assert all(mx.isfinite(grad).all() for grad in found.values())
    still = {name for name, grad in found.items() if not mx.abs(grad).max()}
    # The bias only chooses; the first layer has nothing to mix.
    unused = ("e_score_correction_bias", "layers.0.self_attention_res_")
    assert all(any(name in one for name in unused) for one in still)


def test_inference_runs_kernels(simulated_kernels: Callable[..., Any]) -> None:
    """Control: the same model in evaluation mode."""
    model = t0_model()
    with simulated_kernels() as launches:
        mx.eval(model(TOKENS))
    assert {"kimi_k3_kda_decode", "kimi_k3_attention_residual_mix"} <= launches.names
    assert {"kimi_k3_router_logits", "kimi_k3_select_experts"} <= launches.names
