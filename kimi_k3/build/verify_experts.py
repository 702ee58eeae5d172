"""Experts of a build against the source experts that its plan names.

The high bank holds the source's bytes. The low bank is quantised again, so its error
is measured, and held against that of ``mx.quantize`` on the same matrix: an expert made
of another source expert is wrong by about twice the matrix's own square, an order of
magnitude more than the narrowest format allows.
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
from .stored_bytes import StoredBytes
from .verify_record import RecordedBuild
from .verify_report import Finding, LowExpert

#: The model's name of each matrix of an expert, and the release's.
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

#: A quantised matrix may be wrong by this many times what ``mx.quantize`` is, in squares:
#: errors that were weighed are larger where they do not matter.
ALLOWED = 3.0

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
        squares = total = 0.0
        worst: tuple[float, float, float, str] | None = None
        for matrix in MATRICES:
            dense = self._source_matrix(expert.layer, expert.source, matrix)
            error, square = squared_error(self._our_matrix(expert, matrix), dense)
            usual, _ = squared_error(_requantised(dense, self._format(expert)), dense)
            squares, total = squares + error, total + square
            excess = error - ALLOWED * usual
            if excess > 0 or error != error:
                found = (excess, error / square if square else error, usual, matrix)
                worst = max(worst, found) if worst else found
        yield LowExpert(
            expert.layer,
            expert.new,
            expert.source,
            squares / total if total else squares,
        )
        if worst is not None:
            _, error, usual, matrix = worst
            yield Finding(
                f"{expert} has a relative squared error of {error:.3g} in {matrix}, more "
                f"than {ALLOWED:g} times that of mx.quantize; "
                f"{self._told(expert, matrix)}. {_AGAIN}"
            )

    def _told(self, expert: Expert, matrix: str) -> str:
        """Which source expert ``matrix`` is, as its first rows tell."""
        mine = self._our_matrix(expert, matrix, _PROBE_ROWS).reshape(1, -1)
        theirs = self._probe(expert.layer, matrix)
        errors = mx.square(theirs - mine).sum(axis=1) / mx.square(theirs).sum(axis=1)
        relative = np.array(errors)
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
        """The first rows of every source expert, (E, rows * columns)."""
        rows = [
            self._source_matrix(layer, expert, matrix, _PROBE_ROWS).reshape(-1)
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

    def _our_matrix(
        self, expert: Expert, matrix: str, rows: int | None = None
    ) -> mx.array:
        module, row = self._bank(expert)
        parts = [
            self.ours.array(f"{module}.{matrix}.{suffix}", row, rows)
            for suffix in self._suffixes(expert)
        ]
        biases = parts[2] if expert.low else None
        return self._format(expert).dequantize(parts[0], parts[1], biases)

    def _source_matrix(
        self, layer: int, expert: int, matrix: str, rows: int | None = None
    ) -> mx.array:
        """A matrix of a source expert, dense in float32."""
        name = f"{expert_prefix(layer, expert)}{MATRICES[matrix]}.weight_"
        codes = self.source.array(f"{name}packed", rows=rows).view(mx.uint32)
        scales = self.source.array(f"{name}scale", rows=rows)
        return HIGH.dequantize(codes, scales, None)


def squared_error(found: mx.array, wanted: mx.array) -> tuple[float, float]:
    """Σ(found - wanted)² and Σ wanted², in float32 a row and float64 over rows."""
    wanted = wanted.astype(mx.float32)
    rows = mx.square(found.astype(mx.float32) - wanted).sum(axis=-1)
    squares = mx.square(wanted).sum(axis=-1)
    mx.eval(rows, squares)
    return _total(rows), _total(squares)


def _total(rows: mx.array) -> float:
    return float(np.array(rows, np.float64).sum())


def _requantised(dense: mx.array, stored: StoredFormat) -> mx.array:
    """``dense`` through ``mx.quantize`` with the scales of a build, bfloat16."""
    codes, scales, biases = mx.quantize(dense.astype(mx.bfloat16), **stored.parameters)
    return stored.dequantize(codes, scales, biases)
