"""Measures how far the answers move: every probe of a checkpoint, on calibrated text.

One part of ``kimi-k3 damage``. Probes run in passes, each of which reads the checkpoint
once; what a finished pass found is kept, so that a killed run repeats one pass at most.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial as partial_call
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..build.folder_lock import locked_folder
from ..build.input_moments import LayerMoments
from ..build.journal import MOMENTS, SAMPLES, writing
from ..build.layer_stream import LayerStream
from ..build.saliency import TOOL, SaliencyTable
from ..build.sample_rows import Samples
from ..build.sealed_npz import read_sealed, write_sealed
from ..errors import PlanError
from ..machine.hardware import read_machine
from .damage_table import DamageTable
from .measure_damage import refuse_other
from .probe_list import PROBED_BITS, all_probes, lesser_halves, passes_of, work_of
from .probe_run import run_probes
from .probe_table import FILE_NAME, ProbeTable
from .probe_text import probe_windows
from .probes import ClassProbe, LowProbe, Probe

#: Tokens to probe with: enough for means, few enough for hundreds of probes.
TOKENS = 4096

#: Bytes of hidden states that a pass may hold, unless told otherwise.
MEMORY = 64_000_000_000

#: Tokens that go through a layer together.
STEP_TOKENS = 2048

PARTIAL = "probes-partial"

_KIND, _VERSION = "probes of one pass", 1


@dataclass(frozen=True)
class Pass:
    """How far a run is.

    Attributes:
        number, passes: the pass that runs, from 1 on, and how many there are.
        layer, layers: layers that are done in it, and how many there are.
        seconds: since the run began.
        seconds_left: at the speed so far.
    """

    number: int
    passes: int
    layer: int
    layers: int
    seconds: float
    seconds_left: float


def measure_probes(
    source: str | Path,
    calibration: str | Path,
    damage: DamageTable,
    *,
    tokens: int = TOKENS,
    memory: int = MEMORY,
    restart: bool = False,
    progress: Callable[[Pass], None] | None = None,
) -> ProbeTable:
    """Probe the checkpoint ``source`` on text of its ``calibration``; the file is kept.

    Args:
        damage: what was measured of the same source; tells which experts matter least,
            and the widths of the low bank.
        tokens: of the calibration's samples, an equal part of each corpus.
        memory: bytes of hidden states that a pass may hold.
        restart: discard what was probed before.

    Computed in float32, so that rounding of activations is not taken for damage. Raises
    PlanError for a calibration or measurement of another checkpoint, PartialResultError
    for a finished table of other settings.
    """
    if tokens < 1:
        raise PlanError(f"probes are to read {tokens} tokens; wanted 1 or more.")
    folder = Path(calibration)
    table, samples = SaliencyTable.load(folder), Samples.load(folder / SAMPLES)
    if dict(table.source) != dict(damage.source):
        raise PlanError(
            f"{folder} is of another checkpoint than the measured damage. Measure again "
            "with `kimi-k3 damage`."
        )
    if samples.fingerprint != table.samples["fingerprint"]:
        raise PlanError(
            f"{folder / SAMPLES} is not what was calibrated on. Take it from a copy, or "
            "calibrate again."
        )
    path = folder / FILE_NAME
    stream = LayerStream(source, dtype=mx.float32)
    run = _Run(stream, folder, table, samples, damage, tokens)
    with locked_folder(folder, PARTIAL, "probed", PlanError):
        if restart:
            _discard(folder / PARTIAL)
        elif path.exists():
            found = ProbeTable.load(path)
            refuse_other(path, found.settings, run.settings)
            return found
        with writing(folder):
            result = run.table(memory, progress)
            result.save(path)
        _discard(folder / PARTIAL)
    return result


class _Run:
    """All probes of one checkpoint, and what they gave."""

    def __init__(
        self,
        stream: LayerStream,
        folder: Path,
        table: SaliencyTable,
        samples: Samples,
        damage: DamageTable,
        tokens: int,
    ):
        self.stream, self.folder = stream, folder
        self.calibrated, self.samples = table, samples
        self.tokens, self.labels = probe_windows(samples, tokens)
        experts = damage.experts.tolist()
        self.dropped = lesser_halves(damage.drop, experts, table.top_k)
        self.bits, self.low_bits = PROBED_BITS, tuple(damage.low_bits)
        self.probes = all_probes(
            stream.model, self.dropped, bits=self.bits, low_bits=self.low_bits
        )
        self.settings: Mapping[str, Any] = {
            "source": stream.fingerprint,
            "samples": samples.fingerprint,
            "moments": damage.settings.get("moments"),
            "tokens": tokens,
            "low_bits": list(self.low_bits),
            "dropped": hashlib.sha256(self.dropped.tobytes()).hexdigest(),
            "tool": TOOL,
            "mlx": version("mlx"),
            "device": read_machine().device,
        }

    def table(self, memory: int, progress: Callable[[Pass], None] | None) -> ProbeTable:
        """Run what is left, and put all passes together."""
        text = self.stream.args
        passes = passes_of(self.probes, text, self.tokens.size, memory)
        clock = _Clock(passes, self.stream.num_layers, progress)
        found: dict[Probe, np.ndarray] = {}
        for number, some in enumerate(passes, start=1):
            values = self._kept(some)
            if values is None:
                values = self._measured(some, partial_call(clock.tell, number))
            else:
                clock.skip(number)
            found |= dict(zip(some, values, strict=True))
        return self._together(found)

    def _measured(
        self, some: Sequence[Probe], tell: Callable[[int, int], None]
    ) -> np.ndarray:
        result = run_probes(
            self.stream,
            self.tokens,
            self.labels,
            some,
            corpora=len(self.samples.corpora),
            rows_per_step=max(1, STEP_TOKENS // self.tokens.shape[1]),
            moments=self._moments,
            progress=tell,
        )
        values = np.stack([result[probe] for probe in some])
        about = {"values": values, "key": np.array(self._key(some))}
        write_sealed(self._path(some), _KIND, _VERSION, about)
        return values

    def _moments(self, layer: int) -> LayerMoments:
        return LayerMoments.load(self.folder / MOMENTS / f"layer-{layer:03d}.npz")

    def _key(self, some: Sequence[Probe]) -> str:
        """What the numbers of a pass depend on."""
        probes = [[type(probe).__name__, asdict(probe)] for probe in some]
        content = json.dumps([self.settings, probes], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _path(self, some: Sequence[Probe]) -> Path:
        return self.folder / PARTIAL / f"probes-{self._key(some)[:24]}.npz"

    def _kept(self, some: Sequence[Probe]) -> np.ndarray | None:
        """What a finished pass found; None if it is not there, or not as it was written."""
        again = "It is run again."
        try:
            arrays = read_sealed(self._path(some), _KIND, _VERSION, PlanError, again)
        except PlanError:
            return None
        if str(arrays.get("key")) != self._key(some):
            return None
        return arrays.get("values")

    def _together(self, found: Mapping[Probe, np.ndarray]) -> ProbeTable:
        names = sorted({p.name for p in found if isinstance(p, ClassProbe)})
        layers, corpora = self.calibrated.layers.tolist(), len(self.samples.corpora)
        of_class = np.full((corpora, len(names), len(self.bits)), np.nan)
        low = np.full((corpora, len(self.low_bits), len(layers)), np.nan)
        drop = np.zeros((corpora, len(layers)))
        for probe, values in found.items():
            if isinstance(probe, ClassProbe):
                width = self.bits.index(probe.bits)
                of_class[:, names.index(probe.name), width] = values
            elif isinstance(probe, LowProbe):
                width = self.low_bits.index(probe.bits)
                low[:, width, layers.index(probe.first)] = values
            else:
                drop[:, layers.index(probe.first)] = values
        counts = np.bincount(self.labels[self.labels >= 0], minlength=corpora)
        calibrated = self.calibrated.tokens
        return ProbeTable(
            corpora=tuple(self.samples.corpora),
            tokens=counts.astype(np.int64),
            shares=calibrated / calibrated.sum(),
            layers=np.asarray(self.calibrated.layers),
            classes=tuple(names),
            bits=np.array(self.bits, np.int64),
            class_divergence=of_class,
            low_bits=np.array(self.low_bits, np.int64),
            low_divergence=low,
            dropped=self.dropped,
            drop_divergence=drop,
            source=dict(self.calibrated.source),
            samples=self.samples.fingerprint,
            settings=self.settings,
        )


class _Clock:
    """Tells how far a run is; a layer takes the longer the more probes go through it."""

    def __init__(
        self,
        passes: Sequence[Sequence[Probe]],
        layers: int,
        progress: Callable[[Pass], None] | None,
    ):
        self.progress = progress
        self.passes, self.layers = len(passes), layers
        self.work = [work_of(some, layers) for some in passes]
        self.left = sum(map(sum, self.work))
        self.began = time.monotonic()
        self.done = 0

    def skip(self, number: int) -> None:
        """The pass was finished before."""
        self.left -= sum(self.work[number - 1])

    def tell(self, number: int, layer: int, _: int) -> None:
        """Layer ``layer``, from 1 on, of the pass is done."""
        now = self.work[number - 1][layer - 1]
        self.done, self.left = self.done + now, self.left - now
        seconds = time.monotonic() - self.began
        left = seconds * self.left / self.done
        if self.progress is not None:
            where = number, self.passes, layer, self.layers
            self.progress(Pass(*where, seconds, left))


def _discard(partial: Path) -> None:
    for path in partial.glob("probes-*.npz"):
        path.unlink()
