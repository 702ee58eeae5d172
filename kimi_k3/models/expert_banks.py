"""The routed experts of one layer, in one bank or in two of different bit widths."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from ..config import TextArgs
from ..kernels._common import runs_on_cpu
from ..kernels.situ import situ

#: From this many routed pairs on, pairs are sorted by expert before the matmuls.
SORT_FROM_PAIRS = 64


class ExpertBank(nn.Module):
    """Experts stored at one bit width, (E, out, in) a matrix."""

    def __init__(self, args: TextArgs, experts: int):
        super().__init__()
        width, inner = args.expert_hidden_size, args.moe_intermediate_size
        self.beta = args.activation_situ_beta
        self.linear_beta = args.activation_situ_linear_beta
        self.gate_proj = SwitchLinear(width, inner, experts, bias=False)
        self.up_proj = SwitchLinear(width, inner, experts, bias=False)
        self.down_proj = SwitchLinear(inner, width, experts, bias=False)

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array:
        """Run each row of ``x`` (..., 1, D) through the expert of its id (...)."""
        up = self.up_proj(x, ids, sorted_indices=is_sorted)
        gate = self.gate_proj(x, ids, sorted_indices=is_sorted)
        hidden = situ(gate, up, self.beta, self.linear_beta)
        return self.down_proj(hidden, ids, sorted_indices=is_sorted)

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """(..., D) and expert ids (..., K) → (..., K, D)."""
        return _run_routed(self, x, ids)


class TwoBankSwitchGLU(nn.Module):
    """Experts ``[0, split)`` in ``bank_hi``, the rest in ``bank_lo``."""

    def __init__(self, args: TextArgs, experts: int, split: int):
        super().__init__()
        self.split = split
        self.bank_hi = ExpertBank(args, split)
        self.bank_lo = ExpertBank(args, experts - split)

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array:
        """As :meth:`ExpertBank.run_pairs`.

        Both banks run every pair, ids out of a bank's range clamped to its edge, and
        the right result is picked on the device: nothing waits for the ids.
        """
        ids = ids.astype(mx.int32)
        high = self.bank_hi.run_pairs(x, mx.minimum(ids, self.split - 1), is_sorted)
        low = self.bank_lo.run_pairs(x, mx.maximum(ids - self.split, 0), is_sorted)
        return mx.where((ids < self.split)[..., None, None], high, low)

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """(..., D) and expert ids (..., K) → (..., K, D)."""
        return _run_routed(self, x, ids)


def make_experts(args: TextArgs, layer: int) -> ExpertBank | TwoBankSwitchGLU:
    """The routed experts of 0-based ``layer``, as its config stores them."""
    experts, split = args.experts_in_layer(layer), args.bank_split(layer)
    if split:
        return TwoBankSwitchGLU(args, experts, split)
    return ExpertBank(args, experts)


def _run_routed(
    experts: ExpertBank | TwoBankSwitchGLU, x: mx.array, ids: mx.array
) -> mx.array:
    """Give every routed pair a row, sorted by expert where that pays."""
    ids = mx.stop_gradient(ids)
    if runs_on_cpu():
        # The CPU's expert matmuls are exact and fast on float32 activations only.
        x = x.astype(mx.float32)
    if ids.size < SORT_FROM_PAIRS:
        return experts.run_pairs(x[..., None, None, :], ids, False).squeeze(-2)

    per_token = ids.shape[-1]
    order = mx.argsort(ids.flatten())
    rows = x.reshape(-1, x.shape[-1])[order // per_token]
    out = experts.run_pairs(rows[:, None], ids.flatten()[order], True)
    out = out.squeeze(-2)[mx.argsort(order)]
    return out.reshape(*ids.shape, -1)
