"""Tensor parallelism: each rank keeps a slice of every head, expert and MLP."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear

from ..config import TextArgs
from ..errors import DistributedError
from .expert_banks import ExpertBank, TwoBankSwitchGLU
from .kda import KimiDeltaAttention
from .latent_moe import LatentMoE
from .mla import GatedMLA
from .mlp import MLP


def check_divisible(args: TextArgs, ranks: int) -> None:
    """Raise DistributedError unless ``ranks`` divides every sliced dimension."""
    dimensions = {
        "linear_attn_config.num_heads": args.linear_attn_config.num_heads,
        "num_attention_heads": args.num_attention_heads,
        "intermediate_size": args.intermediate_size,
    }
    if args.num_experts:
        dimensions["moe_intermediate_size"] = args.moe_intermediate_size
    for name, size in dimensions.items():
        if size % ranks:
            working = [
                n
                for n in range(1, min(dimensions.values()) + 1)
                if all(value % n == 0 for value in dimensions.values())
            ]
            raise DistributedError(
                f"{name} is {size}, which {ranks} ranks do not divide; this model splits "
                f"over {', '.join(map(str, working[:8]))} ranks."
            )


def shard_layers(
    layers: list[Any], args: TextArgs, group: mx.distributed.Group
) -> None:
    """Replace the weights of ``layers`` by this rank's slices, in place."""
    check_divisible(args, group.size())
    for layer in layers:
        if layer.is_linear:
            _shard_kda(layer.self_attn, group)
        else:
            _shard_mla(layer.self_attn, group)
        if isinstance(layer.mlp, LatentMoE):
            _shard_moe(layer.mlp, group)
        else:
            _shard_mlp(layer.mlp, group)


def shard_head(head: nn.Module, group: mx.distributed.Group) -> nn.Module:
    """This rank's rows of the vocabulary; the head itself if ranks do not divide it."""
    if head["weight"].shape[0] % group.size():
        return head
    return GatheredHead(shard_linear(head, "all-to-sharded", group=group), group)


class GatheredHead(nn.Module):
    """A head of which each rank multiplies its own rows of the vocabulary."""

    def __init__(self, own: nn.Module, group: mx.distributed.Group):
        super().__init__()
        self.own = own
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        """(B, T, D) → logits of all ranks, (B, T, vocab)."""
        # Ranks are gathered along the first axis.
        own = self.own(x).transpose(2, 0, 1)
        return mx.distributed.all_gather(own, group=self._group).transpose(1, 2, 0)


def _shard_kda(attn: KimiDeltaAttention, group: mx.distributed.Group) -> None:
    heads, dim = attn.num_heads // group.size(), attn.head_dim
    first = group.rank() * heads
    attn.qkv_proj = shard_linear(
        attn.qkv_proj, "all-to-sharded", segments=3, group=group
    )
    for name in ("f_b_proj", "b_proj", "g_proj", "g_b_proj"):
        if name in attn:
            attn[name] = shard_linear(attn[name], "all-to-sharded", group=group)
    attn.o_proj = shard_linear(attn.o_proj, "sharded-to-all", group=group)

    conv = attn.qkv_conv.conv
    parts = conv.weight.reshape(3, attn.num_heads, dim, *conv.weight.shape[1:])
    conv.weight = mx.contiguous(
        parts[:, first : first + heads].reshape(-1, *conv.weight.shape[1:])
    )
    attn.A_log = attn.A_log[first : first + heads]
    attn.dt_bias = attn.dt_bias[first * dim : (first + heads) * dim]
    attn.num_heads = heads


def _shard_mla(attn: GatedMLA, group: mx.distributed.Group) -> None:
    for name in ("q_b_proj", "q_proj", "g_proj"):
        if name in attn:
            attn[name] = shard_linear(attn[name], "all-to-sharded", group=group)
    attn.o_proj = shard_linear(attn.o_proj, "sharded-to-all", group=group)
    attn.num_heads //= group.size()
    first = group.rank() * attn.num_heads

    def own_heads(weight: mx.array) -> mx.array:
        return weight[first : first + attn.num_heads]

    attn.embed_q.apply(own_heads)
    attn.unembed_out.apply(own_heads)


def _shard_moe(moe: LatentMoE, group: mx.distributed.Group) -> None:
    moe.sharding_group = group
    experts = moe.switch_mlp
    banks: list[ExpertBank] = (
        [experts.bank_hi, experts.bank_lo]
        if isinstance(experts, TwoBankSwitchGLU)
        else [experts]
    )
    for part in [*banks, moe.get("shared_experts")]:
        if part is None:
            continue
        for name in ("gate_proj", "up_proj"):
            shard_inplace(part[name], "all-to-sharded", group=group)
        _shard_inputs(part.down_proj, group)


def _shard_inputs(down: nn.Module, group: mx.distributed.Group) -> None:
    """Slice a down projection along its inputs, whole quantisation groups only."""
    scales = down.get("scales")
    if scales is not None and scales.shape[-1] % group.size():
        raise DistributedError(
            f"a down projection has {scales.shape[-1]} quantisation groups a row, which "
            f"{group.size()} ranks do not divide; use a number of ranks that does."
        )
    shard_inplace(down, "sharded-to-all", group=group)


def _shard_mlp(mlp: MLP, group: mx.distributed.Group) -> None:
    for name in ("gate_proj", "up_proj"):
        mlp[name] = shard_linear(mlp[name], "all-to-sharded", group=group)
    mlp.down_proj = shard_linear(mlp.down_proj, "sharded-to-all", group=group)
