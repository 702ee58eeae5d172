"""Pictures of a saliency report."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SaliencyError
from .pictures import BLUE, GREEN, GREY, ORANGE, draw_pictures, label, layer_axis
from .retention import layer_shares
from .saliency import SaliencyTable
from .saliency_report import SaliencyReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Saliency is drawn from this many halvings below a layer's average to as many above.
DOUBLINGS = 4

#: Overlap is written as figures for at most so many corpora, and at most so many of
#: them are named.
MOST_STATED, MOST_NAMED = 12, 24


def draw(
    table: SaliencyTable, report: SaliencyReport, folder: str | Path
) -> list[Path]:
    """Write the pictures of ``report``, made from ``table``, to ``folder``; the files.

    Raises MissingPackageError without matplotlib.
    """
    alone = len(report.corpora) < 2
    pictures = {
        name: partial(picture, table=table, report=report)
        for name, picture in PICTURES.items()
        if not (alone and name == "overlap")
    }
    return draw_pictures(pictures, folder, SaliencyError)


def _retention(figure: "Figure", table: SaliencyTable, report: SaliencyReport) -> None:
    """Saliency kept against experts kept, over all layers and in each."""
    axes = figure.add_subplot()
    kept = 100 * np.array(report.grid)
    layers = 100 * np.array([layer.curve for layer in report.layers])
    axes.fill_between(
        kept, layers.min(axis=0), layers.max(axis=0), color=BLUE, alpha=0.18, lw=0
    )
    axes.plot(
        kept, 100 * np.array(report.uniform), color=BLUE, label="same in each layer"
    )
    axes.plot(
        kept,
        100 * np.array(report.ranked),
        color=ORANGE,
        linestyle="--",
        label="ranked over all layers",
    )
    axes.fill_between([], [], [], color=BLUE, alpha=0.18, lw=0, label="single layers")
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", label="all experts alike")
    top, held = 100 * report.top, 100 * report.top_uniform
    axes.plot([top], [held], "o", color=BLUE)
    axes.annotate(
        f"{top:.0f}% keep {held:.0f}%",
        (top, held),
        (top + 3, held - 7),
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 1},
    )
    axes.set(xlim=(0, 100), ylim=(0, 101))
    axes.set_xlabel("experts kept (%)")
    axes.set_ylabel("saliency kept (%)")
    axes.set_title("Saliency kept by the best experts")
    axes.legend(loc="lower right")


def _concentration(
    figure: "Figure", table: SaliencyTable, report: SaliencyReport
) -> None:
    """Share of each layer's saliency in its top experts."""
    axes = figure.add_subplot()
    layers = [layer.layer for layer in report.layers]
    tenth, half = (round(at * (len(report.grid) - 1)) for at in (0.1, 0.5))
    series = (
        (0.5, [layer.curve[half] for layer in report.layers], GREEN, "^"),
        (report.top, [layer.top for layer in report.layers], BLUE, "o"),
        (0.1, [layer.curve[tenth] for layer in report.layers], ORANGE, "s"),
    )
    for share, held, colour, marker in series:
        label = f"top {share:.0%}"
        axes.plot(
            layers,
            100 * np.array(held),
            marker,
            color=colour,
            markersize=3.5,
            label=label,
        )
        axes.axhline(100 * share, color=colour, linestyle=":", lw=1)
    flat = [layer for layer in report.layers if layer.unprunable]
    for layer in flat:
        axes.axvline(layer.layer, color=GREY, lw=5, alpha=0.35, zorder=0)
    note = "; grey: cannot be pruned" if flat else ""
    axes.set(ylim=(0, 101))
    layer_axis(axes)
    axes.set_ylabel("share of the layer's saliency (%)")
    axes.set_title(f"How concentrated each layer is\n(dotted: all alike{note})")
    figure.legend(loc="outside lower center", ncols=3, markerscale=1.8, columnspacing=1)


