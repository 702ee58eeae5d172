"""Pictures of docs/quality.md, from the results file. Readable at the width of a phone."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quality_cases import BUDGET, FIXED, MIDDLE
from quality_subject import BEST_WAY, KEPT

from kimi_k3.build.pictures import AMBER, BLUE, GREEN, GREY, ORANGE, draw_pictures
from kimi_k3.errors import EvaluationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of a plan: colour and mark, so that nothing rests on colour alone.
STYLES = {
    "uniform": (GREY, "o"),
    "global": (AMBER, "s"),
    "graded": (ORANGE, "^"),
    "all low": (GREEN, "v"),
    BUDGET: (BLUE, "D"),
}


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """``quality-*.png`` in ``folder``."""
    pictures = {
        "quality-sizes": lambda figure: _sizes(figure, result),
        "quality-noise": lambda figure: _noise(figure, result),
        "quality-predicted": lambda figure: _predicted(figure, result),
    }
    return draw_pictures(pictures, folder, EvaluationError)


def _short(name: str) -> str:
    return "budget" if name == BUDGET else name


def _rows(result: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [row for row in result["builds"] if row["part"] == part]


def _sizes(figure: "Figure", result: Mapping[str, Any]) -> None:
    """KL by plan and size; each seed a mark."""
    axes = figure.subplots()
    for place, name in enumerate([*FIXED, BUDGET]):
        colour, mark = STYLES[name]
        found = [row for row in _rows(result, "sizes") if row["plan"] == name]
        at = [KEPT.index(int(row["size"])) + (place - 2) * 0.14 for row in found]
        kl = [row["kl"]["value"] for row in found]
        axes.plot(at, kl, mark, color=colour, label=_short(name), markersize=6)
    axes.set_yscale("log")
    axes.set_xlim(-0.45, len(KEPT) - 0.55)
    axes.set_xticks(range(len(KEPT)), [f"as uniform\n{keep} of 32" for keep in KEPT])
    axes.set_ylabel("KL(source || build), nats")
    axes.set_title("Equal bytes, three nanos (lower is better)")
    _plain_ticks(axes)
    _legend(figure, axes)


def _noise(figure: "Figure", result: Mapping[str, Any]) -> None:
    """Random plans beside the plans that are made, at one size."""
    axes = figure.subplots()
    random = _rows(result, "random")
    seeds = [row["seed"] for row in random]
    kl = [row["kl"]["value"] for row in random]
    axes.plot(seeds, kl, "_", color="black", label="random experts", markersize=14)
    shown = [*_rows(result, "sizes"), *_rows(result, "draws")]
    for place, name in enumerate(("uniform", "graded", BUDGET)):
        colour, mark = STYLES[name]
        size = str(MIDDLE)
        found = [r for r in shown if (r["plan"], r["size"]) == (name, size)]
        at = [row["seed"] + 0.15 + 0.12 * place for row in found]
        kl = [row["kl"]["value"] for row in found]
        label = f"{_short(name)}, each calibration"
        axes.plot(at, kl, mark, color=colour, label=label, markersize=6)
    axes.set_yscale("log")
    axes.set_xticks(sorted({*seeds}), [f"seed {seed}" for seed in sorted({*seeds})])
    axes.set_ylabel("KL(source || build), nats")
    axes.set_title(f"What is noise: bytes of uniform, {MIDDLE} of 32")
    _plain_ticks(axes)
    _legend(figure, axes)


def _predicted(figure: "Figure", result: Mapping[str, Any]) -> None:
    """Predicted damage against measured KL."""
    axes = figure.subplots()
    parts = {
        "sizes": ("plans by rule, budget", BLUE, "o"),
        "random": ("random experts", GREY, "x"),
        "speed": ("other widths", ORANGE, "^"),
    }
    ends = []
    for part, (label, colour, mark) in parts.items():
        found = _rows(result, part)
        x = [row["predicted"][BEST_WAY] for row in found]
        y = [row["kl"]["value"] for row in found]
        ends += [*x, *y]
        axes.plot(x, y, mark, color=colour, label=label, markersize=5)
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color="black")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"predicted by {BEST_WAY}, nats")
    axes.set_ylabel("KL measured, nats")
    axes.set_title("Predicted and measured; dotted: equal")
    _plain_ticks(axes)
    _legend(figure, axes)


def _plain_ticks(axes: "Axes") -> None:
    """Decimal numbers on the logarithmic axes."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    for axis, scale in (
        (axes.xaxis, axes.get_xscale()),
        (axes.yaxis, axes.get_yscale()),
    ):
        if scale == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_locator(LogLocator(subs=()))


def _legend(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if len(labels) > 4 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
