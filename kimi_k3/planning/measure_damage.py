"""Measures what every choice of a plan costs, on a source and its calibration.

The source is read once, layer by layer, while the next is on its way. What a finished
layer gave is safe on disk, so a run that is stopped goes on where it was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from ..build.folder_lock import locked_folder
from ..build.journal import writing
from ..build.layer_stream import HEAD, LayerStream
from ..build.saliency import TOOL
from ..checkpoint.names import PREFIX, layer_of
from ..conversion.build_config import EXPERT_MATRICES
from ..conversion.importance import Importance
from ..conversion.source_files import check_release_format
from ..errors import PartialResultError, PlanError
from ..machine.hardware import read_machine
from .damage_table import FILE_NAME, NONE, DamageTable
from .expert_plan import LOW_BITS, LOW_GROUP
from .layer_damage import (
    ClassMatrix,
    LayerDamage,
    measure_classes,
    measure_experts,
    no_experts,
)
from .matrix_classes import CLASS_BITS, class_matrices

#: Defaults: experts of a layer, and rows of a matrix, that are quantised.
EXPERTS, ROWS = 16, 1024

PARTIAL = "damage-partial"
RESTART = "--restart discards what was measured, and starts over."


@dataclass(frozen=True)
class Progress:
    """How far a measurement is, when a layer is done.

    Attributes:
        layer, layers: the layer that is done, from 0 on, and how many there are.
        bytes_done, bytes_left: stored bytes, of this process's share.
        seconds: since this process began.
    """

    layer: int
    layers: int
    bytes_done: int
    bytes_left: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """What is left to do, at the speed so far."""
        if not self.bytes_done:
            return None
        return self.seconds * self.bytes_left / self.bytes_done


def measure_damage(
    source: str | Path,
    calibration: str | Path,
    *,
    low_bits: Sequence[int] = (2,),
    experts_per_layer: int = EXPERTS,
    rows: int = ROWS,
    out: str | Path | None = None,
    restart: bool = False,
    progress: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> DamageTable:
    """Measure the checkpoint ``source`` with the moments of its ``calibration``.

    Args:
        source: a folder in Moonshot's own format.
        calibration: the folder of a finished calibration of it, with moments; partial
            results are kept there.
        low_bits: widths of the low bank to measure: 2, 3, 4.
        experts_per_layer: experts to quantise in each layer; the others are given the
            layer's mean ratio. What dropping costs is measured of all.
        rows: of a matrix to quantise at most.
        out: the file to write; default ``damage.npz`` in ``calibration``.
        restart: discard what was measured before.
        progress: is told of each layer that is done.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then: ConversionError for another source than the calibration's or missing moments,
    PartialResultError for partial results that are damaged or of other settings.
    """
    tell = tell or (lambda text: None)
    widths = tuple(sorted(set(low_bits)))
    if not widths or not set(widths) <= set(LOW_BITS):
        raise PlanError(
            f"low_bits are {list(low_bits)}; wanted some of "
            f"{', '.join(map(str, LOW_BITS))}."
        )
    for name, value in (("experts_per_layer", experts_per_layer), ("rows", rows)):
        if value < 1:
            raise PlanError(f"{name} is {value}, wanted 1 or more.")
    calibration = Path(calibration)
    path = calibration / FILE_NAME if out is None else Path(out)
    if not path.parent.is_dir():
        raise PlanError(f"{path.parent} is no folder; {path} cannot be written.")
    run = _Run(LayerStream(source), calibration, widths, experts_per_layer, rows)
    for note in run.stream.notes:
        tell(note)
    with locked_folder(calibration, PARTIAL, "measured", PlanError):
        if restart:
            _discard(calibration / PARTIAL)
        elif (table := _finished(path, run.settings)) is not None:
            tell(f"{path} holds this measurement, finished; there is nothing to do.")
            return table
        table = run.table(progress, tell)
        with writing(path):
            table.save(path)
        _discard(calibration / PARTIAL)
    return table


class _Run:
    """One measurement: its settings, its parts and what they gave."""

    def __init__(
        self,
        stream: LayerStream,
        calibration: Path,
        low_bits: tuple[int, ...],
        experts: int,
        rows: int,
    ):
        check_release_format(stream.folder)
        self.stream = stream
        self.low_bits, self.experts, self.rows = low_bits, experts, rows
        self.folder = calibration / PARTIAL
        text = stream.args
        self.moe = text.moe_layers
        for columns in {text.expert_hidden_size, text.moe_intermediate_size}:
            if columns % LOW_GROUP:
                raise PlanError(
                    f"experts have matrices of {columns} columns, which a low bank's "
                    f"groups of {LOW_GROUP} do not divide: there can be none."
                )
        self.matrices: dict[int | None, list[ClassMatrix]] = {}
        for matrix in class_matrices(stream.model):
            self.matrices.setdefault(layer_of(matrix[1]), []).append(matrix)
        paths = [path for found in self.matrices.values() for _, path, _ in found]
        paths += [
            f"{_experts_path(n)}.{name}" for n in self.moe for name in EXPERT_MATRICES
        ]
        self.importance = Importance(calibration, stream.fingerprint, paths)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Everything that the bits of the result depend on; plain JSON values."""
        return {
            "source": self.stream.fingerprint,
            "moments": self.importance.digest,
            "low_bits": list(self.low_bits),
            "experts_per_layer": self.experts,
            "rows": self.rows,
            "tool": TOOL,
            "mlx": version("mlx"),
            "device": read_machine().device,
        }

    def table(
        self,
        progress: Callable[[Progress], None] | None,
        tell: Callable[[str], None],
    ) -> DamageTable:
        """Measure what is left, and put all parts together."""
        found = self._kept()
        start = len(found)
        if start:
            tell(f"layers 0 to {start - 1} were measured before.")
        sizes = [self.stream.nbytes(n) for n in range(self.stream.num_layers)]
        began = time.monotonic()
        for layer, _, _ in self.stream.layers(start):
            found[layer] = self._layer(layer)
            with writing(self.folder):
                found[layer].save(self._path(layer), self.settings)
            if progress is not None:
                progress(
                    Progress(
                        layer=layer,
                        layers=len(sizes),
                        bytes_done=sum(sizes[start : layer + 1]),
                        bytes_left=sum(sizes[layer + 1 :]),
                        seconds=time.monotonic() - began,
                    )
                )
        return self._together([found[layer] for layer in sorted(found)])

    def _kept(self) -> dict[int, LayerDamage]:
        """Layers that were measured before, from 0 on without a gap."""
        found: dict[int, LayerDamage] = {}
        for layer in range(self.stream.num_layers):
            path = self._path(layer)
            if not path.exists():
                break
            found[layer], settings = LayerDamage.load(path, RESTART)
            refuse_other(path, settings, self.settings)
        return found

    def _layer(self, layer: int) -> LayerDamage:
        experts = no_experts(self.low_bits)
        if layer in self.moe:
            prefix = _experts_path(layer)
            experts = measure_experts(
                _modules(self.stream, prefix),
                prefix,
                self.importance,
                low_bits=self.low_bits,
                count=self.experts,
                rows=self.rows,
            )
        matrices = self.matrices.get(layer, [])
        classes = measure_classes(matrices, self.importance, self.rows)
        return LayerDamage(classes=classes, **experts)

    def _outside(self) -> LayerDamage:
        """The embedding and the head."""
        with ExitStack() as stack:
            stack.enter_context(self.stream.embed())
            if self.stream.nbytes(HEAD):
                stack.enter_context(self.stream.head())
            matrices = self.matrices.get(None, [])
            classes = measure_classes(matrices, self.importance, self.rows)
        return LayerDamage(classes=classes, **no_experts(self.low_bits))

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.npz"

    def _together(self, layers: Sequence[LayerDamage]) -> DamageTable:
        classes: dict[str, np.ndarray] = {}
        for part in (*layers, self._outside()):
            for name, damage in part.classes.items():
                classes[name] = classes.get(name, 0) + damage
        parts = [layers[n] for n in self.moe]
        counts = [len(part.drop) for part in parts]
        samples = max(len(part.sampled) for part in parts)
        shape = (len(parts), max(counts))
        drop, low = np.zeros(shape), np.zeros((len(self.low_bits), *shape))
        sampled = np.full((len(parts), samples), NONE, np.int64)
        for at, part in enumerate(parts):
            drop[at, : counts[at]] = part.drop
            low[:, at, : counts[at]] = part.low
            sampled[at, : len(part.sampled)] = part.sampled
        return DamageTable(
            source={"fingerprint": self.stream.fingerprint},
            layers=np.array(self.moe, np.int64),
            experts=np.array(counts, np.int64),
            low_bits=self.low_bits,
            drop=drop,
            low=low,
            classes=tuple(sorted(classes)),
            bits=CLASS_BITS,
            classes_damage=np.array([classes[name] for name in sorted(classes)]),
            sampled_experts=sampled,
            settings=self.settings,
        )


def _experts_path(layer: int) -> str:
    return f"{PREFIX}model.layers.{layer}.mlp.switch_mlp"


def _modules(stream: LayerStream, prefix: str) -> dict[str, nn.Module]:
    """The stacked expert matrices in the module ``prefix``, by name."""
    modules = dict(stream.model.named_modules())
    return {name: modules[f"{prefix}.{name}"] for name in EXPERT_MATRICES}


def _finished(path: Path, settings: Mapping[str, Any]) -> DamageTable | None:
    """The result in ``path``, if one is there; it must be of these settings."""
    if not path.exists():
        return None
    try:
        table = DamageTable.load(path)
    except PlanError as error:
        raise PartialResultError(f"{error} {RESTART}") from error
    refuse_other(path, table.settings, settings)
    return table


def refuse_other(
    path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Raise PartialResultError if the settings in ``path`` are not those of now."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise PartialResultError(
                f"{path} was measured with {name} = {found.get(name)!r}, which is "
                f"{value!r} now. {RESTART}"
            )


def _discard(folder: Path) -> None:
    for path in folder.glob("layer-*.npz"):
        path.unlink()
