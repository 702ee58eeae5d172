"""A build against the source that it was converted from, layer by layer.

Nothing is loaded as a model: experts are read one by one, other tensors one by one, so
memory holds a matrix or two of each side.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from ..conversion.build_config import build_config
from ..conversion.provenance import RECORD, ShardRecord
from ..conversion.side_files import without_code
from ..errors import KimiK3Error
from .layer_stream import LayerStream
from .stored_bytes import StoredBytes
from .verify_experts import Expert, ExpertComparison, drawn, experts_of
from .verify_record import SHOWN, RecordedBuild, config_findings
from .verify_report import Check, ClassError, Comparison, Finding, LowExpert
from .verify_router import compare_router, router_bytes, router_names
from .verify_side_files import check_copied
from .verify_tensors import (
    BFLOAT16,
    FLOAT32,
    QUANTISED,
    VISION,
    Compared,
    TensorComparison,
)

_HIGH, _LOW, _ROUTER = "high bank", "low bank", "router"

_UNITS = {
    _ROUTER: "router tensors in the kept order",
    _HIGH: "experts equal byte for byte",
    _LOW: "experts within what their width allows",
    FLOAT32: "float32 parameters equal bit for bit",
    BFLOAT16: "bfloat16 parameters equal bit for bit",
    QUANTISED: "quantised matrices within what their width allows",
    VISION: "vision tensors equal byte for byte",
}

#: Told how many bytes of the source have been gone through.
Tell = Callable[[int, int], None]

_READ_BYTES = 1 << 24

_Found = TypeVar("_Found")


def open_source(
    build: RecordedBuild, path: Path, tell: Tell
) -> tuple[LayerStream | None, list[Check | Finding]]:
    """The source of ``build`` in ``path``, if it is the recorded one; what was seen.

    Where the record has hashes of whole shards, these are read through, which ``tell``
    is told of.
    """
    recorded, looked = build.record.source, 0
    faults: list[str] = []
    stream, seen = None, []
    try:
        stream = LayerStream(path)
        for name, wanted in recorded.items():
            found = ShardRecord.of(path / name)
            looked += 1
            faults += _shard_faults(name, wanted, found)
        if not faults and stream.fingerprint != build.record.fingerprint:
            faults.append("its config.json is another, or it has more shards")
        if not faults:
            faults += _hash_faults(path, recorded, tell)
    except KimiK3Error as error:
        faults.append(str(error))
    except OSError as error:
        faults.append(f"it cannot be read ({error.strerror})")
    if faults:
        more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
        told = (
            f"{path} is not the source that this build was made of: {faults[0]}{more}. "
            "Name the folder that was converted; nothing was compared with this one."
        )
        seen.append(Finding(told))
    seen.append(Check("source", looked, "shards as the record has them", len(recorded)))
    return None if faults else stream, seen


def _shard_faults(name: str, wanted: ShardRecord, found: ShardRecord) -> Iterator[str]:
    if found.size != wanted.size:
        yield f"{name} is {found.size:,} bytes, recorded are {wanted.size:,}"
    elif found.header_sha256 != wanted.header_sha256:
        yield f"{name} has another header than recorded"
    elif found.hub_sha256 and wanted.hub_sha256 not in (None, found.hub_sha256):
        yield f"the hub recorded another checksum for {name}"


def _hash_faults(
    path: Path, recorded: Mapping[str, ShardRecord], tell: Tell
) -> Iterator[str]:
    """Shards whose recorded full hash is not theirs."""
    hashed = {name: shard for name, shard in recorded.items() if shard.sha256}
    done, total = 0, sum(shard.size for shard in hashed.values())
    for name, shard in hashed.items():
        digest = hashlib.sha256()
        with (path / name).open("rb") as file:
            while raw := file.read(_READ_BYTES):
                digest.update(raw)
                done += len(raw)
                tell(done, total)
        if digest.hexdigest() != shard.sha256:
            yield f"{name} does not have its recorded SHA-256"


class SourceComparison:
    """Compares ``build`` with its source, opened as ``stream``.

    Args:
        experts: "all", or how many experts of each bank of a layer.
        seed: for drawing them.
        tell: is told how many bytes of the source have been gone through.
    """

    def __init__(
        self,
        build: RecordedBuild,
        stream: LayerStream,
        experts: int | str,
        seed: int,
        tell: Tell,
    ):
        self.build = build
        self.stream = stream
        self._experts = experts
        self._seed = seed
        self._tell = tell
        self._ours = StoredBytes(build.folder)
        self._theirs = StoredBytes(stream.folder)
        self._expert = ExpertComparison(build, self._ours, self._theirs)
        self._tensor = TensorComparison(build, self._ours, stream.folder, stream.model)
        self._chosen = {
            layer: drawn(experts_of(build, layer), experts, seed)
            for layer in build.plan.layers
        }
        self._looked: Counter[str] = Counter()
        self._compared: dict[int, list[int]] = defaultdict(list)
        self._low: list[LowExpert] = []
        self._classes: dict[str, list[Compared]] = defaultdict(list)
        self._done, self._total = 0, self._all_bytes()

    @property
    def result(self) -> Comparison:
        """What was measured."""
        return Comparison(
            source=str(self.stream.folder.path),
            experts=self._experts,
            seed=self._seed,
            compared=dict(self._compared),
            low_bank=tuple(self._low),
            classes=tuple(self._class_errors()),
        )

    def run(self) -> Iterator[Check | Finding]:
        """Compare everything; each check comes last, each finding as it is found."""
        config = {k: v for k, v in self.build.folder.config.items() if k != RECORD}
        wanted = build_config(self.stream.folder.config, self.build.plan)
        yield from config_findings(config, without_code(wanted))
        for layer in self._tensor.layers:
            if layer in self._chosen:
                yield from _few(self._layer_experts(layer), f"experts of layer {layer}")
                yield from self._layer_router(layer)
            where = "no layer" if layer is None else f"layer {layer}"
            yield from _few(self._layer_tensors(layer), f"tensors of {where}")
            # Or MLX keeps the memory for arrays of the same size, which may not come.
            mx.clear_cache()
        for kind, wanted in self._wanted().items():
            if wanted:
                yield Check(kind, self._looked[kind], _UNITS[kind], wanted)
        yield from check_copied(self.build.folder.path, self.stream.folder.path)

    def _wanted(self) -> dict[str, int]:
        chosen = [expert for layer in self._chosen.values() for expert in layer]
        low = sum(expert.low for expert in chosen)
        return {
            _ROUTER: sum(len(router_names(layer)) for layer in self._chosen),
            _HIGH: len(chosen) - low,
            _LOW: low,
        } | {
            kind: self._tensor.wanted(kind)
            for kind in (FLOAT32, BFLOAT16, QUANTISED, VISION)
        }

    def _layer_experts(self, layer: int) -> Iterator[Finding]:
        for expert in self._chosen[layer]:
            if self._expert.can_compare(expert):
                yield from _caught(self._one_expert(expert))
            self._step(self._expert.nbytes(expert))

    def _one_expert(self, expert: Expert) -> Iterator[Finding]:
        for found in (
            self._expert.low(expert) if expert.low else self._expert.high(expert)
        ):
            if isinstance(found, LowExpert):
                self._low.append(found)
            else:
                yield found
        self._looked[_LOW if expert.low else _HIGH] += 1
        self._compared[expert.layer].append(expert.new)

    def _layer_router(self, layer: int) -> Iterator[Finding]:
        compared = compare_router(self.build, self._ours, self._theirs, layer)
        for found in _caught(compared):
            if isinstance(found, Finding):
                yield found
            else:
                self._looked[_ROUTER] += 1
        self._step(router_bytes(layer, self._theirs))

    def _layer_tensors(self, layer: int | None) -> Iterator[Finding]:
        for found in _caught(self._tensor.compare(layer)):
            if isinstance(found, Finding):
                yield found
                continue
            self._looked[found.kind] += 1
            if found.kind == QUANTISED:
                self._classes[self._tensor.class_of(found)].append(found)
        self._step(self._tensor.nbytes(layer))

    def _class_errors(self) -> Iterator[ClassError]:
        for name, found in sorted(self._classes.items()):
            worst = max(found, key=lambda compared: compared.error)
            bits = 0 if worst.format is None else worst.format.bits
            yield ClassError(name, bits, len(found), worst.error, worst.name)

    def _all_bytes(self) -> int:
        experts = [expert for layer in self._chosen.values() for expert in layer]
        return (
            sum(map(self._expert.nbytes, experts))
            + sum(router_bytes(layer, self._theirs) for layer in self._chosen)
            + sum(map(self._tensor.nbytes, self._tensor.layers))
        )

    def _step(self, nbytes: int) -> None:
        self._done += nbytes
        self._tell(self._done, self._total)


def _caught(findings: Iterable[_Found]) -> Iterator[_Found | Finding]:
    """``findings``; an error that ends them is one, too."""
    try:
        yield from findings
    except KimiK3Error as error:
        yield Finding(str(error))


def _few(findings: Iterable[Finding], what: str) -> Iterator[Finding]:
    """The first few of ``findings``, and one that counts the others."""
    more = 0
    for number, finding in enumerate(findings):
        if number < SHOWN:
            yield finding
        else:
            more += 1
    if more:
        yield Finding(f"{more:,} more {what} have such a fault.")
