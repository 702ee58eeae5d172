"""Tables of what a build is and where it came from."""

import json
from collections.abc import Mapping
from typing import Any

from ..planning.expert_plan import ExpertPlan
from ..planning.plan_report import PlanReport
from .report_facts import BuildFacts, LayerFacts
from .report_results import SHORT
from .report_tables import Cell, Table, count, number, share, size

#: What is written where a build does not say.
NOT_RECORDED = "not recorded"


def headers_of(facts: BuildFacts) -> str:
    """What sizes are read from."""
    return (
        f"config.json and the headers of {_shards(facts.shards)} of {facts.name} "
        f"(fingerprint {facts.fingerprint[:SHORT]}…)"
    )


def size_rows(facts: BuildFacts) -> tuple[tuple[Cell, ...], ...]:
    """What, how much and exactly: the sizes that matter, one a row."""
    rows = [
        ("weights in memory", size(facts.tensor_bytes), bytes_text(facts.tensor_bytes)),
        ("shards on disk", size(facts.file_bytes), bytes_text(facts.file_bytes)),
        (
            "read for a decoded token",
            size(facts.token_bytes),
            bytes_text(facts.token_bytes),
        ),
    ]
    if facts.source_bytes is not None:
        of_source = facts.file_bytes / facts.source_bytes
        rows.append(
            ("of the source's shards", share(of_source), bytes_text(facts.source_bytes))
        )
    rows.append(("routed experts", kept_text(facts), _formats_text(facts)))
    return tuple(tuple(map(Cell, row)) for row in rows)


def sizes_table(facts: BuildFacts) -> Table:
    return Table(
        "How large it is",
        ("of what", "about", "exactly"),
        size_rows(facts),
        headers_of(facts),
        "A token reads the experts that the router picks and nearly all else; routing "
        "is taken to be even.",
    )


def parts_table(facts: BuildFacts) -> Table:
    """Bytes of every class of matrices, and how it is stored."""
    rows = [
        (
            Cell(part.name),
            Cell(", ".join(part.formats) or "as in the source"),
            Cell(count(part.nbytes)),
            Cell(share(part.nbytes / facts.tensor_bytes)),
        )
        for part in facts.parts
    ]
    total = (Cell("all tensors"), Cell(""), Cell(count(facts.tensor_bytes)), Cell(""))
    return Table(
        "Parts of the build",
        ("part", "stored as", "bytes", "share"),
        (*rows, total),
        headers_of(facts),
    )


def layers_table(facts: BuildFacts) -> Table:
    """Experts and bytes of every layer; neighbours that are alike share a row."""
    formats = facts.expert_formats
    runs: list[tuple[LayerFacts, int]] = []
    for layer in facts.layers:
        if runs and _alike(runs[-1][0], layer):
            runs[-1] = runs[-1][0], layer.layer
        else:
            runs.append((layer, layer.layer))
    rows = []
    for first, last in runs:
        name = f"{first.layer}" if first.layer == last else f"{first.layer} to {last}"
        dropped = "–" if first.dropped is None else count(first.dropped)
        rows.append(
            (
                Cell(name),
                Cell(first.attention),
                Cell(count(first.experts) if first.experts else "dense"),
                *(Cell(_count_or_none(first, stored)) for stored in formats),
                Cell(dropped),
                Cell(count(first.nbytes)),
            )
        )
    return Table(
        "Layers of the build",
        ("layer", "attention", "experts", *formats, "dropped", "bytes of the layer"),
        tuple(rows),
        headers_of(facts),
        ""
        if facts.source_experts is not None
        else "How many experts the source had is not recorded.",
    )


def provenance_table(facts: BuildFacts) -> Table:
    """What made the build, of what, and by which plan."""
    return Table(
        "Where it came from",
        ("what", "recorded"),
        tuple((Cell(what), Cell(text)) for what, text in provenance(facts).items()),
        f"the record of the conversion in config.json of {facts.name}",
        words=True,
    )


