"""Measures what a build would lose: probes of every class, and of every layer's experts.

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
from ..build.saliency import SaliencyTable
from ..build.sample_rows import Samples
from ..build.sealed_npz import read_sealed, write_sealed
from ..checkpoint.names import layer_of
from ..errors import PlanError
from .damage_table import DamageTable
from .matrix_classes import affine_format, class_matrices, inputs_of
from .probe_run import run_probes
from .probe_table import FILE_NAME, ProbeTable
from .probes import NO_LAYER, ClassProbe, DropProbe, LowProbe, Probe

#: Widths that classes are tried at; others lie between.
PROBED_BITS = (8, 4, 3)

#: Tokens to probe with: enough for means, few enough for hundreds of probes.
TOKENS = 4096

#: Bytes of hidden states that a pass may hold, unless told otherwise.
MEMORY = 64_000_000_000

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
        tokens, memory: see :func:`probe_damage`.
        restart: discard what was probed before.

    Computed in float32, so that rounding of activations is not taken for damage. Raises
    PlanError for a calibration or measurement of another checkpoint.
    """
    folder = Path(calibration)
    path, partial = folder / FILE_NAME, folder / PARTIAL
    table = SaliencyTable.load(folder)
    if dict(table.source) != dict(damage.source):
        raise PlanError(
            f"{folder} is of another checkpoint than the measured damage. Measure again "
            "with `kimi-k3 damage`."
        )
    with locked_folder(folder, PARTIAL, "probed", PlanError):
        if restart:
            _discard(partial)
        elif path.exists():
            found = ProbeTable.load(path)
            if found.low_bits.tolist() == list(damage.low_bits):
                return found
        stream = LayerStream(source, dtype=mx.float32)

        def moments(layer: int) -> LayerMoments:
            return LayerMoments.load(folder / MOMENTS / f"layer-{layer:03d}.npz")

        with writing(folder):
            result = probe_damage(
                stream,
                table,
                Samples.load(folder / SAMPLES),
                damage.drop,
                partial,
                low_bits=damage.low_bits,
                tokens=tokens,
                memory=memory,
                moments=moments,
                progress=progress,
            )
            result.save(path)
        _discard(partial)
    return result


def _discard(partial: Path) -> None:
    for path in partial.glob("probes-*.npz"):
        path.unlink()


