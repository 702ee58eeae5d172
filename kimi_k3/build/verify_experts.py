"""Experts of a build against the source experts that its plan names.

The high bank holds the source's bytes. The low bank is quantised again, so its error
is measured, and held against what its format explains.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..checkpoint.names import PREFIX
from ..checkpoint.source_layout import expert_prefix
from ..checkpoint.stored_format import StoredFormat
from ..planning.expert_plan import HIGH
from .quantised_error import quantised_error
from .stored_bytes import StoredBytes
from .verify_record import RecordedBuild
from .verify_report import Finding, LowExpert

#: The model's name of each matrix of an expert, and the release's.
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

#: Rows of a matrix by which the source expert that it is of is looked for.
_PROBE_ROWS = 4

#: What tells an expert that resembles no other from one that does.
_LIKENESS = 0.6

_AGAIN = "Convert again."


@dataclass(frozen=True)
class Expert:
    """One expert of a build: its layer, its number there, and its source expert."""

    layer: int
    new: int
    source: int
    low: bool

    def __str__(self) -> str:
        bank = " of the low bank" if self.low else ""
        return (
            f"layer {self.layer}: expert {self.new}{bank}, which should be source expert "
            f"{self.source},"
        )


def experts_of(build: RecordedBuild, layer: int) -> list[Expert]:
    """Every expert of ``layer`` in its new order."""
    high = len(build.plan.layers[layer].high)
    return [
        Expert(layer, new, source, new >= high)
        for new, source in enumerate(build.plan.order(layer))
    ]


def drawn(experts: list[Expert], count: int | str, seed: int) -> list[Expert]:
    """``experts`` of one layer, or ``count`` of each bank, drawn with ``seed``."""
    if not isinstance(count, int):
        return experts
    chosen: list[Expert] = []
    for low in (False, True):
        bank = [expert for expert in experts if expert.low is low]
        if bank:
            rng = np.random.default_rng([seed, bank[0].layer, int(low)])
            size = min(count, len(bank))
            picked = rng.choice(len(bank), size=size, replace=False)
            chosen += [bank[i] for i in sorted(picked.tolist())]
    return chosen


class ExpertComparison:
    """Compares experts one by one; holds one matrix of each side at a time."""

    def __init__(self, build: RecordedBuild, ours: StoredBytes, source: StoredBytes):
        self.build = build
        self.ours = ours
        self.source = source
        self._probe = lru_cache(maxsize=3)(self._probes)

    def can_compare(self, expert: Expert) -> bool:
        """Whether its tensors are there as planned."""
        names = [
            f"{self._bank(expert)[0]}.{matrix}.{suffix}"
            for matrix in MATRICES
            for suffix in self._suffixes(expert)
        ]
        return all(name in self.build.as_planned for name in names)

    def nbytes(self, expert: Expert) -> int:
        """Bytes of the source that comparing it reads."""
        prefix = expert_prefix(expert.layer, expert.source)
        return sum(
            self.source.nbytes(f"{prefix}{name}.weight_{part}")
            for name in MATRICES.values()
            for part in ("packed", "scale")
        )

    def high(self, expert: Expert) -> Iterator[Finding]:
        """A finding unless the bytes of an MXFP4 expert are its source expert's."""
        module, row = self._bank(expert)
        odd, first = [], None
        for matrix, name in MATRICES.items():
            prefix = f"{expert_prefix(expert.layer, expert.source)}{name}.weight_"
            for suffix, part in (("weight", "packed"), ("scales", "scale")):
                found = self.ours.read(f"{module}.{matrix}.{suffix}", row)
                wanted = self.source.read(f"{prefix}{part}")
                if differ := int((found != wanted).sum()):
                    odd.append(
                        f"{matrix}.{suffix} in {differ:,} of {wanted.size:,} bytes"
                    )
                    first = first or matrix
        if first is not None:
            yield Finding(
                f"{expert} differs from it: {', '.join(odd)}; "
                f"{self._told(expert, first)}. {_AGAIN}"
            )

    def low(self, expert: Expert) -> Iterator[Finding | LowExpert]:
        """The error of an expert of the low bank, and a finding if it is too large."""
        weighed = self.build.record.moments is not None
        errors = {
            matrix: quantised_error(
                self._our_parts(expert, matrix),
                self._source_matrix(expert.layer, expert.source, matrix),
                self._format(expert),
                weighed=weighed,
            )
            for matrix in MATRICES
        }
        error = sum(found.error for found in errors.values())
        square = sum(found.square for found in errors.values())
        relative = error / square if square else error
        yield LowExpert(expert.layer, expert.new, expert.source, relative)
        odd = {matrix: found.fault for matrix, found in errors.items() if found.fault}
        for matrix, fault in list(odd.items())[:1]:
            others = f" (and in {', '.join(list(odd)[1:])})" if len(odd) > 1 else ""
            yield Finding(
                f"{expert} has in {matrix} {fault}{others}; "
                f"{self._told(expert, matrix)}. {_AGAIN}"
            )

    def _told(self, expert: Expert, matrix: str) -> str:
        """Which source expert ``matrix`` is, as its first rows tell."""
        mine = self._our_matrix(expert, matrix, _PROBE_ROWS)
        theirs = self._probe(expert.layer, matrix)
        errors = mx.square(theirs - mine).sum(axis=-1) / mx.square(theirs).sum(axis=-1)
        # The median: a damaged row of a right expert does not count.
        relative = np.median(np.array(errors), axis=1)
        nearest = int(relative.argmin())
        if not relative[nearest] < _LIKENESS:
            return (
                "it resembles no expert of the source's layer; "
                f"{self.ours.shard(self._weight(expert, matrix))} may be of another "
                "conversion"
            )
        if nearest == expert.source:
            return "it is that expert, damaged"
        return f"it is source expert {nearest}"

    def _probes(self, layer: int, matrix: str) -> mx.array:
        """The first rows of every source expert, (E, rows, columns)."""
        rows = [
            self._source_matrix(layer, expert, matrix, _PROBE_ROWS)
            for expert in range(self.build.plan.experts)
        ]
        stacked = mx.stack(rows)
        mx.eval(stacked)
        return stacked

    def _bank(self, expert: Expert) -> tuple[str, int]:
        """Path of the bank that holds it, and its row there."""
        path = f"{PREFIX}model.layers.{expert.layer}.mlp.switch_mlp"
        split = self.build.plan.split(expert.layer)
        if not split:
            return path, expert.new
        if expert.low:
            return f"{path}.bank_lo", expert.new - split
        return f"{path}.bank_hi", expert.new

    def _suffixes(self, expert: Expert) -> tuple[str, ...]:
        return ("weight", "scales", "biases") if expert.low else ("weight", "scales")

    def _format(self, expert: Expert) -> StoredFormat:
        return self.build.plan.low_format if expert.low else HIGH

    def _weight(self, expert: Expert, matrix: str) -> str:
        return f"{self._bank(expert)[0]}.{matrix}.weight"

    def _our_parts(
        self, expert: Expert, matrix: str, rows: int | None = None
    ) -> list[mx.array]:
        """Codes and scales, of the low bank also biases; the first ``rows`` of them."""
        module, row = self._bank(expert)
        return [
            self.ours.array(f"{module}.{matrix}.{suffix}", row, rows)
            for suffix in self._suffixes(expert)
        ]

    def _our_matrix(self, expert: Expert, matrix: str, rows: int) -> mx.array:
        """The first ``rows`` of a matrix, dense in float32."""
        codes, scales, *biases = self._our_parts(expert, matrix, rows)
        stored = self._format(expert)
        return stored.dequantize(codes, scales, biases[0] if biases else None)

    def _source_matrix(
        self, layer: int, expert: int, matrix: str, rows: int | None = None
    ) -> mx.array:
        """A matrix of a source expert, dense in float32."""
        name = f"{expert_prefix(layer, expert)}{MATRICES[matrix]}.weight_"
        codes = self.source.array(f"{name}packed", rows=rows).view(mx.uint32)
        scales = self.source.array(f"{name}scale", rows=rows)
        return HIGH.dequantize(codes, scales, None)