def provenance(facts: BuildFacts) -> dict[str, str]:
    """What → what is recorded of it."""
    found = {"fingerprint of the build": facts.fingerprint}
    record = facts.record
    if record is None:
        return found | {"conversion": f"{NOT_RECORDED}: another tool made it, or none"}
    found["made with"] = ", ".join(f"{n} {v}" for n, v in sorted(record.tool.items()))
    found["fingerprint of the source"] = record.fingerprint
    found["source"] = (
        f"{_shards(len(record.source))}, "
        f"{bytes_text(sum(shard.size for shard in record.source.values()))}"
    )
    moments = "errors were not weighed by recorded inputs"
    if record.moments is not None:
        moments = f"errors weighed by the recorded inputs {record.moments}"
    found["quantisation"] = moments
    if record.plan is None:
        return found | {"plan": "none: every expert is kept as it is"}
    return found | plan_words(record.plan)


def plan_words(plan: ExpertPlan) -> dict[str, str]:
    """What a plan says of itself."""
    about = plan.about
    found = {
        "plan": f"{about.get('kind', 'custom')}, digest {plan.digest}",
        "experts chosen by": _criterion(about),
    }
    if about.get("saliency"):
        found["calibration"] = f"saliency {about['saliency']}"
    if weights := about.get("weights"):
        found["corpora"] = _plain(weights)
    limits = {
        "memory": about.get("memory"),
        "bytes a token": about.get("bytes_per_token"),
    }
    stated = [f"{what} {n:,}" for what, n in limits.items() if isinstance(n, int)]
    if stated:
        found["limits of the plan"] = ", ".join(stated)
    if any(layer.low for layer in plan.layers.values()):
        found["low bank"] = f"{plan.low_format}"
    if plan.bits:
        widths = sorted(set(plan.bits.values()))
        found["widths of classes"] = ", ".join(
            f"{bits} bits: {sum(b == bits for b in plan.bits.values())} classes"
            for bits in widths
        )
    return found


def saliency_table(report: PlanReport, source: str, *, planned_from: bool) -> Table:
    """How much of what a calibration found the plan keeps.

    ``planned_from`` says whether the plan was made from this calibration.
    """
    rows = dict(report.retained)
    if len(rows) > 1:
        rows["as weighted"] = report.weighted
    return Table(
        "Saliency that the plan keeps",
        ("corpus", "mxfp4", f"{report.low_bits} bits", "both", "least, in layer"),
        tuple(
            (
                Cell(name),
                Cell(share(kept.high)),
                Cell(share(kept.low)),
                Cell(share(kept.kept)),
                Cell(share(kept.least), f"layer {kept.least_layer}"),
            )
            for name, kept in rows.items()
        ),
        source,
        f"Share of a layer's saliency ({report.criterion}), mean over layers. "
        + (
            "The plan was made from this calibration."
            if planned_from
            else "The plan is not known to be made from this calibration."
        ),
    )


def kept_text(facts: BuildFacts) -> str:
    if (before := facts.source_experts) is None:
        return f"{facts.experts:,} kept"
    return f"{facts.experts:,} of {before:,} kept"


def bytes_text(nbytes: int) -> str:
    return f"{nbytes:,} bytes"


def _shards(number_of: int) -> str:
    return f"{number_of:,} shard{'' if number_of == 1 else 's'}"


def _formats_text(facts: BuildFacts) -> str:
    return ", ".join(
        f"{sum(layer.banks.get(stored, 0) for layer in facts.layers):,} in {stored}"
        for stored in facts.expert_formats
    )


def _criterion(about: Mapping[str, Any]) -> str:
    chosen = str(about.get("criterion", NOT_RECORDED))
    return f"{chosen}, with measured damage" if about.get("measured") else chosen


def _plain(value: Any) -> str:
    """A JSON value for a reader."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)


def _count_or_none(layer: LayerFacts, stored: str) -> str:
    return count(layer.banks.get(stored, 0)) if layer.experts else "–"


def _alike(first: LayerFacts, other: LayerFacts) -> bool:
    def figures(layer: LayerFacts) -> tuple[object, ...]:
        return (layer.attention, dict(layer.banks), layer.dropped, layer.nbytes)

    return figures(first) == figures(other)
