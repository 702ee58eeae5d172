"""Stable LatentMoE: a float32 router, experts in a latent space, shared experts.

Reference: ``KimiSparseMoeBlock`` in Moonshot's ``modeling_kimi_linear.py``.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from ..config import TextArgs
from ..kernels._common import compiled_on_gpu
from ..kernels.router_logits import router_logits
from ..kernels.select_experts import select_experts
from .expert_banks import make_experts
from .expert_top_p import keep_top_p
from .mlp import MLP


class Router(nn.Module):
    """Scores every expert in float32, whatever dtype the weight is stored in.

    Not an ``nn.Linear``: neither LoRA nor a quantisation entry may change it. It takes
    a quantisation entry of a config and stays what it is.
    """

    def __init__(self, hidden_size: int, experts: int):
        super().__init__()
        self.weight = mx.random.normal((experts, hidden_size)) * hidden_size**-0.5

    def __call__(self, x: mx.array) -> mx.array:
        """(..., D) → logits (..., E), float32."""
        return router_logits(x, self.weight, training=self.training)

    def to_quantized(self, *_: object, **__: object) -> "Router":
        """The router itself: it is never quantised."""
        return self


@compiled_on_gpu
def _sum(residual: mx.array, routed: mx.array, shared: mx.array) -> mx.array:
    return residual + (routed + shared)


class LatentMoE(nn.Module):
    """``up(norm(Σ w·expert(down(x)))) + shared(x)``, (B, T, D) → (B, T, D).

    A ``residual`` that is given is added too: on a GPU that is no launch more.
    """

    def __init__(self, args: TextArgs, layer: int):
        super().__init__()
        hidden, width = args.hidden_size, args.expert_hidden_size
        self.args = args
        self.has_latent = args.routed_expert_hidden_size is not None
        self.has_norm = self.has_latent and args.latent_moe_use_norm
        experts = args.experts_in_layer(layer)
        self.gate = Router(hidden, experts)
        self.e_score_correction_bias = mx.zeros((experts,), dtype=mx.float32)
        self.switch_mlp = make_experts(args, layer)
        if self.has_latent:
            self.routed_expert_down_proj = nn.Linear(hidden, width, bias=False)
            self.routed_expert_up_proj = nn.Linear(width, hidden, bias=False)
        if self.has_norm:
            self.routed_expert_norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if args.num_shared_experts:
            inner = args.moe_intermediate_size * args.num_shared_experts
            self.shared_experts = MLP(args, inner)
        self.sharding_group: mx.distributed.Group | None = None

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Expert ids and combine weights of each token, (B, T, K), weights float32."""
        args = self.args
        ids, weights = select_experts(
            self.gate(x),
            self.e_score_correction_bias,
            args.num_experts_per_token,
            args.num_expert_group,
            args.topk_group,
            args.moe_renormalize,
            args.routed_scaling_factor,
            training=self.training,
        )
        if args.expert_top_p is not None:
            weights = keep_top_p(weights, args.expert_top_p)
        return ids, weights

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        if self.sharding_group is not None:
            x = sum_gradients(self.sharding_group)(x)  # pyright: ignore[reportCallIssue]
        ids, weights = self.route(x)
        latent = self.routed_expert_down_proj(x) if self.has_latent else x
        routed = self.switch_mlp.combine(latent, ids, weights)
        shared = self.shared_experts(x) if "shared_experts" in self else None
        routed, shared = self._reduce(routed, shared)
        if self.has_norm:
            routed = self.routed_expert_norm(routed)
        if self.has_latent:
            routed = self.routed_expert_up_proj(routed)
        if shared is None:
            return routed if residual is None else residual + routed
        return routed + shared if residual is None else _sum(residual, routed, shared)

    def _reduce(
        self, routed: mx.array, shared: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Sum the ranks' parts, in one message, before the norm, which is not linear."""
        group = self.sharding_group
        if group is None:
            return routed, shared
        if shared is None:
            return mx.distributed.all_sum(routed, group=group), None
        both = mx.concatenate([routed, shared], axis=-1)
        both = mx.distributed.all_sum(both, group=group)
        routed, shared = mx.split(both, [routed.shape[-1]], axis=-1)
        return routed, shared
