"""The cost of a conversion as text for a terminal."""

from .conversion_cost import ConversionCost

#: Sources of so many bytes are spoken of in GB.
_LARGE = 10_000_000_000

_ASSUMED = """\
Hours assume that one disk is read and written by turns at its sustained speed, decimal
units, and files that no cache holds. A file system that shares blocks between files is
faster."""

_QUANTISING = """\
Without a GPU one core quantises, however many there are, at a speed that was measured.
How fast an Apple GPU does it is an assumption."""


def cost_text(cost: ConversionCost) -> str:
    """Sizes, then a table of hours by the disk's speed and what quantises."""
    unit, scale = ("GB", 1e9) if cost.source >= _LARGE else ("MB", 1e6)

    def line(what: str, nbytes: int) -> str:
        return f"{what:44}{nbytes / scale:12,.2f} {unit}"

    counts = cost.experts.values()
    least, most = min(counts), max(counts)
    experts = f"{most}" if least == most else f"{least} to {most}"
    lines = [
        f"plan: {cost.plan}; {experts} experts in each of {len(cost.experts)} layers",
        "",
        line("source", cost.source),
        line("  read, each byte once", cost.read),
        line("written", cost.written)
        + f" ({cost.written:,} bytes, {cost.shards} shards)",
        line("free disk needed", cost.free_disk),
        f"{'weights quantised again':44}{cost.quantised / 1e9:12,.2f} billion",
        "",
        line("peak memory", cost.peak_memory),
        *(line(f"  {part}", nbytes) for part, nbytes in cost.memory.items()),
        "",
        *_hours(cost),
        "",
        _ASSUMED,
        *([_QUANTISING] if cost.quantised else []),
    ]
    return "\n".join(lines)


def _hours(cost: ConversionCost) -> list[str]:
    """Rows are disks, columns what quantises; one column if nothing does."""
    names = list(cost.estimates[0].hours) if cost.quantised else []
    heads = [f"with {name}" for name in names] or ["hours"]
    lines = [f"{'hours' if names else '':12}" + "".join(f"{h:>20}" for h in heads)]
    for estimate in cost.estimates:
        hours = list(estimate.hours.values())[: len(heads)]
        row = "".join(f"{h:>20.3g}" for h in hours)
        lines.append(f"{estimate.disk / 1e9:>5g} GB/s  {row}")
    return lines
