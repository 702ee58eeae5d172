"""Pictures of a report: what a build is made of, and how far it is from its teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..build.pictures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    draw_pictures,
    label,
    layer_axis,
)
from ..errors import EvaluationError
from ..evaluation.evaluation import Evaluation
from ..evaluation.summary import Row, Summary
from ..planning.plan_plot import PARTS
from .report_facts import EXPERTS, BuildFacts
from .report_tables import nats, share, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of formats of experts, in the order in which a build has them.
_COLOURS = (BLUE, AMBER, GREEN, ORANGE)

#: Lines that are told apart without colour.
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (7, 2)))

#: KL below this is drawn as this: the axis is logarithmic and an equal token has none.
LEAST_KL = 1e-6

#: Groups of fewer predictions have no distribution worth a line.
FEWEST_DRAWN = 20

#: Groups that one picture of bars names.
MOST_BARS = 16

#: Values of KL whose shares a summary states.
MARKS = (0.01, 0.1)


@dataclass(frozen=True)
class Picture:
    """A drawn file, what a reader who cannot see it is told, and its caption."""

    path: Path
    alternative: str
    caption: str


def draw_build(facts: BuildFacts, folder: Path) -> list[Picture]:
    """Experts of each layer, and where the bytes are."""
    drawn = {
        "build-experts": (
            partial(_experts, facts=facts),
            "Bars, one for each decoder layer: routed experts by format, "
            f"{facts.experts:,} in all. The table of layers has every figure.",
            "Routed experts of each layer, by how they are stored.",
        ),
        "build-bytes": (
            partial(_bytes, parts=merged_parts(facts)),
            "Bars: "
            + ", ".join(f"{n} {size(b)}" for n, b in merged_parts(facts).items())
            + ".",
            "Where the bytes are. The table of parts has every figure.",
        ),
    }
    if not facts.experts:
        del drawn["build-experts"]
    return _draw(drawn, folder)


def draw_evaluation(
    summary: Summary, evaluation: Evaluation | None, folder: Path, prefix: str
) -> list[Picture]:
    """The distribution of KL where every prediction is known, and means of groups."""
    drawn = {}
    if evaluation is not None:
        below = {
            name: row.estimates["below_0.01"].value
            for name, row in summary.groups["span"].items()
        }
        drawn[f"{prefix}kl-distribution"] = (
            partial(_distribution, evaluation=evaluation),
            "Curves: share of the predictions whose KL is at most what the axis says, for "
            "each part of a conversation. Below 0.01: "
            + ", ".join(f"{name} {share(value)}" for name, value in below.items())
            + ".",
            "How KL is spread: for each part of a conversation, the share of the tokens "
            "with at most this KL. Further left is better.",
        )
    for grouping, title in (
        ("corpus", "Mean KL of each corpus"),
        ("span", "Mean KL of each part of a conversation"),
        ("position", "Mean KL by tokens seen before"),
    ):
        rows = summary.groups.get(grouping, {})
        if not rows:
            continue
        level = f"{summary.level:.0%}"
        drawn[f"{prefix}kl-{grouping}"] = (
            partial(_means, rows=rows, title=title, level=level),
            f"{title}, in nats: "
            + ", ".join(
                f"{name} {nats(row.estimates['kl'].value)}"
                for name, row in list(rows.items())[:MOST_BARS]
            )
            + ".",
            f"{title}, with {level} intervals.",
        )
    return _draw(drawn, folder)


def merged_parts(facts: BuildFacts) -> dict[str, int]:
    """Name → bytes: classes of matrices taken together; they add up to all."""
    merged: dict[str, int] = {}
    for part in facts.parts:
        name = next(
            (name for name, starts in PARTS.items() if part.name.startswith(starts)),
            part.name,
        )
        if part.name.startswith(EXPERTS):
            name = f"experts,{part.name.removeprefix(f'{EXPERTS},')}"
        merged[name] = merged.get(name, 0) + part.nbytes
    return merged


def _draw(drawn: Mapping[str, tuple], folder: Path) -> list[Picture]:
    files = draw_pictures(
        {n: one[0] for n, one in drawn.items()}, folder, EvaluationError
    )
    return [
        Picture(file, alternative, caption)
        for file, (_, alternative, caption) in zip(files, drawn.values(), strict=True)
    ]


def _experts(figure: "Figure", facts: BuildFacts) -> None:
    axes = figure.add_subplot()
    layers = [layer.layer for layer in facts.layers]
    bottom = np.zeros(len(layers))
    for colour, stored in zip(_COLOURS, facts.expert_formats, strict=False):
        counts = np.array([layer.banks.get(stored, 0) for layer in facts.layers])
        axes.bar(layers, counts, bottom=bottom, color=colour, width=0.9, label=stored)
        bottom += counts
    dropped = np.array([layer.dropped or 0 for layer in facts.layers])
    if dropped.any():
        axes.bar(layers, dropped, bottom=bottom, color=PALE, width=0.9, label="dropped")
    axes.axhline(facts.top_k, color=GREY, linestyle=":", lw=1.2)
    axes.grid(visible=False, axis="x")
    layer_axis(axes)
    axes.set_ylabel("routed experts")
    axes.set_title(f"Experts of each layer (dotted: top-{facts.top_k})")
    figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2)


def _bytes(figure: "Figure", parts: Mapping[str, int]) -> None:
    axes = figure.add_subplot()
    names, sizes = list(parts), np.array(list(parts.values()), float)
    colours = [BLUE if name.startswith("experts") else GREEN for name in names]
    short = [_short(name) for name in names]
    axes.barh(range(len(names)), sizes, color=colours, height=0.7)
    axes.set_yticks(range(len(names)), short)
    for at, nbytes in enumerate(sizes):
        axes.annotate(
            size(nbytes), (nbytes, at), (3, 0), textcoords="offset points", va="center"
        )
    axes.set(xlim=(0, 1.3 * sizes.max()), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_title(f"Where the bytes are: {size(sizes.sum())}")


def _short(name: str) -> str:
    return {
        "norms, convolutions and the like": "norms and others",
        "vision and other parts": "vision, others",
    }.get(name, name)


def _distribution(figure: "Figure", evaluation: Evaluation) -> None:
    axes = figure.add_subplot()
    colours = (BLUE, ORANGE, GREEN, AMBER, "#56B4E9", "#CC79A7", "black", GREY)
    groups = {
        name: which
        for name, which in evaluation.groups("span").items()
        if which.sum() >= FEWEST_DRAWN
    } or {"all": np.ones(len(evaluation.kl), bool)}
    for (name, which), colour, line in zip(
        groups.items(), colours, (*_LINES, "-"), strict=False
    ):
        values = np.sort(np.maximum(evaluation.kl[which], LEAST_KL))
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        axes.step(
            values, shares, where="post", color=colour, linestyle=line, label=name
        )
    for mark in MARKS:
        axes.axvline(mark, color=GREY, linestyle=":", lw=1)
    axes.set_xscale("log")
    most = max(1.0, float(evaluation.kl.max()))
    axes.set(xlim=(LEAST_KL, most), ylim=(0, 101))
    axes.set_xlabel("KL(teacher ‖ build), nats (dotted: 0.01 and 0.1)")
    axes.set_ylabel("tokens with at most this KL (%)")
    axes.set_title("Distribution of KL")
    figure.legend(
        loc="outside lower center", ncols=min(4, len(groups)), columnspacing=1.2
    )


def _means(figure: "Figure", rows: Mapping[str, Row], title: str, level: str) -> None:
    axes = figure.add_subplot()
    shown = dict(list(rows.items())[:MOST_BARS])
    found = [row.estimates["kl"] for row in shown.values()]
    at = np.arange(len(found))
    values = np.array([one.value for one in found])
    low = np.array([one.value if one.low is None else one.low for one in found])
    high = np.array([one.value if one.high is None else one.high for one in found])
    axes.barh(at, values, color=BLUE, alpha=0.35, height=0.62)
    axes.hlines(at, low, high, color=BLUE, lw=2.2)
    axes.plot(values, at, "o", color=BLUE, ms=6)
    most = max(float(high.max()), float(values.max()), LEAST_KL)
    for y, value, end in zip(at, values, high, strict=True):
        axes.annotate(
            nats(value),
            (max(end, value), y),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(at, [label(name) for name in shown])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.22 * most)
    axes.set_xlabel(f"nats a token (lines: {level} interval)")
    axes.set_title(
        title if len(shown) == len(rows) else f"{title} (the first {MOST_BARS})"
    )


__all__ = ["Picture", "draw_build", "draw_evaluation", "merged_parts"]
