"""What a plan loses, in one figure: the damage by which plans are compared.

The unit is the relative squared error of what a branch of a layer writes; the figures of
all branches are added. A layer whose experts are all dropped has damage 1. A criterion
gives shares of a layer's saliency instead of errors, and the widths then cost what
:data:`ASSUMED_ERRORS` says; a measured table (``kimi-k3 damage``) holds errors of both.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from ..build.retention import layer_shares
from ..build.saliency import SaliencyTable
from ..conversion.build_config import EXPERT_MATRICES
from ..errors import PlanError
from ..models import Model
from .budget_problem import LARGE, OFF, SMALL
from .expert_plan import LOW_BITS, ExpertPlan
from .matrix_classes import CLASS_BITS, affine_format, class_matrices, inputs_of
from .plan_sizes import SourceSizes
from .scores import DAMAGE, check_source, checked_scores

#: Bits → relative squared error of one matrix as our quantiser leaves it, affine with
#: groups of 64, weights from N(0,1): benchmarks/results/quantizer.json.
ASSUMED_ERRORS = {
    2: 0.10,
    3: 0.027,
    4: 0.0066,
    5: 0.0016,
    6: 0.00039,
    8: 0.000025,
    16: 0.0,
}

_MEASURE = "Measure again with `kimi-k3 damage`."


class MeasuredDamage(Protocol):
    """What is read of a measured table (:mod:`.damage_table`).

    Attributes:
        source: fingerprints of the checkpoint.
        layers: (L,) its MoE layers. experts: (L,) how many each has.
        low_bits: (F,) widths of the low bank that were measured.
        drop: (L, E). low: (F, L, E).
        classes: C names. bits: (B,). classes_damage: (C, B).
    """

    @property
    def source(self) -> Mapping[str, Any]: ...
    @property
    def layers(self) -> np.ndarray: ...
    @property
    def experts(self) -> np.ndarray: ...
    @property
    def low_bits(self) -> Any: ...
    @property
    def drop(self) -> np.ndarray: ...
    @property
    def low(self) -> np.ndarray: ...
    @property
    def classes(self) -> Any: ...
    @property
    def bits(self) -> Any: ...
    @property
    def classes_damage(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Damage:
    """Damage of everything that a plan can do to a checkpoint. MXFP4 experts have none.

    Attributes:
        layers: (L,) its MoE layers, 0-based, rising.
        experts: E, of every layer.
        low_bits: width that ``low`` is for.
        drop: (L, E) float64, damage of dropping each expert.
        low: (L, E) float64, of storing it at ``low_bits``; never more than ``drop``.
        classes: class of matrices → bits → damage; 16 bits have none.
        measured: whether errors were measured, rather than assumed by width.
        criterion: what ``drop`` is by; a key of ``CRITERIA``, or :data:`~.scores.DAMAGE`.
        source: fingerprints of the checkpoint.
        origin: weights and digest of the table; plain JSON values, for a plan's record.
        nats: whether probes turned errors into nats (:mod:`.probed_damage`).

    Raises PlanError, naming layer and expert, for anything no table can give.
    """

    layers: np.ndarray
    experts: int
    low_bits: int
    drop: np.ndarray
    low: np.ndarray
    classes: Mapping[str, Mapping[int, float]]
    measured: bool
    criterion: str
    source: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    nats: bool = False

    def __post_init__(self) -> None:
        if self.low_bits not in LOW_BITS:
            raise PlanError(
                f"the low bank has {self.low_bits} bits; wanted one of "
                f"{', '.join(map(str, LOW_BITS))}."
            )
        shape = (len(self.layers), self.experts)
        for name in ("drop", "low"):
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                raise PlanError(
                    f"{name} is of shape {array.shape} and type {array.dtype}; wanted "
                    f"{shape} and float64."
                )
            self._refuse(~np.isfinite(array), name, "a finite number")
            self._refuse(array < 0, name, "0 or more")
        self._refuse(self.low > self.drop, "low", "no more than dropping it costs")
        if (empty := ~(self.drop > 0).any(axis=1)).any():
            raise PlanError(
                f"layer {self.layers[np.argmax(empty)]}: dropping any of its "
                f"{self.experts} experts costs nothing by {self.criterion}: nothing tells "
                "which to keep. Calibrate again."
            )
        for name, by_bits in self.classes.items():
            for bits, damage in by_bits.items():
                if not 0 <= damage < math.inf or (bits == 16 and damage):
                    raise PlanError(
                        f"{name} at {bits} bits has damage {damage}; wanted 0 or more, "
                        f"and 0 at 16 bits. {_MEASURE}"
                    )

    @classmethod
    def of_criterion(
        cls,
        table: SaliencyTable,
        criterion: str,
        weights: Mapping[str, float] | None,
        sizes: SourceSizes,
        low_bits: int = 2,
    ) -> Self:
        """Shares of each layer's saliency; widths at their assumed errors.

        Args:
            criterion, weights: as :meth:`SaliencyTable.score` takes them.
        """
        named = None if weights is None else dict(weights)
        check_source(table, sizes.args.text_config)
        drop = layer_shares(checked_scores(table, criterion, named))
        # Errors of an expert's matrices add up.
        low = min(1.0, len(EXPERT_MATRICES) * ASSUMED_ERRORS[low_bits])
        return cls(
            layers=table.layers,
            experts=int(table.experts.max()),
            low_bits=low_bits,
            drop=drop,
            low=low * drop,
            classes=assumed_classes(sizes),
            measured=False,
            criterion=criterion,
            source=table.source,
            origin={"saliency": table.digest, "weights": named},
        )

    @classmethod
    def of_measured(cls, table: MeasuredDamage, low_bits: int = 2) -> Self:
        """What ``kimi-k3 damage`` measured, with the low bank at ``low_bits``."""
        widths = [int(bits) for bits in table.low_bits]
        if low_bits not in widths:
            raise PlanError(
                f"a low bank of {low_bits} bits was not measured; there are "
                f"{', '.join(map(str, widths))}. Run `kimi-k3 damage` with --low-bits "
                f"{' '.join(map(str, sorted({*widths, low_bits})))} and --restart."
            )
        if len(set(table.experts.tolist())) > 1:
            raise PlanError(
                "the measured checkpoint has layers of "
                f"{min(table.experts)} to {max(table.experts)} experts: it is pruned "
                "already. Measure the source."
            )
        bits = [int(b) for b in table.bits]
        classes = {
            str(name): dict(zip(bits, map(float, row), strict=True))
            for name, row in zip(table.classes, table.classes_damage, strict=True)
        }
        digest = getattr(table, "digest", None)
        return cls(
            layers=np.asarray(table.layers),
            experts=int(max(table.experts)),
            low_bits=low_bits,
            drop=np.asarray(table.drop),
            low=np.asarray(table.low)[widths.index(low_bits)],
            classes=classes,
            measured=True,
            criterion=DAMAGE,
            source=table.source,
            origin={} if digest is None else {"damage_table": digest},
        )

    def of_plan(self, plan: ExpertPlan) -> float:
        """Predicted damage of ``plan``: the exact sum, rounded once.

        Raises PlanError for a plan of another checkpoint, low width or class.
        """
        self.check_plan(plan)
        states = np.full(self.drop.shape, OFF, np.int8)
        for row, layer in zip(states, self.layers, strict=True):
            chosen = plan.layers[int(layer)]
            row[list(chosen.low)], row[list(chosen.high)] = SMALL, LARGE
        return self.of_states(states, plan.bits)

    def of_states(self, states: np.ndarray, bits: Mapping[str, int]) -> float:
        """The same of experts (L, E): states as in :mod:`.budget_problem`."""
        kept = np.where(states == SMALL, self.low, 0.0)
        lost = np.where(states == OFF, self.drop, kept)
        classes = [self.classes[name][width] for name, width in bits.items()]
        return math.fsum([*lost[lost > 0].tolist(), *classes])

    def check_plan(self, plan: ExpertPlan) -> None:
        """Raise PlanError if this is not about what ``plan`` does."""
        if plan.experts != self.experts or set(plan.layers) != set(
            self.layers.tolist()
        ):
            raise PlanError(
                f"the plan is for {len(plan.layers)} layers of {plan.experts} experts, the "
                f"damage for {len(self.layers)} of {self.experts}. Take both from one "
                "checkpoint."
            )
        banked = [layer for layer, chosen in plan.layers.items() if chosen.low]
        if banked and plan.low_bits != self.low_bits:
            raise PlanError(
                f"layer {banked[0]} has a low bank of {plan.low_bits} bits, the damage is "
                f"for {self.low_bits}. Give the damage of that width."
            )
        for name, bits in plan.bits.items():
            if bits not in self.classes.get(name, {}):
                raise PlanError(
                    f"no damage is known of {name} at {bits} bits; it is of "
                    f"{', '.join(sorted(self.classes)) or 'no class'}. {_MEASURE}"
                )

    def check_alive(self, top_k: int) -> None:
        """Raise PlanError for a layer with fewer than ``top_k`` experts of any damage."""
        alive = (self.drop > 0).sum(axis=1)
        if (alive < top_k).any():
            at = int(np.argmax(alive < top_k))
            raise PlanError(
                f"layer {self.layers[at]}: dropping costs nothing by {self.criterion} for "
                f"all but {alive[at]} experts (for expert "
                f"{np.argmin(self.drop[at] > 0)}, say), but the router picks {top_k}: "
                "nothing tells which to keep. Calibrate on more text."
            )

    def _refuse(self, wrong: np.ndarray, name: str, wanted: str) -> None:
        if wrong.any():
            at, expert = np.argwhere(wrong)[0]
            raise PlanError(
                f"layer {self.layers[at]}, expert {expert}: {name} is "
                f"{getattr(self, name)[at, expert]} by {self.criterion}, wanted {wanted}. "
                f"{_MEASURE if self.measured else 'Calibrate again.'}"
            )


def assumed_classes(sizes: SourceSizes) -> dict[str, dict[int, float]]:
    """Class → bits → :data:`ASSUMED_ERRORS`, once for each matrix of the class."""
    counts: dict[str, dict[int, int]] = defaultdict(
        lambda: dict.fromkeys(CLASS_BITS, 0)
    )
    for name, _, module in class_matrices(Model(sizes.args)):
        for bits in CLASS_BITS:
            counts[name][bits] += affine_format(bits, inputs_of(module)) is not None
    return {
        name: {bits: n * ASSUMED_ERRORS[bits] for bits, n in found.items()}
        for name, found in sorted(counts.items())
    }
