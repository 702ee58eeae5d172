"""Router rows and correction biases must be the kept experts' own, in the kept order.

A build whose router rows lie in another order than its experts speaks fluently and
routes wrongly, so the rows are compared bit for bit and another order is named.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..checkpoint.names import PREFIX
from ..checkpoint.source_layout import layer_prefix
from .stored_bytes import StoredBytes
from .verify_record import RecordedBuild
from .verify_report import Finding

_ROUTER = "block_sparse_moe.gate"


@dataclass(frozen=True)
class _Rows:
    """One tensor with a row an expert: what it is called, in the source and here."""

    title: str
    source: str
    build: str


def router_names(layer: int) -> list[str]:
    """The build's tensors that :func:`compare_router` looks at."""
    return [rows.build for rows in _rows(layer)]


def router_bytes(layer: int, source: StoredBytes) -> int:
    """Bytes of the source that comparing the router of ``layer`` reads."""
    return sum(source.nbytes(rows.source) for rows in _rows(layer))


def compare_router(
    build: RecordedBuild, ours: StoredBytes, source: StoredBytes, layer: int
) -> Iterator[str | Finding]:
    """The name of each tensor that could be compared, and what is wrong with it."""
    order = build.plan.order(layer)
    for rows in _rows(layer):
        if rows.build not in build.as_planned:
            continue
        yield rows.build
        theirs = _split(source.read(rows.source), source.shape(rows.source)[0])
        found = _split(ours.read(rows.build), len(order))
        wanted = [theirs[expert] for expert in order]
        if found != wanted:
            yield Finding(
                f"layer {layer}: {rows.title} ({rows.build}) are not those of the kept "
                f"experts: {_told(found, theirs, order)}. This build routes to wrong "
                "experts; convert again."
            )


def _rows(layer: int) -> tuple[_Rows, _Rows]:
    theirs, ours = layer_prefix(layer), f"{PREFIX}model.layers.{layer}.mlp."
    return (
        _Rows("the router's rows", f"{theirs}{_ROUTER}.weight", f"{ours}gate.weight"),
        _Rows(
            "the router's correction biases",
            f"{theirs}{_ROUTER}.e_score_correction_bias",
            f"{ours}e_score_correction_bias",
        ),
    )


def _split(raw: np.ndarray, rows: int) -> list[bytes]:
    return [row.tobytes() for row in raw.reshape(rows, -1)]


def _told(found: list[bytes], theirs: list[bytes], order: tuple[int, ...]) -> str:
    """What the rows are instead, as well as bits can tell."""
    wanted = [theirs[expert] for expert in order]
    for turn in range(1, len(order)):
        if found == wanted[-turn:] + wanted[:-turn]:
            return f"they are rotated by {min(turn, turn - len(order), key=abs)}"
    odd = [new for new, row in enumerate(found) if row != wanted[new]]
    first = odd[0]
    of = {row: expert for expert, row in enumerate(theirs)}
    other = of.get(found[first])
    what = "that of no expert" if other is None else f"that of source expert {other}"
    if sorted(found) == sorted(wanted):
        what += "; all are there, in another order"
    return (
        f"{len(odd)} of {len(order)} differ, first that of expert {first}, which should "
        f"be that of source expert {order[first]} and is {what}"
    )