def _ranks(figure: "Figure", table: SaliencyTable, report: SaliencyReport) -> None:
    """Each layer's saliency by rank, against the layer's average."""
    axes = figure.add_subplot()
    columns = 200
    share = -np.sort(
        -layer_shares(table.score(report.criterion, report.weights)), axis=1
    )
    rows = []
    for row, number in zip(share, table.experts, strict=True):
        at = (np.arange(columns) * number) // columns
        rows.append(row[at] * number)
    with np.errstate(divide="ignore"):
        doublings = np.clip(np.log2(np.array(rows)), -DOUBLINGS, DOUBLINGS)
    count = len(rows)
    image = axes.imshow(
        doublings,
        cmap="viridis",
        aspect="auto",
        extent=(0, 100, count - 0.5, -0.5),
        interpolation="nearest",
        vmin=-DOUBLINGS,
        vmax=DOUBLINGS,
    )
    ticks = np.unique(np.linspace(0, count - 1, min(count, 8)).round().astype(int))
    axes.set_yticks(ticks, [str(table.layers[t]) for t in ticks])
    axes.grid(visible=False)
    axes.set_xlabel("experts, most salient first (%)")
    axes.set_ylabel("decoder layer")
    axes.set_title("Saliency of an expert, times\nthe average of its layer")
    marks = range(-DOUBLINGS, DOUBLINGS + 1, 2)
    bar = figure.colorbar(image, ax=axes, ticks=list(marks), pad=0.02)
    names = [f"{2**m}×" if m >= 0 else f"1/{2**-m}×" for m in marks]
    names[0], names[-1] = f"≤ {names[0]}", f"≥ {names[-1]}"
    bar.ax.set_yticklabels(names)


def _overlap(figure: "Figure", table: SaliencyTable, report: SaliencyReport) -> None:
    """Top experts in common, corpus by corpus."""
    axes = figure.add_subplot()
    overlap, names = np.array(report.overlap), [label(n) for n in report.corpora]
    axes.imshow(100 * overlap, cmap="viridis", vmin=0, vmax=100)
    size = 11 if len(names) < 8 else 8
    # Figures of more corpora could not be read, and take minutes to lay out.
    stated = overlap if len(names) <= MOST_STATED else overlap[:0]
    for (row, column), share in np.ndenumerate(stated):
        axes.text(
            column,
            row,
            f"{share:.0%}",
            ha="center",
            va="center",
            color="black" if share > 0.5 else "white",
            fontsize=size,
        )
    step = -(-len(names) // MOST_NAMED)
    positions, names = range(0, len(names), step), names[::step]
    axes.set_xticks(
        positions, names, rotation=40, ha="right", rotation_mode="anchor", fontsize=size
    )
    axes.set_yticks(positions, names, fontsize=size)
    axes.grid(visible=False)
    chance = np.array(report.chance).mean()
    axes.set_title(
        f"Top {report.top:.0%} of the experts in common\n(chance gives {chance:.0%})"
    )


def _load(figure: "Figure", table: SaliencyTable, report: SaliencyReport) -> None:
    """Busiest expert, and experts without a token."""
    layers = [layer.layer for layer in report.layers]
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    upper.plot(
        layers, [layer.busiest for layer in report.layers], "o", color=BLUE, ms=3.5
    )
    upper.axhline(1, color=GREY, linestyle=":")
    upper.set_ylim(bottom=0)
    upper.set_ylabel("× average")
    upper.set_title("Tokens of the busiest expert (dotted: even load)")
    never = [len(layer.never_chosen) for layer in report.layers]
    lower.bar(layers, never, color=ORANGE, width=0.8)
    lower.set_ylim(0, max(1, *never) * 1.15)
    lower.yaxis.get_major_locator().set_params(integer=True)
    lower.set_ylabel("experts")
    lower.set_title("Experts that no token chose")
    layer_axis(lower)


#: File name without its ending, and what draws it.
PICTURES = {
    "retention": _retention,
    "concentration": _concentration,
    "ranks": _ranks,
    "overlap": _overlap,
    "load": _load,
}
