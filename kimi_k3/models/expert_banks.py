"""The routed experts of one layer, in one bank or in two of different bit widths."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..config import TextArgs
from ..kernels._common import can_run_metal, runs_on_cpu
from ..kernels._quantized_rows import BankedMatrix, ExpertMatrix
from ..kernels.expert_down_combine import expert_down_combine, reads_down
from ..kernels.expert_gate_up import expert_gate_up, reads_gate_up
from ..kernels.situ import situ
from .routed_pairs import (
    GROUPED_FROM_PAIRS_PER_EXPERT,
    SORT_FROM_PAIRS,
    Bank,
    run_gathered,
    run_partitioned,
    run_sorted,
    should_partition,
)


class RoutedExperts(nn.Module):
    """What one bank and two banks have in common: the way from pairs to a sum."""

    def __init__(self, args: TextArgs, experts: int):
        super().__init__()
        self.experts = experts
        self.beta = args.activation_situ_beta
        self.linear_beta = args.activation_situ_linear_beta
        self.skips = args.expert_top_p is not None
        self.weights_per_matrix = args.expert_hidden_size * args.moe_intermediate_size

    def banks(self) -> list[tuple["ExpertBank", int]]:
        """The banks in the order of the expert ids, each with its size."""
        raise NotImplementedError

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array:
        """Run each row of ``x`` (..., 1, D) through the expert of its id (...)."""
        raise NotImplementedError

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """(..., D) and expert ids (..., K) → (..., K, D)."""
        return self._run(x, ids, None)

    def combine(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum of a token's experts, each times its weight.

        Args:
            x: (..., D).
            ids: expert ids, (..., K).
            weights: routing weights, (..., K), float32. A slot of weight 0 adds nothing.

        Returns:
            (..., D) in ``x``'s dtype, summed in float32.
        """
        few = ids.size < GROUPED_FROM_PAIRS_PER_EXPERT * self.experts
        if few and not self.training and can_run_metal():
            matrices = [self._banked(n) for n in ("gate_proj", "up_proj", "down_proj")]
            combined = self._combine_few(x, ids, weights, matrices)
            if combined is not None:
                return combined
        used = weights != 0 if self.skips else None
        routed = self._run(x, ids, used)
        return (routed * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def _banked(self, projection: str) -> BankedMatrix | None:
        """``projection`` of all banks; None where a module is more than its matrix."""
        matrices = [stored_matrix(bank[projection]) for bank, _ in self.banks()]
        high, low = matrices[0], matrices[-1]
        if high is None or low is None:
            return None
        if len(matrices) == 1:
            return BankedMatrix(high, None, self.experts)
        return BankedMatrix(high, low, self.banks()[0][1])

    def _combine_few(
        self,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        matrices: list[BankedMatrix | None],
    ) -> mx.array | None:
        """:meth:`combine` in two launches; None where they cannot read a matrix."""
        gate, up, down = matrices
        if gate is None or up is None or down is None:
            return None
        tokens, slots = x.reshape(-1, x.shape[-1]), (-1, ids.shape[-1])
        if not (reads_gate_up(tokens, gate, up) and reads_down(down, x.dtype)):
            return None
        ids, weights = ids.reshape(slots), weights.reshape(slots)
        hidden = expert_gate_up(
            tokens,
            ids,
            weights,
            gate,
            up,
            beta=self.beta,
            linear_beta=self.linear_beta,
        )
        return expert_down_combine(hidden, ids, weights, down, x.dtype).reshape(x.shape)

    def _run(self, x: mx.array, ids: mx.array, used: mx.array | None) -> mx.array:
        ids = mx.stop_gradient(ids)
        if runs_on_cpu():
            # The CPU's expert matmuls are exact and fast on float32 activations only.
            x = x.astype(mx.float32)
        banks: list[tuple[Bank, int]] = [(bank, size) for bank, size in self.banks()]
        # The trainer compiles its step, and nothing can be read from a traced array.
        if not self.training and should_partition(
            ids.size,
            self.weights_per_matrix,
            self.experts,
            two_banks=len(banks) > 1,
            skips=used is not None,
        ):
            return run_partitioned(banks, x, ids, used)
        run = run_gathered if ids.size < SORT_FROM_PAIRS else run_sorted
        return run(self, x, ids)


class ExpertBank(RoutedExperts):
    """Experts stored at one bit width, (E, out, in) a matrix."""

    def __init__(self, args: TextArgs, experts: int):
        super().__init__(args, experts)
        width, inner = args.expert_hidden_size, args.moe_intermediate_size
        self.gate_proj = SwitchLinear(width, inner, experts, bias=False)
        self.up_proj = SwitchLinear(width, inner, experts, bias=False)
        self.down_proj = SwitchLinear(inner, width, experts, bias=False)

    def banks(self) -> list[tuple["ExpertBank", int]]:
        return [(self, self.experts)]

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array:
        up = self.up_proj(x, ids, sorted_indices=is_sorted)
        gate = self.gate_proj(x, ids, sorted_indices=is_sorted)
        hidden = situ(gate, up, self.beta, self.linear_beta)
        return self.down_proj(hidden, ids, sorted_indices=is_sorted)


class TwoBankSwitchGLU(RoutedExperts):
    """Experts ``[0, split)`` in ``bank_hi``, the rest in ``bank_lo``."""

    def __init__(self, args: TextArgs, experts: int, split: int):
        super().__init__(args, experts)
        self.split = split
        self.bank_hi = ExpertBank(args, split)
        self.bank_lo = ExpertBank(args, experts - split)

    def banks(self) -> list[tuple[ExpertBank, int]]:
        both = (self.bank_hi, self.split), (self.bank_lo, self.experts - self.split)
        return [(bank, size) for bank, size in both if size]

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array:
        """As :meth:`ExpertBank.run_pairs`.

        Both banks run every pair, ids out of a bank's range clamped to its edge, and
        the right result is picked on the device: nothing waits for the ids.
        """
        if len(self.banks()) == 1:
            return self.banks()[0][0].run_pairs(x, ids, is_sorted)
        ids = ids.astype(mx.int32)
        high = self.bank_hi.run_pairs(x, mx.minimum(ids, self.split - 1), is_sorted)
        low = self.bank_lo.run_pairs(x, mx.maximum(ids - self.split, 0), is_sorted)
        return mx.where((ids < self.split)[..., None, None], high, low)


def stored_matrix(projection: nn.Module) -> ExpertMatrix | None:
    """The matrix of ``projection``; None if it computes more, as an adapter does."""
    if "bias" in projection:
        return None
    if type(projection) is SwitchLinear:
        return ExpertMatrix(projection.weight)
    if type(projection) is not QuantizedSwitchLinear:
        return None
    if projection.get("global_scale") is not None:
        return None
    return ExpertMatrix(
        projection.weight,
        projection.scales,
        projection.get("biases"),
        projection.mode,
        projection.bits,
        projection.group_size,
    )


def make_experts(args: TextArgs, layer: int) -> ExpertBank | TwoBankSwitchGLU:
    """The routed experts of 0-based ``layer``, as its config stores them."""
    experts, split = args.experts_in_layer(layer), args.bank_split(layer)
    if split:
        return TwoBankSwitchGLU(args, experts, split)
    return ExpertBank(args, experts)
