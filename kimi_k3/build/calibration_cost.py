"""What a calibration will take: bytes, memory, disk, arithmetic and time, beforehand.

From a config alone, in seconds at any size: no weights are needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.source_layout import SourceTensor, source_tensors
from ..config import ModelArgs, TextArgs
from ..errors import CalibrationError
from .calibration_checks import check_source
from .calibration_storage import (
    ITEM_BYTES,
    PROCESS_BYTES,
    TENSOR_BYTES,
    moment_bytes,
    moment_memory,
    partial_bytes,
    state_traffic,
    step_memory,
)
from .layer_flop import PARTS, layer_flop
from .streamed_pass import scratch_bytes, stored_blocks

#: Parts of the memory that are not MLX's.
SUMS, PROCESS = "sums of moments", "names of tensors, Python"


@dataclass(frozen=True)
class Speed:
    """A machine, as far as the time depends on it: sustained, not what is advertised.

    Attributes:
        disk: bytes a second, read and written.
        compute: floating-point operations a second, in this model's layers.
    """

    disk: float
    compute: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise CalibrationError(f"{name} is {value}, wanted more than 0.")


#: From a slow outer disk to the fastest inner ones, from small to large GPUs.
SPEEDS = tuple(
    Speed(disk * 1e9, compute * 1e12)
    for disk in (1, 3, 6, 14)
    for compute in (5, 15, 30)
)


@dataclass(frozen=True)
class LayerCost:
    """One layer: stored bytes, operations in all, bytes of other files meanwhile."""

    nbytes: int
    flop: int
    files: int


@dataclass(frozen=True)
class Estimate:
    """Hours at a :class:`Speed`, and the layers in which the disk is waited for."""

    speed: Speed
    hours: float
    layers_waiting: int


@dataclass(frozen=True)
class StoredSizes:
    """Stored bytes of a checkpoint: what is read of it, and what is not.

    ``not_read`` names the other parts.
    """

    embedding: int
    layers: tuple[int, ...]
    output: int
    not_read: Mapping[str, int]

    @property
    def read(self) -> int:
        return self.embedding + sum(self.layers) + self.output

    @property
    def total(self) -> int:
        return self.read + sum(self.not_read.values())


@dataclass(frozen=True)
class CalibrationCost:
    """The answer. Sizes are bytes; ``memory`` and ``disk`` are by part.

    Attributes:
        rows, length: of the samples; padding is computed like any token.
        step_tokens, memory_limit, moments: as :func:`~.calibrate.calibrate` takes them.
        sizes: of the checkpoint.
        largest_layer: its number, from 0 on.
        memory: at the layer where most is needed.
        disk: while it runs.
        kept: what stays of it.
        flop: in all, by part.
        layers: of each layer.
        estimates: one a speed.
    """

    rows: int
    length: int
    step_tokens: int
    memory_limit: int
    moments: bool
    sizes: StoredSizes
    largest_layer: int
    memory: Mapping[str, int]
    disk: Mapping[str, int]
    kept: int
    flop: Mapping[str, int]
    layers: tuple[LayerCost, ...]
    estimates: tuple[Estimate, ...]

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def peak_memory(self) -> int:
        return sum(self.memory.values())

    @property
    def array_memory(self) -> int:
        """The part of it that MLX holds, and reports as its peak."""
        outside = (PROCESS, SUMS)
        return sum(n for part, n in self.memory.items() if part not in outside)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the sums included."""
        found = asdict(self)
        sums = {
            "tokens": self.tokens,
            "bytes_read": self.sizes.read,
            "bytes_stored": self.sizes.total,
            "peak_memory": self.peak_memory,
            "scratch_disk": sum(self.disk.values()),
            "total_flop": sum(self.flop.values()),
        }
        return sums | found

    def text(self) -> str:
        """For a reader: sizes, then hours by disk and compute speed."""
        from .calibration_cost_text import cost_text

        return cost_text(self)


