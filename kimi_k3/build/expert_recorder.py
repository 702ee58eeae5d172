"""Stands in for a layer's routed experts and records what each expert contributes.

Per corpus and expert, over the tokens that chose it, with g the weight that multiplies
the expert's output (never the score that selection is made by) and e that output, in
the latent space:

    count             tokens
    gate_sum          Σ g
    gate_square_sum   Σ g²
    reap_sum          Σ g·‖e‖                 (REAP, arXiv:2510.13999)
    relative_sum      Σ ‖g·e‖ / ‖Σ g·e‖       against the token's sum, whose scale the
                                              norm behind it cancels
    contribution_max  max g·‖e‖

Norms are taken on the device in float32; sums are float64 and in the order of the
tokens, so that they come out the same at every run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np

from ..errors import CalibrationError
from ..kernels._common import runs_on_cpu
from ..models.expert_banks import ExpertBank, RoutedExperts
from ..models.latent_moe import LatentMoE
from ..models.routed_pairs import run_rows
from .step_labels import PADDING, StepLabels

#: Tokens whose expert outputs are held at once: at Kimi K3's size 470 MB in float32.
CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class ExpertSums:
    """One layer's statistics, each (corpora, experts); see the module's table."""

    count: np.ndarray
    gate_sum: np.ndarray
    gate_square_sum: np.ndarray
    reap_sum: np.ndarray
    relative_sum: np.ndarray
    contribution_max: np.ndarray

    def __post_init__(self) -> None:
        shape = self.count.shape
        for name, array in self.arrays().items():
            wanted = np.int64 if name == "count" else np.float64
            if array.shape != shape or array.ndim != 2 or array.dtype != wanted:
                raise CalibrationError(
                    f"{name} is {array.dtype} {array.shape}, wanted "
                    f"{np.dtype(wanted)} {shape}."
                )

    @classmethod
    def zeros(cls, corpora: int, experts: int) -> "ExpertSums":
        """Sums over no token."""
        arrays = {f.name: np.zeros((corpora, experts)) for f in fields(cls)}
        return cls(**arrays | {"count": arrays["count"].astype(np.int64)})

    def arrays(self) -> dict[str, np.ndarray]:
        """The statistics by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a token and one of its experts, in the order of the experts."""

    order: np.ndarray  # (pairs,): place of each in the order of tokens and slots
    experts: np.ndarray  # (pairs,), ascending
    ends: np.ndarray  # (experts + 1,): pairs of expert e are [ends[e], ends[e + 1])

    @classmethod
    def sort(cls, ids: np.ndarray, experts: int) -> "_Pairs":
        flat = ids.reshape(-1).astype(np.int32)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        ends = np.searchsorted(flat[order], np.arange(experts + 1))
        return cls(order, flat[order], ends)

    def inverse(self) -> np.ndarray:
        """For tokens and slots in their order, the place of each pair here."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order), dtype=np.int32)
        return inverse