def probe_damage(
    stream: LayerStream,
    table: SaliencyTable,
    samples: Samples,
    share: np.ndarray,
    partial: Path,
    *,
    low_bits: Sequence[int] = (2,),
    bits: Sequence[int] = PROBED_BITS,
    tokens: int = TOKENS,
    memory: int = MEMORY,
    moments: Callable[[int], LayerMoments | None] = lambda layer: None,
    progress: Callable[[Pass], None] | None = None,
) -> ProbeTable:
    """Run every probe.

    Args:
        stream: the source. table: its calibration. samples: the calibration's.
        share: (L, E), how much of its layer each expert is; of each layer the lesser
            half is dropped.
        partial: folder for what finished passes found.
        tokens: of the samples, in whole rows drawn evenly.
        memory: bytes of hidden states that a pass may hold.

    Raises PlanError for samples of other text or another tokenizer than the
    calibration's.
    """
    if samples.fingerprint != table.samples["fingerprint"]:
        raise PlanError(
            "the samples are not those of the calibration. Use its own samples.npz."
        )
    rows = _rows(samples, tokens)
    dropped = _lesser_halves(share, table)
    probes = _all_probes(stream, table, dropped, bits, low_bits)
    per_row = _state_bytes(stream, samples.length)
    at_once = max(1, int(memory // (per_row * len(rows))) - 1)
    passes = [probes[at : at + at_once] for at in range(0, len(probes), at_once)]
    partial.mkdir(parents=True, exist_ok=True)
    found: dict[Probe, np.ndarray] = {}
    clock = _Clock(passes, stream.num_layers, progress)
    for number, some in enumerate(passes, start=1):
        key = _key(stream, samples, rows, some)
        path = partial / f"probes-{key[:24]}.npz"
        values = _read(path, key, len(some))
        if values is None:
            result = run_probes(
                stream,
                samples.tokens[rows],
                samples.labels[rows],
                some,
                corpora=len(samples.corpora),
                rows_per_step=max(1, 2048 // samples.length),
                moments=moments,
                progress=partial_call(clock.tell, number),
            )
            values = np.stack([result[probe] for probe in some])
            about = {"values": values, "key": np.array(key)}
            write_sealed(path, _KIND, _VERSION, about)
        found |= dict(zip(some, values, strict=True))
    return _table(table, samples, rows, dropped, found, bits, low_bits)


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
        self.work = [
            [1 + sum(p.first < layer for p in some) for layer in range(1, layers + 1)]
            for some in passes
        ]
        self.began = time.monotonic()
        self.done = 0

    def tell(self, number: int, layer: int, _: int) -> None:
        """Layer ``layer``, from 1 on, of the pass is done."""
        now = self.work[number - 1]
        self.done += now[layer - 1]
        left = sum(now[layer:]) + sum(map(sum, self.work[number:]))
        seconds = time.monotonic() - self.began
        if self.progress is not None:
            self.progress(
                Pass(
                    number,
                    self.passes,
                    layer,
                    self.layers,
                    seconds,
                    seconds * left / self.done,
                )
            )


def _rows(samples: Samples, tokens: int) -> np.ndarray:
    """Rows spread evenly, so many that they have about ``tokens`` tokens."""
    count = min(len(samples.tokens), max(1, -(-tokens // samples.length)))
    return np.unique(np.linspace(0, len(samples.tokens) - 1, count).round().astype(int))


def _lesser_halves(share: np.ndarray, table: SaliencyTable) -> np.ndarray:
    """(L, E) bool: of each layer the half that matters least, but never too many."""
    dropped = np.zeros(share.shape, bool)
    for row, of_layer, experts in zip(dropped, share, table.experts, strict=True):
        count = min(int(experts) // 2, int(experts) - table.top_k)
        order = np.argsort(of_layer[: int(experts)], kind="stable")
        row[order[:count]] = True
    return dropped


def _all_probes(
    stream: LayerStream,
    table: SaliencyTable,
    dropped: np.ndarray,
    bits: Sequence[int],
    low_bits: Sequence[int],
) -> list[Probe]:
    """In the order of their first layers, so that a pass shares as much as it can."""
    firsts: dict[str, int] = {}
    for name, path, module in class_matrices(stream.model):
        if affine_format(4, inputs_of(module)) is None:
            continue
        layer = layer_of(path)
        first = NO_LAYER if layer is None else layer
        firsts[name] = min(first, firsts.get(name, first))
    probes: list[Probe] = [
        ClassProbe(name, width, first)
        for name, first in sorted(firsts.items())
        for width in bits
    ]
    for layer, out in zip(table.layers.tolist(), dropped, strict=True):
        probes += [LowProbe(layer, width) for width in low_bits]
        if out.any():
            probes.append(DropProbe(layer, tuple(np.flatnonzero(out).tolist())))
    return sorted(probes, key=lambda probe: probe.first)


def _state_bytes(stream: LayerStream, length: int) -> int:
    """Hidden states of one row and one probe: the sum and all blocks, in float32."""
    size = stream.args.attn_res_block_size
    blocks = 0 if size is None else -(-stream.num_layers // size)
    return 4 * (1 + blocks) * length * stream.args.hidden_size


def _key(
    stream: LayerStream, samples: Samples, rows: np.ndarray, probes: Sequence[Probe]
) -> str:
    """What the numbers of a pass depend on."""
    content: dict[str, Any] = {
        "source": stream.fingerprint,
        "samples": samples.fingerprint,
        "rows": rows.tolist(),
        "mlx": version("mlx"),
        "probes": [[type(probe).__name__, asdict(probe)] for probe in probes],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: str, probes: int) -> np.ndarray | None:
    """What a finished pass found; None if it is not there, or not as it was written."""
    try:
        arrays = read_sealed(path, _KIND, _VERSION, PlanError, "It is run again.")
    except PlanError:
        return None
    values = arrays.get("values")
    if values is None or str(arrays.get("key")) != key or len(values) != probes:
        return None
    return values


def _table(
    table: SaliencyTable,
    samples: Samples,
    rows: np.ndarray,
    dropped: np.ndarray,
    found: Mapping[Probe, np.ndarray],
    bits: Sequence[int],
    low_bits: Sequence[int],
) -> ProbeTable:
    names = sorted({p.name for p in found if isinstance(p, ClassProbe)})
    layers, corpora = table.layers.tolist(), len(samples.corpora)
    of_class = np.full((corpora, len(names), len(bits)), np.nan)
    low = np.zeros((corpora, len(low_bits), len(layers)))
    drop = np.zeros((corpora, len(layers)))
    for probe, values in found.items():
        if isinstance(probe, ClassProbe):
            at = names.index(probe.name), list(bits).index(probe.bits)
            of_class[:, at[0], at[1]] = values
        elif isinstance(probe, LowProbe):
            at = list(low_bits).index(probe.bits), layers.index(probe.first)
            low[:, at[0], at[1]] = values
        else:
            drop[:, layers.index(probe.first)] = values
    labels = samples.labels[rows]
    counts = np.bincount(labels[labels >= 0], minlength=corpora)
    return ProbeTable(
        corpora=tuple(samples.corpora),
        tokens=counts.astype(np.int64),
        layers=np.asarray(table.layers),
        classes=tuple(names),
        bits=np.array(bits, np.int64),
        class_divergence=of_class,
        low_bits=np.array(low_bits, np.int64),
        low_divergence=low,
        dropped=dropped,
        drop_divergence=drop,
        source=dict(table.source),
        samples=samples.fingerprint,
    )
