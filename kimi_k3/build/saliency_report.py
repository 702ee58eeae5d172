"""``kimi-k3 saliency``: what a saliency table says about pruning, in figures and words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import SaliencyError
from .retention import (
    global_counts,
    kept_by_layer,
    kept_globally,
    kept_uniformly,
    set_overlap,
    top_sets,
)
from .saliency import SaliencyTable
from .saliency_text import report_text

#: Shares of the experts at which curves are given.
GRID = np.linspace(0, 1, 101)

#: A layer is flat if the less salient half of its experts holds this share or more of
#: its saliency; half would be all alike.
FLAT = 0.4

#: A corpus is thin if an expert is chosen less often than this on average.
FEWEST_CHOICES = 10


@dataclass(frozen=True)
class LayerFigures:
    """One decoder layer; shares are 0 to 1.

    Attributes:
        top_quarter: share of the saliency in the most salient quarter of its experts.
        top: the same for the share of experts asked for.
        curve: the same for each share of the report's ``grid``.
        busiest: tokens of the most chosen expert over the average expert's.
        evenness: entropy of the choices over that of an even load.
        never_chosen: experts that no token of the weighted corpora chose.
        unprunable: why the layer cannot be pruned; empty if it can.
    """

    layer: int
    experts: int
    top_quarter: float
    top: float
    curve: tuple[float, ...]
    busiest: float
    evenness: float
    never_chosen: tuple[int, ...]
    unprunable: str


@dataclass(frozen=True)
class SaliencyReport:
    """All figures of a table under one criterion and one weighting of its corpora.

    Attributes:
        top: the share of experts that concentration and overlap are about.
        weights: corpus → its share of the text that the figures stand for.
        grid: shares of the experts, for the curves.
        uniform: share of saliency kept if each layer keeps that share of its experts.
        ranked: the same if the experts of all layers are ranked together.
        top_uniform, top_ranked: both at ``top``.
        starved: layers to which ranking together at ``top`` leaves fewer than top_k.
        overlap: [corpus][corpus], share of the top experts in common, over layers.
        chance: the same for sets drawn at random.
        thin: corpus → tokens it should have at least, where it has fewer.
    """

    source: Mapping[str, Any]
    criterion: str
    top: float
    top_k: int
    tokens: dict[str, int]
    weights: dict[str, float]
    layers: tuple[LayerFigures, ...]
    grid: tuple[float, ...]
    uniform: tuple[float, ...]
    ranked: tuple[float, ...]
    top_uniform: float
    top_ranked: float
    starved: tuple[int, ...]
    overlap: tuple[tuple[float, ...], ...]
    chance: tuple[tuple[float, ...], ...]
    thin: dict[str, int]

    @property
    def corpora(self) -> tuple[str, ...]:
        return tuple(self.tokens)

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """The report for a reader."""
        return report_text(self)


def saliency_report(
    table: SaliencyTable,
    *,
    criterion: str = "reap_sum",
    weights: Mapping[str, float] | None = None,
    top: float = 0.27,
) -> SaliencyReport:
    """Work the figures out.

    Args:
        criterion: a key of :data:`kimi_k3.build.saliency.CRITERIA`.
        weights: corpus → share of the text; None: as recorded.
        top: share of the experts whose saliency and overlap are asked, above 0, below 1.

    Raises SaliencyError for a criterion, corpus, weight or share that cannot be.
    """
    if not 0 < top < 1:
        raise SaliencyError(
            f"top is {top}; wanted a share above 0 and below 1, as 0.27."
        )
    shares = table.shares(weights)
    score = table.score(criterion, weights)
    experts = table.experts
    at_top = np.array([top])
    counts = global_counts(score, experts, top)
    alone = [table.score(criterion, {name: 1}) for name in table.corpora]
    sets = np.stack([top_sets(each, experts, top) for each in alone])
    overlap, chance = set_overlap(sets, experts)
    return SaliencyReport(
        source=table.source,
        criterion=criterion,
        top=top,
        top_k=table.top_k,
        tokens=dict(zip(table.corpora, table.tokens.tolist(), strict=True)),
        weights=dict(zip(table.corpora, shares.tolist(), strict=True)),
        layers=_layer_figures(table, score, shares, top),
        grid=tuple(GRID.tolist()),
        uniform=tuple(kept_uniformly(score, experts, GRID).tolist()),
        ranked=tuple(kept_globally(score, experts, GRID).tolist()),
        top_uniform=float(kept_uniformly(score, experts, at_top)[0]),
        top_ranked=float(kept_globally(score, experts, at_top)[0]),
        starved=tuple(table.layers[counts < table.top_k].tolist()),
        overlap=tuple(map(tuple, overlap.tolist())),
        chance=tuple(map(tuple, chance.tolist())),
        thin=_thin(table),
    )


def _layer_figures(
    table: SaliencyTable, score: np.ndarray, shares: np.ndarray, top: float
) -> tuple[LayerFigures, ...]:
    asked = np.array([0.25, 0.5, top, *GRID])
    kept = kept_by_layer(score, table.experts, asked)
    weighted = [n for n, share in zip(table.corpora, shares, strict=True) if share > 0]
    load = table.score("frequency", dict(zip(table.corpora, shares, strict=True)))
    chosen = table.count[[table.corpora.index(name) for name in weighted]].sum(axis=0)
    figures = []
    for l, layer in enumerate(table.layers.tolist()):
        number = int(table.experts[l])
        part = load[l, :number] / load[l].sum()
        quarter, half, at_top, *curve = kept[l].tolist()
        figures.append(
            LayerFigures(
                layer=layer,
                experts=number,
                top_quarter=quarter,
                top=at_top,
                curve=tuple(curve),
                busiest=float(part.max() * number),
                evenness=_evenness(part),
                never_chosen=tuple(np.flatnonzero(chosen[l, :number] == 0).tolist()),
                unprunable=_unprunable(number, table.top_k, 1 - half),
            )
        )
    return tuple(figures)


def _evenness(part: np.ndarray) -> float:
    """Entropy of ``part`` (N,) of sum 1, over log N: 1 for an even load."""
    if len(part) == 1:
        return 1.0
    some = part[part > 0]
    return float(-(some * np.log(some)).sum() / np.log(len(part)))


def _unprunable(experts: int, top_k: int, lower_half: float) -> str:
    if experts <= top_k:
        return f"its experts are {experts} and the router picks {top_k}"
    if lower_half >= FLAT:
        return f"flat: the less salient half holds {lower_half:.0%} of its saliency"
    return ""


def _thin(table: SaliencyTable) -> dict[str, int]:
    """Corpora of fewer tokens than would choose each expert often enough."""
    least = -(-FEWEST_CHOICES * int(table.experts.max()) // table.top_k)
    pairs = zip(table.corpora, table.tokens.tolist(), strict=True)
    return {name: least for name, tokens in pairs if tokens < least}
