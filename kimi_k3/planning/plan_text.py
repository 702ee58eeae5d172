"""The words of a plan's report, for a terminal of 80 columns."""

from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING

from ..build.saliency import CRITERIA
from ..machine.macs import PUBLISHED, REACHED

if TYPE_CHECKING:
    from .plan_report import LayerFigures, PlanReport

#: What a layer's bar is drawn with: experts as they are, at the low width, dropped.
FULL, SHADED, DOT = "█", "▒", "·"
BAR = 32

#: The criterion of a plan that no score of a calibration made.
MEASURED = "errors that `kimi-k3 damage` measured"

#: Builds of so many bytes are spoken of in GB.
_LARGE = 10_000_000_000


def plan_text(report: "PlanReport") -> str:
    """Layers first, so that the summary is what a terminal shows last."""
    parts = [
        _head(report),
        _layers(report),
        _saliency(report),
        _sizes(report),
        _token(report),
        _machines(report),
        _summary(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: "PlanReport") -> list[str]:
    count = len(report.layers)
    chosen_by = report.about.get("criterion", report.criterion)
    about = {"chosen by": f"{chosen_by}: {CRITERIA.get(chosen_by, MEASURED)}"}
    if report.assumed:
        about["ASSUMED"] = report.assumed
    else:
        weights = report.weights.items()
        about["corpora"] = ", ".join(f"{name} {share:.1%}" for name, share in weights)
    limits = {
        "memory": report.about.get("memory"),
        "per token": report.about.get("bytes_per_token"),
    }
    stated = (f"{what} {n:,} bytes" for what, n in limits.items() if n is not None)
    if limit := ", ".join(stated):
        about["limits"] = limit
    lines = [
        f"{report.kind} plan for {count * report.experts:,} experts in {count} layers, "
        f"of which the router picks {report.top_k}"
    ]
    for what, words in about.items():
        lines += wrap(f"{what:11}{words}", 80, subsequent_indent=" " * 11)
    return lines


def bar(layer: "LayerFigures", width: int = BAR) -> str:
    """The experts of a layer as one line of ``width`` characters, by what they become.

    Parts are rounded, but no part that there is vanishes while there is room.
    """
    counts = (layer.high, layer.low, layer.dropped)
    total, some = sum(counts), sum(count > 0 for count in counts)
    spare = width - some
    cells, passed, drawn = [], 0, 0
    for count in counts:
        passed += count
        upto = round(spare * passed / total)
        cells.append(upto - drawn + (count > 0))
        drawn = upto
    return "".join(mark * n for mark, n in zip((FULL, SHADED, DOT), cells, strict=True))


def _layers(report: "PlanReport") -> list[str]:
    lines = [
        f"layer  high   low  dropped  saliency kept  "
        f"{FULL} mxfp4  {SHADED} {report.low_bits} bits  {DOT} dropped"
    ]
    runs: list[tuple[int, int, str]] = []  # first layer, last, what both say
    for each in report.layers:
        kept = each.saliency_high + each.saliency_low
        words = (
            f"{each.high:5} {each.low:5} {each.dropped:8}  {kept:13.1%}  {bar(each)}"
        )
        first = each.layer
        if runs and runs[-1][1:] == (first - 1, words):
            first = runs.pop()[0]
        runs.append((first, each.layer, words))
    for first, last, words in runs:
        name = f"{first}" if first == last else f"{first}-{last}"
        lines.append(f"{name:>5} {words}")
    return lines


def _saliency(report: "PlanReport") -> list[str]:
    lines = [
        f"saliency kept ({report.criterion}), share of a layer's, mean over layers",
        f"{'':24}    mxfp4  {report.low_bits} bits    both   least, in layer",
    ]
    rows = dict(report.retained)
    if len(rows) > 1:
        rows["as weighted"] = report.weighted
    for name, kept in rows.items():
        shown = name if len(name) <= 24 else f"{name[:23]}…"
        lines.append(
            f"{shown:24}  {kept.high:7.1%} {kept.low:7.1%} {kept.kept:7.1%}  "
            f"{kept.least:7.1%}  {kept.least_layer}"
        )
    return lines


def _sizes(report: "PlanReport") -> list[str]:
    sizes = report.sizes
    unit, scale = _unit(sizes.total)

    def line(what: str, width: str, nbytes: int) -> str:
        return f"{what:34}{width:>8}{nbytes:>20,}{nbytes / scale:>10,.2f} {unit}"

    lines = [
        f"{'size':34}{'':8}{'bytes':>20}",
        line("build", "", sizes.total),
    ]
    for bank, width in ((sizes.high, "mxfp4"), (sizes.low, f"{sizes.low.bits} bits")):
        if bank.experts:
            what = f"  {bank.experts:,} experts × {bank.bytes_each:,}"
            lines.append(line(what, width, bank.nbytes))
    for name, each in sizes.classes.items():
        width = "bf16" if each.bits == 16 else f"{each.bits} bits"
        lines.append(line(f"  {name}", width, each.nbytes))
    lines.append(line("  norms, convolutions and the like", "", sizes.rest))
    if sizes.vision:
        lines.append(line("  vision, as it is", "", sizes.vision))
    lines.append(line("the checkpoint, for comparison", "", sizes.source))
    lines.append("Exact, of all tensors; headers of shards and side files come on top.")
    return lines


def _token(report: "PlanReport") -> list[str]:
    token = report.token
    unit, scale = _unit(report.sizes.total)
    rows = {
        "read for a decoded token": token.total,
        "  routed experts, mxfp4": token.high,
        f"  routed experts, {report.low_bits} bits": token.low,
        "  everything else": token.others,
    }
    return [
        f"{what:42}{nbytes:>20,}{nbytes / scale:>10,.2f} {unit}"
        for what, nbytes in rows.items()
        if nbytes
    ]


def _machines(report: "PlanReport") -> list[str]:
    if report.sizes.total < _LARGE:
        return ["tokens/s are not predicted: memory does not bound a build this small"]
    lines = [
        f"{'predicted tokens/s':24}{'for the GPU':>12}  {'beside the weights':20}"
        f"{'at most':>9}{'expected':>10}"
    ]
    for each in report.machines:
        room = f"{abs(each.room) / 1e9:,.1f} GB "
        room += "left" if each.fits else "short"
        rates = f"{each.ceiling:>9,.2f}{each.expected:>10,.2f}" if each.fits else ""
        usable = f"{each.usable / 1e9:,.1f} GB"
        lines.append(f"{each.machine.label:24}{usable:>12}  {room:20}{rates}".rstrip())
    return [
        *lines,
        "At most: Apple's published bandwidth over the bytes of a token. Expected:",
        f"{REACHED:.0%} of it, as published for 242 of 896 experts on an M3 Ultra "
        f"({PUBLISHED['tokens_per_second']:g}",
        "tokens/s). Several machines: an upper estimate, as if all weights were split",
        "evenly and the wire took no time. What is left must hold KV cache and",
        "activations. `kimi-k3 doctor` tells how to let the GPU have that much.",
    ]


def _summary(report: "PlanReport") -> list[str]:
    sizes = report.sizes
    unit, scale = _unit(sizes.total)
    total = len(report.layers) * report.experts
    kept = sizes.high.experts + sizes.low.experts
    banks = f"{sizes.high.experts:,} mxfp4"
    held = f"{report.weighted.high:.1%} in mxfp4"
    if sizes.low.experts:
        banks += f" + {sizes.low.experts:,} in {report.low_bits} bits"
        held += f", {report.weighted.low:.1%} in {report.low_bits} bits"
    lines = [
        f"experts kept    {kept:,} of {total:,} ({kept / total:.1%}): {banks}",
        f"a layer keeps   {_spread(each.high + each.low for each in report.layers)}; mxfp4 "
        f"{_spread(each.high for each in report.layers)}",
        f"saliency kept   {report.weighted.kept:.1%}: {held}",
        *_damage(report),
        f"size            {sizes.total:,} bytes, {sizes.total / scale:,.2f} {unit}, "
        f"{sizes.total / sizes.source:.1%} of the checkpoint",
        f"a token reads   {report.token.total:,} bytes, "
        f"{report.token.total / scale:,.2f} {unit}",
    ]
    return lines


def _damage(report: "PlanReport") -> list[str]:
    if (found := report.damage) is None:
        return []
    basis = "from measured errors" if found.measured else f"from {found.criterion}"
    if found.nats:
        basis += " and probes"
    elif not found.measured:
        basis += " and the usual errors of widths"
    unit = "1 is what losing all experts of a layer costs"
    if found.nats:
        unit = "nats a token, as probes of `kimi-k3 damage` saw the answers move"
    lines = [f"damage          {found.damage:.4g}, {basis};", f"{'':16}{unit}"]
    if found.bound is not None and found.gap is not None:
        lines.append(
            f"{'':16}no plan of this budget has less than {found.bound:.4g} "
            f"(gap {found.gap:.2%})"
        )
    if report.kind == "budget" and not (found.measured or found.nats):
        lines.append(
            f"{'':16}class widths by assumed errors: `kimi-k3 damage` measures them"
        )
    if found.by_rule:
        name = min(found.by_rule, key=found.by_rule.__getitem__)
        lines.append(
            f"{'':16}best rule at these widths: {name}, {found.by_rule[name]:.4g}"
        )
    return lines


def _spread(counts: Iterable[int]) -> str:
    found = list(counts)
    if min(found) == max(found):
        return f"{found[0]}"
    return f"{min(found)} to {max(found)}, {sum(found) / len(found):.1f} on average"


def _unit(nbytes: int) -> tuple[str, float]:
    return ("GB", 1e9) if nbytes >= _LARGE else ("MB", 1e6)
