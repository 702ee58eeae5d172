"""What a decoded token reads, as a sum over experts: the form that the solver takes.

In a layer a token reads the router row of every kept expert, and ``top_k`` experts, of
which the share F_high / F_kept lies in the high bank (F: how often experts are chosen;
what dropped ones were chosen for goes to the kept). That is a ratio. Around a given
choice with the share s and the kept frequency K it is taken as

    F_high / F_kept  ≈  s + ((1 − s)·F_high − s·F_low) / K

which is exact where F_kept = K, so at the given choice itself, and has its slope there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..checkpoint.stored_format import StoredFormat
from ..errors import PlanError
from .budget_problem import LARGE, OFF
from .damage import Damage
from .expert_plan import HIGH, LOW_GROUP
from .plan_sizes import SourceSizes


@dataclass(frozen=True, eq=False)
class TokenForm:
    """Bytes of experts that a token reads, around a choice: a constant and a sum.

    Attributes:
        constant: read whatever is chosen.
        use: (2, L, E), by each expert that is low, high.
    """

    constant: float
    use: np.ndarray

    @classmethod
    def around(
        cls,
        states: np.ndarray,
        frequency: np.ndarray,
        sizes: SourceSizes,
        low_bits: int,
    ) -> "TokenForm":
        """The form that is exact at ``states`` (L, E), with ``frequency`` (L, E)."""
        text = sizes.args.text_config
        low = sizes.expert_bytes(StoredFormat("affine", low_bits, LOW_GROUP))
        top_k, more = text.num_experts_per_token, sizes.expert_bytes(HIGH) - low
        high = (frequency * (states == LARGE)).sum(axis=1, keepdims=True)
        kept = (frequency * (states != OFF)).sum(axis=1, keepdims=True)
        share = high / kept
        slope = top_k * more * frequency / kept
        use = np.stack([-share * slope, (1 - share) * slope]) + sizes.router_bytes
        constant = top_k * (low - sizes.router_bytes) * len(states)
        constant += top_k * more * share.sum()
        return cls(float(constant), use)

    @classmethod
    def below(
        cls, frequency: np.ndarray, sizes: SourceSizes, low_bits: int
    ) -> "TokenForm":
        """A form that is never above what is read, for F_high / F_kept ≥ F_high."""
        text = sizes.args.text_config
        low = sizes.expert_bytes(StoredFormat("affine", low_bits, LOW_GROUP))
        top_k, more = text.num_experts_per_token, sizes.expert_bytes(HIGH) - low
        always = low - sizes.router_bytes + min(more, 0)
        use = np.stack([0 * frequency, top_k * max(more, 0) * frequency])
        constant = float(top_k * always * len(frequency))
        return cls(constant, use + sizes.router_bytes)


def frequencies(
    damage: Damage, frequency: Mapping[int, np.ndarray] | None
) -> np.ndarray:
    """(L, E) of row sum 1: how often each expert is chosen; None: all alike.

    What no text chose counts as chosen hardly ever, so that ratios stay defined.
    """
    if frequency is None:
        return np.full(damage.drop.shape, 1 / damage.experts)
    rows = []
    for layer in damage.layers.tolist():
        if layer not in frequency:
            raise PlanError(f"frequencies of layer {layer} are not given; give all.")
        row = np.asarray(frequency[layer], np.float64)
        wrong = row.shape != (damage.experts,) or not np.isfinite(row).all()
        if wrong or (row < 0).any() or not row.any():
            raise PlanError(
                f"layer {layer}: frequencies of {damage.experts} experts are wanted, 0 or "
                "more and not 0 for all."
            )
        rows.append(row / row.sum() + 1e-12)
    chosen = np.stack(rows)
    return chosen / chosen.sum(axis=1, keepdims=True)
