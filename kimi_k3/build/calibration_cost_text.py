"""The cost of a calibration as text for a terminal."""

from collections.abc import Mapping

from .calibration_cost import CalibrationCost, Estimate

_ASSUMED = """\
Hours assume sustained speeds, decimal units, and files that no cache holds. A layer is
read while the one before computes, so the slower of the two counts; hidden states share
the disk. What activations take is that of MLX's plain operations; fused ones need less.
Making the samples is not included."""


def cost_text(cost: CalibrationCost) -> str:
    """Sizes by part, then a table of hours by disk and compute speed."""
    sizes, count = cost.sizes, len(cost.layers)
    steps = cost.step_tokens // cost.length
    lines = [
        f"{cost.rows:,} rows of {cost.length:,} tokens, {steps} at a time; moments "
        f"{'on' if cost.moments else 'off'}",
        "",
        _line("checkpoint", sizes.total),
        _line("  read, each byte once", sizes.read),
        *(_line(f"  not read: {name}", n) for name, n in sizes.not_read.items() if n),
        _line(f"  largest layer (number {cost.largest_layer})", max(sizes.layers)),
        "",
        _line("peak memory", cost.peak_memory),
        *_parts(cost.memory),
        "",
        _line("disk while it runs", sum(cost.disk.values())),
        *_parts(cost.disk),
        _line("  of which stays", cost.kept),
        "",
        f"{'arithmetic':44}{sum(cost.flop.values()) / 1e15:12,.2f} PFLOP",
        *(f"  {part:42}{n / 1e15:12,.2f} PFLOP" for part, n in cost.flop.items()),
        "",
        *_hours(cost.estimates, count),
        "",
        _ASSUMED,
    ]
    return "\n".join(lines)


def _line(what: str, nbytes: int) -> str:
    return f"{what:44}{nbytes / 1e9:12,.2f} GB"


def _parts(parts: Mapping[str, int]) -> list[str]:
    return [_line(f"  {name}", nbytes) for name, nbytes in parts.items()]


def _hours(estimates: tuple[Estimate, ...], layers: int) -> list[str]:
    """Rows are disks, columns are compute speeds; a star where the disk is slower."""
    disks = sorted({e.speed.disk for e in estimates})
    computes = sorted({e.speed.compute for e in estimates})
    cells = {
        (e.speed.disk, e.speed.compute): f"{e.hours:.2f}"
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
