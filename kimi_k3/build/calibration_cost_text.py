"""The cost of a calibration as text for a terminal."""

from collections.abc import Mapping

from .calibration_cost import CalibrationCost, Estimate

#: Checkpoints of so many bytes are spoken of in GB.
_LARGE = 10_000_000_000

_ASSUMED = """\
--memory-limit bounds the hidden states held alone, not the peak: two layers and what a
step computes with come on top.
Hours assume sustained speeds, decimal units, and files that no cache holds. A layer is
read while the one before computes, so the slower of the two counts; hidden states share
the disk. What activations take is that of MLX's plain operations; fused ones need less.
Making the samples is not included."""


def cost_text(cost: CalibrationCost) -> str:
    """Sizes by part, then a table of hours by disk and compute speed."""
    sizes, count = cost.sizes, len(cost.layers)
    steps = cost.step_tokens // cost.length
    large = sizes.total >= _LARGE
    unit, scale = ("GB", 1e9) if large else ("MB", 1e6)

    def line(what: str, nbytes: int) -> str:
        return f"{what:44}{nbytes / scale:12,.2f} {unit}"

    def parts(found: Mapping[str, int]) -> list[str]:
        return [line(f"  {name}", nbytes) for name, nbytes in found.items()]

    not_read = {f"not read: {name}": n for name, n in sizes.not_read.items() if n}
    lines = [
        f"{cost.rows:,} rows of {cost.length:,} tokens, {steps} at a time; moments "
        f"{'on' if cost.moments else 'off'}",
        "",
        line("checkpoint", sizes.total),
        line("  read, each byte once", sizes.read),
        *parts(not_read),
        line(f"  largest layer (number {cost.largest_layer})", max(sizes.layers)),
        "",
        line("peak memory", cost.peak_memory),
        *parts(cost.memory),
        "",
        line("disk while it runs", sum(cost.disk.values())),
        *parts(cost.disk),
        line("  of which stays", cost.kept),
        "",
        *_arithmetic(cost.flop),
        "",
        *_hours(cost.estimates, count),
        "",
        _ASSUMED,
    ]
    return "\n".join(lines)


def _arithmetic(flop: Mapping[str, int]) -> list[str]:
    total = sum(flop.values())
    unit, scale = ("PFLOP", 1e15) if total >= 1e15 else ("TFLOP", 1e12)
    rows = {"arithmetic": total, **{f"  {part}": n for part, n in flop.items()}}
    return [f"{part:44}{n / scale:12,.2f} {unit}" for part, n in rows.items()]


def _hours(estimates: tuple[Estimate, ...], layers: int) -> list[str]:
    """Rows are disks, columns are compute speeds; a star where the disk is slower."""
    disks = sorted({e.speed.disk for e in estimates})
    computes = sorted({e.speed.compute for e in estimates})
    cells = {
        (e.speed.disk, e.speed.compute): f"{e.hours:.3g}"
        + ("*" if e.layers_waiting * 2 > layers else " ")
        for e in estimates
    }
    head = "".join(f"{c / 1e12:>8g} TFLOPS" for c in computes)
    lines = [f"{'hours':12}{head}"]
    for disk in disks:
        row = "".join(f"{cells.get((disk, c), '-'):>15}" for c in computes)
        lines.append(f"{disk / 1e9:>5g} GB/s  {row}".rstrip())
    if any("*" in cell for cell in cells.values()):
        lines.append("* the disk is the slower one in most layers")
    return lines
