"""Plans by rule: the same number in each layer, the best of all layers, two widths.

Numbers are given, or a memory limit, for which the largest plan that fits is made. The
arithmetic is the same for every kind: so many experts a layer in each bank, at least
``top_k`` together.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..build.retention import layer_shares, round_half_up
from ..build.saliency import TOOL, SaliencyTable
from ..errors import PlanError
from .damage import Damage
from .expert_plan import HIGH, ExpertPlan, LayerPlan
from .matrix_classes import refuse_unknown_classes
from .plan_sizes import SourceSizes
from .scores import check_source, checked_scores, ranking

#: Share of the kept experts in the high bank: 121 of 326, as in the published build.
HIGH_SHARE = 121 / 326

Bits = Mapping[str, int]


def all_classes(sizes: SourceSizes, bits: int, except_: Collection[str] = ()) -> Bits:
    """Every class at ``bits``, but those named; classes that have no such width stay."""
    refuse_unknown_classes(except_, sizes.classes)
    return {
        name: bits
        for name, found in sizes.classes.items()
        if name not in except_ and bits in found
    }


def uniform_plan(
    table: SaliencyTable,
    *,
    keep: int | None = None,
    memory: int | None = None,
    sizes: SourceSizes | None = None,
    criterion: str = "reap_sum",
    weights: Mapping[str, float] | None = None,
    bits: Bits | None = None,
    damage: Damage | None = None,
) -> ExpertPlan:
    """The ``keep`` best experts of every layer, as the source has them.

    Stock mlx-lm loads such a build. With router groups, as many of each group.

    Args:
        keep: None: as many as fit into ``memory``.
        memory: bytes of the build; needs ``sizes``.
        criterion, weights: as :meth:`SaliencyTable.score` takes them.
        bits: class of matrices → bits; the rest stays bfloat16.
        damage: experts rank by what dropping them costs, instead of by ``criterion``.

    Raises PlanError, naming limit and least memory, for what cannot be.
    """
    frame = _Frame.of(
        "uniform", table, sizes, memory, criterion, weights, bits, damage=damage
    )
    step = frame.groups

    def counts(keep: int) -> tuple[int, int]:
        return keep, 0

    if keep is None:
        keep = frame.largest(counts, step)
    frame.check_counts(*counts(keep))
    if keep % step:
        raise PlanError(
            f"uniform keeps {keep} experts of each layer, which its {step} router groups "
            f"cannot share; take {keep - keep % step} or {keep - keep % step + step}."
        )
    size = frame.experts // step
    grouped = frame.scores.reshape(len(frame.layers), step, size)
    best = ranking(grouped)[..., : keep // step] + size * np.arange(step)[:, None]
    high = best.reshape(len(frame.layers), keep)
    return frame.plan(high, [()] * len(high), {"keep": keep})


def global_plan(
    table: SaliencyTable,
    *,
    keep: float | None = None,
    least: int | None = None,
    memory: int | None = None,
    sizes: SourceSizes | None = None,
    criterion: str = "reap_sum",
    weights: Mapping[str, float] | None = None,
    bits: Bits | None = None,
    damage: Damage | None = None,
) -> ExpertPlan:
    """The best experts of all layers together, ranked by their share of their layer.

    Damage ranks them as it is: it compares over layers.

    Args:
        keep: experts a layer, on average; None: as many as fit into ``memory``.
        least: experts that every layer keeps; None: top-k.

    For the others see :func:`uniform_plan`.
    """
    frame = _Frame.of(
        "global", table, sizes, memory, criterion, weights, bits, damage=damage
    )
    frame.refuse_groups()
    least = frame.top_k if least is None else least
    frame.check_counts(least, 0, "least")
    layers = len(frame.layers)
    if keep is None:
        total = frame.most(least)
    else:
        total = round_half_up(keep * layers)
        if not least * layers <= total <= frame.experts * layers:
            raise PlanError(
                f"global keeps {keep} experts a layer; wanted {least} (the least in every "
                f"layer) to {frame.experts} (all there are)."
            )
    kept = best_overall(
        layer_shares(frame.scores) if damage is None else frame.scores, total, least
    )
    high = [np.flatnonzero(row) for row in kept]
    about = {"keep": total / layers, "least": least}
    return frame.plan(high, [()] * layers, about)


def graded_plan(
    table: SaliencyTable,
    *,
    high: int | None = None,
    low: int | None = None,
    low_bits: int = 2,
    high_share: float = HIGH_SHARE,
    memory: int | None = None,
    sizes: SourceSizes | None = None,
    criterion: str = "reap_sum",
    weights: Mapping[str, float] | None = None,
    bits: Bits | None = None,
    damage: Damage | None = None,
) -> ExpertPlan:
    """The ``high`` best experts of every layer in MXFP4, the next ``low`` at ``low_bits``.

    Args:
        high, low: where one is left out, as many as fit into ``memory`` beside the
            other; where both are, as many as fit with ``high_share`` of them high.
            ``high=0`` stores every kept expert at ``low_bits``.

    For the others see :func:`uniform_plan`.
    """
    frame = _Frame.of(
        "graded", table, sizes, memory, criterion, weights, bits, low_bits, damage
    )
    frame.refuse_groups()
    if not 0 <= high_share <= 1:
        raise PlanError(f"the share of the high bank is {high_share}; wanted 0 to 1.")

    def counts(kept: int) -> tuple[int, int]:
        if high is not None:
            return high, kept - high
        best = round_half_up(high_share * kept) if low is None else kept - low
        return best, kept - best

    if high is None or low is None:
        kept = frame.largest(counts, 1, at_least=max(high or 0, low or 0))
        high, low = counts(kept)
    frame.check_counts(high, low)
    best = ranking(frame.scores)
    about = {"high": high, "low": low}
    return frame.plan(best[:, :high], best[:, high : high + low], about)


def best_overall(shares: np.ndarray, total: int, least: int) -> np.ndarray:
    """(L, E) bool, ``total`` experts: the ``least`` best of each layer, then the best.

    Args:
        shares: (L, E), which compare over layers; ties go to the first layer and expert.
    """
    kept = np.zeros(shares.shape, bool)
    np.put_along_axis(kept, ranking(shares)[:, :least], True, axis=1)
    first = np.where(kept, np.inf, shares)
    kept.ravel()[ranking(first.ravel())[:total]] = True
    return kept


def decided_bytes(sizes: SourceSizes, bits: Bits) -> int:
    """Bytes of a build besides its experts, with classes at ``bits``.

    Raises PlanError for a class that the checkpoint has not.
    """
    refuse_unknown_classes(bits, sizes.classes)
    classes = (
        found.get(bits.get(name, 16), found[16])
        for name, found in sizes.classes.items()
    )
    return sizes.rest + sum(classes)


@dataclass(frozen=True)
class _Frame:
    """What plans of every kind have in common: the scores, and what may be spent."""

    kind: str
    scores: np.ndarray
    layers: tuple[int, ...]
    template: ExpertPlan
    sizes: SourceSizes | None
    memory: int | None

    @classmethod
    def of(
        cls,
        kind: str,
        table: SaliencyTable,
        sizes: SourceSizes | None,
        memory: int | None,
        criterion: str,
        weights: Mapping[str, float] | None,
        bits: Bits | None,
        low_bits: int = 2,
        damage: Damage | None = None,
    ) -> "_Frame":
        if memory is not None and sizes is None:
            raise PlanError(
                "a memory limit needs the sizes of the checkpoint's config."
            )
        scores, origin = _scores(table, criterion, weights, damage)
        if sizes is not None:
            check_source(table, sizes.args.text_config)
            decided_bytes(sizes, bits or {})
        about = {"kind": kind, **origin, "tool": TOOL}
        experts = int(table.experts.max())
        layers = tuple(table.layers.tolist())
        template = ExpertPlan(
            experts=experts,
            top_k=table.top_k,
            layers={layer: LayerPlan(tuple(range(experts))) for layer in layers},
            groups=1 if sizes is None else sizes.args.text_config.num_expert_group,
            low_bits=low_bits,
            bits=dict(bits or {}),
            source=table.source,
            about=about if memory is None else {**about, "memory": int(memory)},
        )
        if damage is not None:
            damage.check_plan(template)
        return cls(kind, scores, layers, template, sizes, memory)

    @property
    def experts(self) -> int:
        return self.template.experts

    @property
    def top_k(self) -> int:
        return self.template.top_k

    @property
    def groups(self) -> int:
        return self.template.groups

    def refuse_groups(self) -> None:
        if self.groups > 1:
            raise PlanError(
                f"layer {self.layers[0]} has {self.groups} router groups, of which a build "
                f"must keep equal parts; {self.kind} does not. Plan uniform."
            )

    def check_counts(self, high: int, low: int, what: str = "") -> None:
        """Raise PlanError if no layer can keep these."""
        kept = f"{high} experts" if not low else f"{high} + {low} experts"
        says = f"{self.kind} keeps {what}{' ' * bool(what)}{kept} of each layer"
        if high < 0 or low < 0 or high + low < self.top_k:
            raise PlanError(
                f"{says}, layer {self.layers[0]} for one, but the router picks "
                f"{self.top_k}; keep at least as many."
            )
        if high + low > self.experts:
            raise PlanError(
                f"{says}, but layer {self.layers[0]} has {self.experts}; keep no more."
            )

    def largest(
        self, counts: Callable[[int], tuple[int, int]], step: int, at_least: int = 0
    ) -> int:
        """The most kept experts a layer, a multiple of ``step``, that fit.

        Args:
            counts: kept experts of a layer → those of the high and the low bank; each
                must not fall.
            at_least: fewer are no plan, because a bank has that many already.
        """
        room = self._room()
        high_bytes, low_bytes = self._pair()
        least = max(self.top_k, at_least)
        least += -least % step

        def needed(kept: int) -> int:
            high, low = counts(kept)
            return len(self.layers) * (high * high_bytes + low * low_bytes)

        if least > self.experts:
            self.check_counts(*counts(least))
        if needed(least) > room:
            self._refuse_memory(needed(least), least)
        fitting = (n for n in range(self.experts, least, -1) if n % step == 0)
        return next((n for n in fitting if needed(n) <= room), least)

    def most(self, least: int) -> int:
        """The most experts of all layers together that fit in the high bank."""
        room, each = self._room(), self._pair()[0]
        layers = len(self.layers)
        if layers * least * each > room:
            self._refuse_memory(layers * least * each, least)
        return min(layers * self.experts, room // each)

    def plan(self, high: Any, low: Any, about: Mapping[str, Any]) -> ExpertPlan:
        """The plan with these experts of each layer; raises PlanError if too large."""
        layers = {
            layer: LayerPlan(_rising(of_high), _rising(of_low))
            for layer, of_high, of_low in zip(self.layers, high, low, strict=True)
        }
        plan = replace(
            self.template, layers=layers, about={**self.template.about, **about}
        )
        if self.sizes is not None and self.memory is not None:
            needed = self.sizes.plan_bytes(plan)
            if needed > self.memory:
                raise PlanError(
                    f"the {self.kind} plan needs {needed:,} bytes, the limit is "
                    f"{self.memory:,}. Keep fewer experts, or leave the number out for as "
                    "many as fit."
                )
        return plan

    def _room(self) -> int:
        """Bytes for experts; negative if the rest alone is too large."""
        if self.sizes is None or self.memory is None:
            raise PlanError(
                f"{self.kind} is told neither how many experts to keep nor how much "
                "memory there is; give one."
            )
        return self.memory - decided_bytes(self.sizes, self.template.bits)

    def _pair(self) -> tuple[int, int]:
        """Bytes of an expert of each bank; only graded plans have a low one."""
        assert self.sizes is not None
        high = self.sizes.expert_bytes(HIGH)
        if self.kind != "graded":
            return high, 0
        return high, self.sizes.expert_bytes(self.template.low_format)

    def _refuse_memory(self, experts: int, least: int) -> None:
        assert self.sizes is not None
        assert self.memory is not None
        needed = experts + decided_bytes(self.sizes, self.template.bits)
        raise PlanError(
            f"{self.kind} with the least there can be, {least} experts in every layer, "
            f"needs {needed:,} bytes with these widths; the limit is {self.memory:,}. "
            "Give that much, or narrower classes of matrices."
        )


def _scores(
    table: SaliencyTable,
    criterion: str,
    weights: Mapping[str, float] | None,
    damage: Damage | None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """(L, E) that experts rank by, and what a plan records of where that is from."""
    if damage is not None:
        damage.check_alive(table.top_k)
        stated = {"criterion": damage.criterion, "measured": damage.measured}
        return damage.drop, {**stated, **damage.origin}
    named = None if weights is None else dict(weights)
    scores = checked_scores(table, criterion, named)
    about = {"criterion": criterion, "weights": named, "saliency": table.digest}
    return scores, about


def _rising(experts: Any) -> tuple[int, ...]:
    return tuple(sorted(int(expert) for expert in experts))
