"""What a plan keeps, costs and promises, in figures: ``kimi-k3 plan`` prints them.

Sizes are exact. Saliency kept is what a calibration says; damage and tokens a second
are predictions, and say what from.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..build.saliency import SaliencyTable
from ..machine.macs import PUBLISHED, REACHED, Prediction, predict
from .damage import Damage
from .expert_plan import HIGH, ExpertPlan
from .plan_sizes import SourceSizes


@dataclass(frozen=True)
class LayerFigures:
    """One MoE layer: experts by what becomes of them, shares of its saliency, 0 to 1."""

    layer: int
    high: int
    low: int
    dropped: int
    saliency_high: float
    saliency_low: float


@dataclass(frozen=True)
class Retained:
    """Share of a layer's saliency in the experts of each bank, mean over layers.

    Attributes:
        least: share of both banks in the layer that keeps least of it.
        least_layer: its number.
    """

    high: float
    low: float
    least: float
    least_layer: int

    @property
    def kept(self) -> float:
        return self.high + self.low


@dataclass(frozen=True)
class BankFigures:
    """Experts of one width; bytes include router row and correction bias."""

    bits: int
    experts: int
    bytes_each: int

    @property
    def nbytes(self) -> int:
        return self.experts * self.bytes_each


@dataclass(frozen=True)
class ClassFigures:
    """All matrices of a class."""

    bits: int
    nbytes: int


@dataclass(frozen=True)
class SizeFigures:
    """Bytes of the build's tensors. The headers of its shards are not counted.

    Attributes:
        source: bytes of the same checkpoint if nothing is dropped or quantised.
        high, low: routed experts.
        classes: of the other matrices, by class.
        rest: norms, convolutions and the like, vision left out.
        vision: what text does not read.
    """

    source: int
    total: int
    high: BankFigures
    low: BankFigures
    classes: Mapping[str, ClassFigures]
    rest: int
    vision: int

    @property
    def others(self) -> int:
        """Everything but routed experts and their router rows."""
        return self.total - self.high.nbytes - self.low.nbytes


@dataclass(frozen=True)
class TokenFigures:
    """Bytes of weights that one decoded token of text reads.

    Attributes:
        high, low: matrices of the experts that the router picks, by bank.
        others: everything else, routers included.
    """

    high: int
    low: int
    others: int

    @property
    def routed(self) -> int:
        return self.high + self.low

    @property
    def total(self) -> int:
        return self.routed + self.others


@dataclass(frozen=True)
class DamageFigures:
    """Predicted damage, in the unit of :mod:`.damage`: 1 is the loss of a whole layer.

    Attributes:
        nats: whether it is KL(source ‖ build) of the next token instead, from probes.
        measured: from measured errors; else from saliency, and widths' usual errors.
        bound: no plan of this budget has less; None where none was sought.
        gap: damage - bound, as a share of the damage.
        by_rule: plans by rule within the same limits, at the same widths of the classes
            → their damage; empty where none were compared.
    """

    damage: float
    measured: bool
    criterion: str
    nats: bool = False
    bound: float | None = None
    gap: float | None = None
    by_rule: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanReport:
    """All figures of one plan.

    Attributes:
        about: what the plan says of itself: kind, criterion, weights, budgets.
        criterion: what saliency is, here; a key of
            :data:`~kimi_k3.build.saliency.CRITERIA`.
        weights: corpus → its share of the text that the figures stand for.
        assumed: what saliency was made up; empty if it was recorded.
        experts: of a layer of the source.
        retained: corpus → saliency kept, for each alone.
        weighted: the same of all corpora, weighted.
    """

    about: Mapping[str, Any]
    criterion: str
    weights: Mapping[str, float]
    assumed: str
    experts: int
    top_k: int
    low_bits: int
    layers: tuple[LayerFigures, ...]
    sizes: SizeFigures
    token: TokenFigures
    retained: Mapping[str, Retained]
    weighted: Retained
    damage: DamageFigures | None
    machines: tuple[Prediction, ...]

    @property
    def kind(self) -> str:
        return str(self.about.get("kind", "custom"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sums and arithmetic included."""
        found = asdict(self)
        sizes, token = self.sizes, self.token
        for bank in ("high", "low"):
            found["sizes"][bank]["nbytes"] = getattr(sizes, bank).nbytes
        found["sizes"]["others"] = sizes.others
        found["token"] |= {"routed": token.routed, "total": token.total}
        for name, kept in self.retained.items():
            found["retained"][name]["kept"] = kept.kept
        found["weighted"]["kept"] = self.weighted.kept
        found["machines"] = [machine.to_dict() for machine in self.machines]
        found["arithmetic"] = self._arithmetic()
        found["published"] = {**PUBLISHED, "reached": REACHED}
        return {"kind": self.kind, **found}

    def text(self) -> str:
        """The report for a reader."""
        from .plan_text import plan_text

        return plan_text(self)

    def _arithmetic(self) -> dict[str, str]:
        sizes, token = self.sizes, self.token
        banks = " + ".join(
            f"{bank.experts} × {bank.bytes_each}"
            for bank in (sizes.high, sizes.low)
            if bank.experts
        )
        classes = sum(each.nbytes for each in sizes.classes.values())
        return {
            "build": f"{banks} (experts) + {classes} (classes) + {sizes.rest} (rest) + "
            f"{sizes.vision} (vision) = {sizes.total} bytes",
            "token": f"{token.routed} (routed: {self.top_k} of each layer) + "
            f"{token.others} (others) = {token.total} bytes",
        }


