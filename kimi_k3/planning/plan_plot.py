"""Pictures of a plan: which experts stay, how many a layer, where the bytes are."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..build.pictures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PALE,
    draw_pictures,
    label,
    layer_axis,
)
from ..build.saliency import SaliencyTable
from ..errors import PlanError
from .budget_problem import LARGE, OFF, SMALL
from .expert_plan import ExpertPlan
from .plan_report import PlanReport
from .plan_sizes import EMBEDDING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of an expert that is OFF, SMALL or LARGE.
COLOURS = PALE, AMBER, BLUE

#: Characters of a line of a title.
TITLE_WIDTH = 54

EXPERTS, ROUTERS, OTHERS = "routed experts", "routers", "norms and others"

#: Inches around everything that is drawn.
MARGIN = 0.1

#: Parts of a build that are drawn, and how the names of their classes begin.
PARTS = {
    "KDA": ("kda.",),
    "MLA": ("mla.",),
    "shared experts": ("shared_experts.",),
    "latent projections": ("routed_expert_",),
    "dense layers": ("dense.",),
    "embedding, head": (EMBEDDING, "lm_head"),
}


def draw(
    plan: ExpertPlan,
    report: PlanReport,
    table: SaliencyTable,
    folder: str | Path,
    drop: np.ndarray | None = None,
) -> list[Path]:
    """Write the pictures of ``plan`` and its ``report`` to ``folder``; the files.

    Args:
        drop: (L, E), what dropping each expert costs, where that chose them.

    Raises MissingPackageError without matplotlib.
    """
    score, first = drop, "costliest to drop first"
    if score is None:
        score = table.score(report.criterion, report.weights)
        first = f"most salient first ({report.criterion})"
    fates = sorted_fates(plan, score)
    pictures = {
        "allocation": partial(_allocation, report=report, fates=fates, first=first),
        "layers": partial(_layers, report=report),
        "bytes": partial(_bytes, report=report),
    }
    return draw_pictures(pictures, folder, PlanError)


def sorted_fates(plan: ExpertPlan, score: np.ndarray) -> np.ndarray:
    """(L, E): LARGE, SMALL or OFF of each layer's experts, the highest score first."""
    fates = np.full(score.shape, OFF)
    for row, layer in enumerate(plan.layers.values()):
        fates[row, list(layer.high)] = LARGE
        fates[row, list(layer.low)] = SMALL
    best = np.argsort(-score, axis=1, kind="stable")
    return np.take_along_axis(fates, best, axis=1)


def _allocation(
    figure: "Figure", report: PlanReport, fates: np.ndarray, first: str
) -> None:
    """What becomes of every expert."""
    from matplotlib.colors import ListedColormap

    axes = figure.add_subplot()
    count = len(report.layers)
    axes.imshow(
        fates,
        cmap=ListedColormap(COLOURS),
        vmin=OFF,
        vmax=LARGE,
        aspect="auto",
        interpolation="nearest",
        extent=(0, report.experts, count - 0.5, -0.5),
    )
    ticks = np.unique(np.linspace(0, count - 1, min(count, 8)).round().astype(int))
    axes.set_yticks(ticks, [str(report.layers[tick].layer) for tick in ticks])
    axes.grid(visible=False)
    axes.set_xlabel(f"experts, {first}")
    axes.set_ylabel("decoder layer")
    _title(figure, report, "What becomes of every expert")
    _legend(figure, _shares(report))


def _layers(figure: "Figure", report: PlanReport) -> None:
    """Experts of each layer by bank, and the saliency they hold."""
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    layers = [each.layer for each in report.layers]
    high = np.array([each.high for each in report.layers])
    low = np.array([each.low for each in report.layers])
    _stacked(upper, layers, high, low)
    upper.set_ylabel("experts")
    upper.set_ylim(0, 1.08 * float((high + low).max()))
    upper.axhline(report.top_k, color=GREY, linestyle=":", lw=1.2)
    kept = np.array([(e.saliency_high, e.saliency_low) for e in report.layers])
    _stacked(lower, layers, 100 * kept[:, 0], 100 * kept[:, 1])
    lower.set(ylim=(0, 101), ylabel="saliency (%)")
    layer_axis(lower)
    what = f"Experts kept and their saliency (dotted: top-{report.top_k})"
    _title(figure, report, what)
    _legend(figure, _shares(report, dropped=False))


def _stacked(axes: "Axes", at: list[int], high: np.ndarray, low: np.ndarray) -> None:
    # A hair wider than a layer: no white lines between bars.
    axes.bar(at, high, color=COLOURS[LARGE], width=1.02, lw=0)
    axes.bar(at, low, bottom=high, color=COLOURS[SMALL], width=1.02, lw=0)
    axes.grid(visible=False, axis="x")