def calibration_cost(
    args: ModelArgs,
    *,
    rows: int,
    length: int,
    step_tokens: int,
    memory_limit: int,
    moments: bool = True,
    corpora: int = 1,
    speeds: Sequence[Speed] = SPEEDS,
    sizes: StoredSizes | None = None,
) -> CalibrationCost:
    """What calibrating the checkpoint of ``args`` takes.

    Args:
        rows, length: of the samples, in tokens.
        step_tokens: tokens that go through a layer together, in whole rows.
        memory_limit: bytes of hidden states to hold in memory.
        moments: whether input moments are recorded.
        corpora: of the samples.
        speeds: of the machines to estimate for.
        sizes: of a folder; else those of the source format.

    Raises CalibrationError for settings that :func:`~.calibrate.calibrate` refuses,
    ConfigError for a model without experts.
    """
    for name, value in (
        ("rows", rows),
        ("length", length),
        ("step_tokens", step_tokens),
        ("corpora", corpora),
    ):
        if value < 1:
            raise CalibrationError(f"{name} is {value}, wanted 1 or more.")
    text = args.text_config
    check_source(text)
    layout = _Layout(args)
    sizes = sizes or layout.sizes
    if not moments:  # only those of the head need what comes before it
        not_read = {**sizes.not_read, "final norm": sizes.output}
        sizes = replace(sizes, output=0, not_read=not_read)
    tokens = rows * length
    array = tokens * text.hidden_size * ITEM_BYTES
    traffic = state_traffic(text, array, memory_limit)
    flop: dict[str, int] = dict.fromkeys(PARTS, 0)
    layers, moment_files = [], 0
    for layer, tensors in enumerate(layout.layers):
        parts = layer_flop(text, layer, tensors, length, moments=moments)
        for part, count in parts.items():
            flop[part] += tokens * count
        written = moment_bytes(text, layer, tensors, corpora) if moments else 0
        moment_files += written
        files = traffic.read[layer] + traffic.written[layer] + written
        layers.append(
            LayerCost(sizes.layers[layer], tokens * sum(parts.values()), files)
        )
    rows_per_step = min(rows, max(1, step_tokens // length))
    partial = sum(partial_bytes(text, i, corpora) for i in range(len(layers)))
    states = scratch_bytes(text, rows, length, ITEM_BYTES)
    blocks = stored_blocks(text) * array
    return CalibrationCost(
        rows=rows,
        length=length,
        step_tokens=rows_per_step * length,
        memory_limit=memory_limit,
        moments=moments,
        sizes=sizes,
        largest_layer=max(range(len(layers)), key=lambda i: sizes.layers[i]),
        memory={
            **_memory(text, sizes, traffic.held, rows_per_step, length, moments),
            PROCESS: layout.tensors * TENSOR_BYTES + PROCESS_BYTES,
        },
        disk={
            "hidden states, before and after a layer": states - blocks,
            "residual blocks": blocks,
            "input moments": moment_files,
            "sums of finished layers": partial,
        },
        kept=moment_files + partial,
        flop=flop,
        layers=tuple(layers),
        estimates=tuple(_estimate(sizes, layers, array, speed) for speed in speeds),
    )


class _Layout:
    """The source format of a config: its sizes, and the tensors of each layer."""

    def __init__(self, args: ModelArgs):
        self.layers: list[list[SourceTensor]] = [
            [] for _ in range(args.text_config.num_hidden_layers)
        ]
        names = "embedding", "output", "head", "vision"
        parts: dict[str, int] = dict.fromkeys(names, 0)
        self.tensors = 0
        for tensor in source_tensors(args):
            self.tensors += 1
            if tensor.layer is not None:
                self.layers[tensor.layer].append(tensor)
            else:
                parts[_part_of(tensor.name)] += tensor.nbytes
        self.sizes = StoredSizes(
            embedding=parts["embedding"],
            layers=tuple(sum(t.nbytes for t in layer) for layer in self.layers),
            output=parts["output"],
            not_read={name: parts[name] for name in ("head", "vision")},
        )


def _part_of(name: str) -> str:
    if not name.startswith("language_model."):
        return "vision"
    if ".embed_tokens." in name:
        return "embedding"
    return "head" if ".lm_head." in name else "output"


def _memory(
    text: TextArgs,
    sizes: StoredSizes,
    held: int,
    rows: int,
    length: int,
    moments: bool,
) -> dict[str, int]:
    """Bytes by part at the layer where most is needed."""
    following = (*sizes.layers[1:], 0)
    found: list[dict[str, int]] = []
    for layer, ahead in enumerate(following):
        found.append(
            {
                "the layer in use": sizes.layers[layer],
                "the next layer, being read": ahead,
                "hidden states held": held,
                **step_memory(text, layer, rows, length, moments=moments),
                SUMS: moment_memory(text, layer) if moments else 0,
            }
        )
    return max(found, key=lambda parts: sum(parts.values()))


def _estimate(
    sizes: StoredSizes, layers: Sequence[LayerCost], array: int, speed: Speed
) -> Estimate:
    """A layer is read while the one before computes; both share the disk."""
    first = sizes.embedding + array + layers[0].nbytes
    seconds, waiting = first / speed.disk, 0
    following = [layer.nbytes for layer in layers[1:]] + [sizes.output]
    for layer, ahead in zip(layers, following, strict=True):
        disk = (ahead + layer.files) / speed.disk
        work = layer.flop / speed.compute + layer.files / speed.disk
        waiting += disk > work
        seconds += max(disk, work)
    return Estimate(speed, seconds / 3600, waiting)


def sizes_of_folder(folder: str | Path) -> StoredSizes:
    """The sizes of what lies in ``folder``, a checkpoint of any format.

    Raises what :class:`~.layer_stream.LayerStream` raises for a folder it cannot run.
    """
    from .layer_stream import EMBEDDING, HEAD, OUTPUT, LayerStream

    stream = LayerStream(folder)
    embedding, output = stream.nbytes(EMBEDDING), stream.nbytes(OUTPUT)
    layers = tuple(stream.nbytes(i) for i in range(stream.num_layers))
    head = stream.nbytes(HEAD)
    rest = stream.folder.data_bytes - embedding - output - sum(layers) - head
    return StoredSizes(embedding, layers, output, {"head": head, "vision": rest})