def plan_report(
    plan: ExpertPlan,
    sizes: SourceSizes,
    table: SaliencyTable,
    *,
    criterion: str = "reap_sum",
    weights: Mapping[str, float] | None = None,
    damage: Damage | None = None,
    bound: float | None = None,
    by_rule: Mapping[str, float] | None = None,
    assumed: str = "",
) -> PlanReport:
    """Work the figures out.

    Args:
        sizes: of the checkpoint that the plan is for.
        table: the saliency, also where it did not make the plan; its frequencies tell
            which bank tokens read.
        criterion, weights: as :meth:`SaliencyTable.score` takes them.
        damage: to predict the plan's damage with.
        bound, by_rule: of a solver, in the same unit; see :class:`DamageFigures`.
        assumed: see :class:`PlanReport`.

    Raises PlanError for a plan of another checkpoint.
    """
    plan.check_fits(sizes.args.text_config)
    shares = table.shares(weights)
    named = dict(zip(table.corpora, shares.tolist(), strict=True))
    banks = _banks(plan, table)
    kept = _kept(table.score(criterion, named), banks)
    rows = zip(plan.layers.items(), *kept, strict=True)
    frequency = dict(
        zip(table.layers.tolist(), table.score("frequency", named), strict=True)
    )
    size, token = _sizes(plan, sizes), _token(plan, sizes, frequency)
    layers = table.layers.tolist()
    return PlanReport(
        about=plan.about,
        criterion=criterion,
        weights=named,
        assumed=assumed,
        experts=plan.experts,
        top_k=plan.top_k,
        low_bits=plan.low_bits,
        layers=tuple(
            LayerFigures(
                layer=layer,
                high=len(each.high),
                low=len(each.low),
                dropped=plan.experts - len(each.order),
                saliency_high=float(of_high),
                saliency_low=float(of_low),
            )
            for (layer, each), of_high, of_low in rows
        ),
        sizes=size,
        token=token,
        retained={
            name: _retained(_kept(table.score(criterion, {name: 1}), banks), layers)
            for name in table.corpora
        },
        weighted=_retained(kept, layers),
        damage=None if damage is None else _damage(damage, plan, bound, by_rule),
        machines=predict(size.total, token.total),
    )


def _banks(plan: ExpertPlan, table: SaliencyTable) -> np.ndarray:
    """(2, L, E) bool: which experts are in the high bank, and which in the low."""
    banks = np.zeros((2, len(table.layers), plan.experts), bool)
    for row, layer in enumerate(table.layers.tolist()):
        banks[0, row, list(plan.layers[layer].high)] = True
        banks[1, row, list(plan.layers[layer].low)] = True
    return banks


def _kept(score: np.ndarray, banks: np.ndarray) -> np.ndarray:
    """(2, L): share of each layer's saliency in each bank.

    A corpus that gives a layer no saliency loses nothing there: the high bank has all.
    """
    held = np.where(banks, score, 0).sum(axis=2)
    total = score.sum(axis=1)
    nothing = np.zeros_like(held)
    nothing[0] = 1
    return np.divide(held, total, out=nothing, where=total > 0)


def _retained(kept: np.ndarray, layers: list[int]) -> Retained:
    both = kept.sum(axis=0)
    at = int(both.argmin())
    high, low = kept.mean(axis=1).tolist()
    return Retained(high, low, float(both[at]), layers[at])


def _sizes(plan: ExpertPlan, sizes: SourceSizes) -> SizeFigures:
    high = sum(len(layer.high) for layer in plan.layers.values())
    low = sum(len(layer.low) for layer in plan.layers.values())
    low_each = sizes.expert_bytes(plan.low_format) if low else 0
    classes = {
        name: ClassFigures(
            bits=plan.bits.get(name, 16) if len(sizes.classes[name]) > 1 else 16,
            nbytes=nbytes,
        )
        for name, nbytes in sizes.class_bytes(plan).items()
    }
    return SizeFigures(
        source=sizes.plan_bytes(ExpertPlan.identity(sizes.args.text_config)),
        total=sizes.plan_bytes(plan),
        high=BankFigures(HIGH.bits, high, sizes.expert_bytes(HIGH)),
        low=BankFigures(plan.low_bits, low, low_each),
        classes=classes,
        rest=sizes.rest - sizes.vision,
        vision=sizes.vision,
    )


def _token(
    plan: ExpertPlan, sizes: SourceSizes, frequency: Mapping[int, np.ndarray]
) -> TokenFigures:
    total = sizes.bytes_per_token(plan, frequency)
    high, low = map(round, sizes.routed_bytes_per_token(plan, frequency))
    return TokenFigures(high, low, total - high - low)


def _damage(
    damage: Damage,
    plan: ExpertPlan,
    bound: float | None,
    by_rule: Mapping[str, float] | None,
) -> DamageFigures:
    found = damage.of_plan(plan)
    gap = None
    if bound is not None:
        gap = max(0.0, found - bound) / found if found else 0.0
    return DamageFigures(
        damage=found,
        measured=damage.measured,
        criterion=damage.criterion,
        nats=damage.nats,
        bound=bound,
        gap=gap,
        by_rule=dict(by_rule or {}),
    )
