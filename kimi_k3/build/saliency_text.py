"""The words of a saliency report, for a terminal of 80 columns."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from .saliency import CRITERIA
from .saliency_checks import ranges

if TYPE_CHECKING:
    from .saliency_report import SaliencyReport

BARS = "▁▂▃▄▅▆▇█"

#: Shares of the experts that the table of retention shows, besides the one asked for.
COLUMNS = (0.1, 0.25, 0.5, 0.75, 0.9)

#: Layers of which never chosen experts are listed; JSON has them all.
LISTED = 12


def sparkline(values: Sequence[float]) -> str:
    """One character a value of 0 to 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values)


def report_text(report: "SaliencyReport") -> str:
    """Layers first, so that the summary is what a terminal shows last."""
    parts = [
        _head(report),
        _layers(report),
        _retention(report),
        *([_overlap(report)] if len(report.tokens) > 1 else []),
        _summary(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: "SaliencyReport") -> list[str]:
    experts = sum(figures.experts for figures in report.layers)
    lines = [
        f"{experts:,} experts in {_layers_counted(len(report.layers))}, the router picks "
        f"{report.top_k}; {sum(report.tokens.values()):,} tokens",
        f"criterion  {report.criterion}: {CRITERIA[report.criterion]}",
    ]
    width = max(map(len, report.tokens))
    for number, (name, tokens) in enumerate(report.tokens.items()):
        lead = "" if number else "corpora"
        share = f"weighted {report.weights[name]:.1%}"
        lines.append(f"{lead:11}{name:{width}}  {tokens:>11,} tokens, {share}")
    return lines


def _layers(report: "SaliencyReport") -> list[str]:
    lines = [
        "layer experts  top 25%  "
        f"top {report.top:3.0%}  kept at 5 to 100%     busiest   even  never"
    ]
    for f in report.layers:
        lines.append(
            f"{f.layer:5} {f.experts:7}  {f.top_quarter:7.1%}  {f.top:7.1%}  "
            f"{sparkline(f.curve[5::5])}  {f.busiest:6.1f}× {f.evenness:6.3f}  "
            f"{len(f.never_chosen):5}{'  !' if f.unprunable else ''}"
        )
    return lines


def _retention(report: "SaliencyReport") -> list[str]:
    at = [(share, round(share * (len(report.grid) - 1))) for share in COLUMNS]
    curves = {
        "the same in each layer": (report.uniform, report.top_uniform),
        "ranked over all layers": (report.ranked, report.top_ranked),
    }
    shares = sorted([*COLUMNS, report.top])
    lines = [f"{'experts kept':22}" + "".join(f"{share:7.0%}" for share in shares)]
    for name, (curve, at_top) in curves.items():
        values = dict([*((share, curve[i]) for share, i in at), (report.top, at_top)])
        row = "".join(f"{values[share]:7.1%}" for share in shares)
        lines.append(f"{name:22}{row}  {sparkline(curve[5::5])}")
    return ["share of the saliency kept, average over layers", *lines]


def _overlap(report: "SaliencyReport") -> list[str]:
    names = report.corpora
    short = [name[:9] for name in names]
    width = max(9, *map(len, names))
    chance = sorted({round(at, 3) for row in report.chance for at in row})
    stated = " to ".join(f"{at:.0%}" for at in {chance[0]: 0, chance[-1]: 0})
    lines = [
        f"overlap of the top {report.top:.0%} between corpora; chance gives {stated}",
        " " * width + "".join(f"{name:>10}" for name in short),
    ]
    for name, row in zip(names, report.overlap, strict=True):
        lines.append(f"{name:{width}}" + "".join(f"{at:10.0%}" for at in row))
    return lines


def _summary(report: "SaliencyReport") -> list[str]:
    tops = [figures.top for figures in report.layers]
    busiest = max(report.layers, key=lambda figures: figures.busiest)
    uneven = min(report.layers, key=lambda figures: figures.evenness)
    lines = [
        f"concentration   the top {report.top:.0%} hold {min(tops):.1%} to {max(tops):.1%} "
        f"of a layer's saliency, median {median(tops):.1%}",
        f"load            busiest expert: {busiest.busiest:.1f} times the average, in "
        f"layer {busiest.layer}; least even: layer {uneven.layer}, {uneven.evenness:.3f}",
        *_never_chosen(report),
    ]
    held = [figures for figures in report.layers if figures.unprunable]
    lines += [f"cannot prune !  layer {f.layer}: {f.unprunable}" for f in held]
    if not held:
        lines.append("cannot prune    none: every layer has experts that matter less")
    if report.starved:
        lines.append(
            f"warning         ranked over all layers, the top {report.top:.0%} leave fewer "
            f"than {report.top_k} experts in {_layers_named(report.starved)}"
        )
    for name, least in report.thin.items():
        lines.append(
            f"warning         {name} has {report.tokens[name]:,} tokens, too few to rank "
            f"experts by; calibrate on {least:,} or more"
        )
    return lines


def _never_chosen(report: "SaliencyReport") -> list[str]:
    some = [figures for figures in report.layers if figures.never_chosen]
    total = sum(len(figures.never_chosen) for figures in some)
    experts = sum(figures.experts for figures in report.layers)
    lines = [
        f"never chosen    {total:,} of {experts:,} experts, in {_layers_counted(len(some))}"
        if total
        else "never chosen    no expert"
    ]
    for figures in some[:LISTED]:
        lines.append(f"{'':16}layer {figures.layer}: {ranges(figures.never_chosen)}")
    if len(some) > LISTED:
        more = _layers_counted(len(some) - LISTED)
        lines.append(f"{'':16}and in {more} more (--json lists all)")
    return lines


def _layers_named(layers: Sequence[int]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {ranges(layers)}"


def _layers_counted(number: int) -> str:
    return f"{number} layer{'' if number == 1 else 's'}"