class ExpertRecorder:
    """``LatentMoE.switch_mlp`` for the time of a recording.

    :meth:`combine` gives what the experts' own gives, bit for bit on the CPU. Set
    :attr:`labels` before each step. ``latent_moment`` and ``inner_moment`` are Σ g²·x²
    of what an expert's gate and up, and its down matrix, read: (experts, width) and
    (experts, inner), float64, over all corpora; None without ``moments``.
    """

    def __init__(
        self,
        experts: RoutedExperts,
        corpora: int,
        *,
        moments: bool = True,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        if chunk_tokens < 1:
            raise CalibrationError(
                f"chunk_tokens is {chunk_tokens}; a chunk holds 1 token or more."
            )
        self.experts = experts
        self.chunk_tokens = chunk_tokens
        self.labels: StepLabels | None = None
        self.sums = ExpertSums.zeros(corpora, experts.experts)
        self.moments = moments
        self.latent_moment: np.ndarray | None = None
        self.inner_moment: np.ndarray | None = None

    def combine(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """As :meth:`RoutedExperts.combine`, (..., D) → (..., D), and recorded."""
        rows, slots = x.reshape(-1, x.shape[-1]), (-1, ids.shape[-1])
        ids, weights = ids.reshape(slots), weights.reshape(slots)
        if self.labels is None or len(self.labels.corpus) != len(rows):
            labels = 0 if self.labels is None else len(self.labels.corpus)
            raise CalibrationError(
                f"{len(rows)} tokens reach the experts with {labels} labels."
            )
        out = []
        for start in range(0, len(rows), self.chunk_tokens):
            cut = slice(start, start + self.chunk_tokens)
            corpus = self.labels.corpus[cut]
            out.append(self._chunk(rows[cut], ids[cut], weights[cut], corpus))
        combined = out[0] if len(out) == 1 else mx.concatenate(out)
        return combined.reshape(x.shape)

    def _chunk(
        self, x: mx.array, ids: mx.array, weights: mx.array, corpus: np.ndarray
    ) -> mx.array:
        """(n, D), ids and weights (n, K), corpora (n,) → (n, D), evaluated."""
        chosen, gates = np.array(ids), np.array(weights)
        if self.experts.skips:
            counted = (corpus[:, None] != PADDING) & (gates != 0)
        else:
            counted = np.broadcast_to(corpus[:, None] != PADDING, gates.shape)
        pairs = _Pairs.sort(chosen, self.experts.experts)
        routed, hidden = self._run(x, pairs, chosen.shape[-1])

        weighted = routed * weights[..., None]
        total = weighted.sum(axis=-2)
        combined = total.astype(x.dtype)
        norms, total_norms = _norms(routed), _norms(total)
        # The norms of the weighted outputs are g·‖e‖: a weight is never negative.
        arrays = [combined, norms, total_norms]
        if self.moments:
            squares = np.where(counted, gates, 0) ** 2
            arrays += self._moments(x, hidden, pairs, chosen, squares)
        mx.eval(*arrays)
        self._add(
            chosen, gates, np.array(norms), np.array(total_norms), corpus, counted
        )
        if self.moments:
            self._add_moments(*map(np.array, arrays[3:]))
        return combined

    def _run(
        self, x: mx.array, pairs: _Pairs, slots: int
    ) -> tuple[mx.array, list[mx.array]]:
        """Expert outputs (n, K, D), and of each bank what its down matrices read."""
        if runs_on_cpu():
            # As the experts' own way has it: exact and fast in float32 only.
            x = x.astype(mx.float32)
        tokens = pairs.order // slots
        parts, hidden, first = [], [], 0
        for bank, size in self.experts.banks():
            own = slice(pairs.ends[first], pairs.ends[first + size])
            if own.stop > own.start:
                ids = mx.array(pairs.experts[own] - first)
                with _watched_down(bank) as read:
                    parts.append(run_rows(bank, x[mx.array(tokens[own])], ids))
                hidden.append(read[0] if len(read) == 1 else mx.concatenate(read))
            first += size
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return out[mx.array(pairs.inverse())].reshape(len(x), slots, -1), hidden

    def _moments(
        self,
        x: mx.array,
        hidden: list[mx.array],
        pairs: _Pairs,
        chosen: np.ndarray,
        squares: np.ndarray,
    ) -> list[mx.array]:
        """Σ g²·x² of this chunk: (experts, width) and (experts, inner), float32."""
        experts = self.experts.experts
        per_token = np.zeros((experts, len(chosen)), np.float32)
        np.add.at(per_token, (chosen, np.arange(len(chosen))[:, None]), squares)
        latent = mx.array(per_token) @ mx.square(x.astype(mx.float32))
        read = hidden[0] if len(hidden) == 1 else mx.concatenate(hidden)
        inner = mx.segmented_mm(
            mx.array(squares.reshape(-1)[pairs.order])[None],
            mx.square(read.astype(mx.float32)),
            mx.array(np.stack([pairs.ends[:-1], pairs.ends[1:]], 1).astype(np.uint32)),
        )
        return [latent, inner.squeeze(1)]

    def _add(
        self,
        chosen: np.ndarray,
        gates: np.ndarray,
        norms: np.ndarray,
        total_norms: np.ndarray,
        corpus: np.ndarray,
        counted: np.ndarray,
    ) -> None:
        """Add the pairs that are ``counted``; arrays are (n, K), norms of sums (n,)."""
        sums, shape = self.sums, self.sums.count.shape
        place = (corpus[:, None] * shape[1] + chosen)[counted]
        gate = gates.astype(np.float64)
        strength = gate * norms
        totals = np.broadcast_to(total_norms[:, None].astype(np.float64), gate.shape)
        relative = np.divide(
            strength, totals, out=np.zeros_like(strength), where=totals > 0
        )

        def summed(values: np.ndarray) -> np.ndarray:
            flat = np.bincount(place, values[counted], shape[0] * shape[1])
            return flat.reshape(shape)

        sums.count[:] += np.bincount(place, minlength=sums.count.size).reshape(shape)
        sums.gate_sum[:] += summed(gate)
        sums.gate_square_sum[:] += summed(gate * gate)
        sums.reap_sum[:] += summed(strength)
        sums.relative_sum[:] += summed(relative)
        np.maximum.at(sums.contribution_max.reshape(-1), place, strength[counted])

    def _add_moments(self, latent: np.ndarray, inner: np.ndarray) -> None:
        if self.latent_moment is None or self.inner_moment is None:
            self.latent_moment = np.zeros(latent.shape)
            self.inner_moment = np.zeros(inner.shape)
        self.latent_moment += latent
        self.inner_moment += inner


@contextmanager
def recorded_experts(
    moe: LatentMoE, corpora: int, **settings: object
) -> Iterator[ExpertRecorder]:
    """A recorder in the place of ``moe.switch_mlp``, which comes back at the end.

    ``settings`` as :class:`ExpertRecorder` takes them.
    """
    experts = moe.switch_mlp
    recorder = ExpertRecorder(experts, corpora, **settings)  # type: ignore[arg-type]
    moe.switch_mlp = recorder  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield recorder
    finally:
        moe.switch_mlp = experts


def _norms(rows: mx.array) -> mx.array:
    """Euclidean norms of the last axis, float32."""
    return mx.sqrt(mx.square(rows.astype(mx.float32)).sum(axis=-1))


@contextmanager
def _watched_down(bank: ExpertBank) -> Iterator[list[mx.array]]:
    """A list that gets what ``bank.down_proj`` reads, (rows, inner) a call."""
    down, read = bank.down_proj, []

    def watched(x: mx.array, ids: mx.array, sorted_indices: bool = False) -> mx.array:
        read.append(x.squeeze(-2))
        return down(x, ids, sorted_indices=sorted_indices)

    bank.down_proj = watched  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield read
    finally:
        bank.down_proj = down