def _bytes(figure: "Figure", report: PlanReport) -> None:
    """Where the bytes are: of the build, and of those that a token reads."""
    build, token = build_parts(report), token_parts(report)
    rows = [*token, *(name for name in build if name not in token)]
    axes = figure.subplots(1, 2, sharey=True)
    for side, parts, what in zip(
        axes, (build, token), ("build", "a token"), strict=True
    ):
        total = sum(parts.values())
        scale, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        sizes = [parts.get(name, 0) / scale for name in rows]
        colours = [BLUE if name == EXPERTS else GREEN for name in rows]
        side.barh(rows, sizes, color=colours, height=0.7)
        low = (report.sizes.low.nbytes, report.token.low)[what == "a token"] / scale
        side.barh(EXPERTS, low, left=sizes[0] - low, color=AMBER, height=0.7)
        side.set(xlim=(0, 1.45 * max(sizes)), xticks=[])
        side.spines["bottom"].set_visible(False)
        side.grid(visible=False)
        for row, size in enumerate(sizes):
            stated = f"{size:,.1f}" if size >= 100 else f"{size:.3g}"
            if rows[row] not in parts:
                stated = "with experts" if rows[row] == ROUTERS else "none"
            side.annotate(
                stated, (size, row), (3, 0), textcoords="offset points", va="center"
            )
        side.set_title(f"{what}: {total / scale:,.1f} {unit}")
    axes[0].invert_yaxis()
    _title(figure, report, "Where the bytes are")
    named = {BLUE: "mxfp4", AMBER: f"{report.low_bits} bits", GREEN: "other matrices"}
    if not report.sizes.low.experts:
        del named[AMBER]
    _legend(figure, named)


def build_parts(report: PlanReport) -> dict[str, int]:
    """Part → bytes of the build; they add up to all of it.

    Routers are counted with their experts.
    """
    sizes = report.sizes
    parts = {EXPERTS: sizes.high.nbytes + sizes.low.nbytes}
    parts |= _class_parts({name: each.nbytes for name, each in sizes.classes.items()})
    parts[OTHERS] = sizes.rest
    if sizes.vision:
        parts["vision"] = sizes.vision
    return parts


def token_parts(report: PlanReport) -> dict[str, int]:
    """Part → bytes that a token reads; they add up to all of them.

    The row of the embedding is counted with the routers.
    """
    sizes = report.sizes
    read = {
        name: each.nbytes
        for name, each in sizes.classes.items()
        if name != EMBEDDING or "lm_head" not in sizes.classes
    }
    parts = {EXPERTS: report.token.routed} | _class_parts(read)
    parts[ROUTERS] = report.token.total - sum(parts.values()) - sizes.rest
    parts[OTHERS] = sizes.rest
    return parts


def _class_parts(classes: dict[str, int]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for part, beginnings in PARTS.items():
        nbytes = sum(n for name, n in classes.items() if name.startswith(beginnings))
        if nbytes:
            parts[part] = nbytes
    return parts


def _shares(report: PlanReport, *, dropped: bool = True) -> dict[str, str]:
    """Colour → what becomes of experts, and of what share of them."""
    total = len(report.layers) * report.experts
    high, low = report.sizes.high.experts, report.sizes.low.experts
    named = {COLOURS[LARGE]: f"mxfp4 {high / total:.1%}"}
    if low:
        named[COLOURS[SMALL]] = f"{report.low_bits} bits {low / total:.1%}"
    if dropped:
        named[COLOURS[OFF]] = f"dropped {1 - (high + low) / total:.1%}"
    return named


def _legend(figure: "Figure", named: dict[str, str]) -> None:
    """Colour → words, below everything."""
    from matplotlib.patches import Patch

    patches: list[Any] = [
        Patch(color=colour, label=words) for colour, words in named.items()
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(named),
        columnspacing=1.2,
        handlelength=1.4,
    )


def _title(figure: "Figure", report: PlanReport, what: str) -> None:
    """What is shown, and of which plan."""
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=MARGIN, h_pad=MARGIN / 2)
    figure.suptitle(
        f"{what}\n{described(report)}",
        x=0.02,
        ha="left",
        fontsize=10.5,
        linespacing=1.3,
    )


def described(report: PlanReport) -> str:
    """Kind, budget, criterion and weights of a plan, in two lines at most."""
    budget = report.about.get("memory")
    size = (
        f"{report.sizes.total / 1e9:,.1f} GB"
        if report.sizes.total >= 1e9
        else (f"{report.sizes.total / 1e6:,.1f} MB")
    )
    if budget is not None:
        scale, unit = (1e9, "GB") if budget >= 1e9 else (1e6, "MB")
        size += f" of {budget / scale:,.1f} {unit}"
    chosen_by = report.about.get("criterion", report.criterion)
    if report.damage is not None and report.damage.measured:
        chosen_by = "measured damage"
    first = f"{report.kind}, {size}, by {chosen_by}"
    if report.assumed:
        return f"{first}\nsaliency is assumed: nothing was calibrated"
    weights = ", ".join(
        f"{label(name)} {share:.0%}" for name, share in report.weights.items() if share
    )
    if len(weights) > TITLE_WIDTH:
        weights = weights[: TITLE_WIDTH - 1] + "…"
    return f"{first}\n{weights}"
