"""What a conversion will take: bytes, memory, disk and time, before the weights are there.

From a config and a plan, in seconds at any size.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..build.calibration_storage import PROCESS_BYTES, TENSOR_BYTES
from ..checkpoint.names import place
from ..checkpoint.source_layout import source_tensors
from ..config import ModelArgs
from ..errors import ConversionError
from ..planning.expert_plan import ExpertPlan
from .build_layout import BuildLayout, BuildShard, build_layout
from .byte_copy import BUFFER_BYTES
from .convert_checks import SPARE_BYTES
from .convert_shard import quantised_modules, stays_as_it_is
from .shard_writer import shard_size

#: Bytes a second, sustained: a slow outer disk, a network share, inner disks.
DISK_SPEEDS = (0.5e9, 1e9, 3e9, 6e9)

#: Weights a second that the quantiser works through. The first is what a server's core
#: reaches (benchmarks/results/quantizer.json: 4 to 8 million by width); MLX computes on
#: one core, however many there are. The second is assumed.
QUANTISING_SPEEDS = {"one CPU core": 6e6, "an Apple GPU": 200e6}

#: Weights that the quantiser works on at once, and bytes of each meanwhile; the GPU's.
_CHUNK, _CHUNK_BYTES = 1 << 24, 64


@dataclass(frozen=True)
class Estimate:
    """Hours at one speed of the disk (bytes a second), by what quantises.

    ``hours`` of a plan that quantises nothing are the same everywhere.
    """

    disk: float
    hours: Mapping[str, float]


@dataclass(frozen=True)
class ConversionCost:
    """The answer; sizes are bytes.

    Attributes:
        plan: kind of the plan, or "everything, as it is".
        experts: MoE layer → experts kept.
        source: all tensors of the source.
        read: those of them that are read, each once.
        written: all shards of the build with their headers.
        shards: of the build.
        quantised: weights that are quantised again.
        memory: by part, at the worst moment.
        free_disk: that the target needs at the start.
        estimates: one a speed of the disk.
    """

    plan: str
    experts: Mapping[int, int]
    source: int
    read: int
    written: int
    shards: int
    quantised: int
    memory: Mapping[str, int]
    free_disk: int
    estimates: tuple[Estimate, ...]

    @property
    def peak_memory(self) -> int:
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the sum included."""
        return {"peak_memory": self.peak_memory} | asdict(self)

    def text(self) -> str:
        """For a reader: sizes, then hours by the disk's speed."""
        from .conversion_cost_text import cost_text

        return cost_text(self)


def conversion_cost(
    config: Mapping[str, Any],
    plan: ExpertPlan | None = None,
    *,
    disk_speeds: Sequence[float] = DISK_SPEEDS,
    quantising_speeds: Mapping[str, float] = QUANTISING_SPEEDS,
) -> ConversionCost:
    """What converting the checkpoint of ``config``, of the release's format, takes.

    Args:
        plan: as :func:`~.convert.convert` takes it; None keeps everything as it is.
        disk_speeds: bytes a second at which the disk is read and written, which
            happens by turns.
        quantising_speeds: what quantises → weights a second.

    Raises PlanError for a plan of another checkpoint, ConversionError for speeds that
    are none.
    """
    for speed in (*disk_speeds, *quantising_speeds.values()):
        if not 0 < speed < float("inf"):
            raise ConversionError(f"a speed is {speed}, wanted more than 0.")
    args = ModelArgs.from_dict(dict(config))
    wanted = plan or ExpertPlan.identity(args.text_config)
    layout = build_layout(config, wanted)
    source = _Source(args, layout)
    written = sum(shard_size(shard.tensors) for shard in layout.shards)
    read = source.plain + sum(
        len(wanted.order(layer)) * nbytes for layer, nbytes in source.expert.items()
    )
    quantised = _quantised_weights(layout, wanted)
    return ConversionCost(
        plan=str(wanted.about.get("kind", "a plan")) if plan else "none: all as it is",
        experts={layer: len(wanted.order(layer)) for layer in wanted.layers},
        source=source.nbytes,
        read=read,
        written=written,
        shards=len(layout.shards),
        quantised=quantised,
        memory=_memory(layout, source, bool(quantised)),
        free_disk=written + SPARE_BYTES,
        estimates=tuple(
            Estimate(
                disk,
                {
                    name: ((read + written) / disk + quantised / speed) / 3600
                    for name, speed in quantising_speeds.items()
                },
            )
            for disk in disk_speeds
        ),
    )


class _Source:
    """Sizes of a source checkpoint, of which ``layout`` is made.

    Attributes:
        plain: bytes of all tensors but experts'.
        expert: layer → bytes of one expert.
        made: layer → bytes of what goes through memory, which is neither an expert nor
            copied as it is.
        largest: bytes of the largest such tensor outside the layers.
    """

    def __init__(self, args: ModelArgs, layout: BuildLayout):
        self.made: dict[int, int] = defaultdict(int)
        self.expert: dict[int, int] = defaultdict(int)
        self.nbytes = self.tensors = self.plain = self.largest = 0
        wanted = {t.name: t for shard in layout.shards for t in shard.tensors}
        for tensor in source_tensors(args):
            self.tensors += 1
            self.nbytes += tensor.nbytes
            if ".experts." in tensor.name:
                if ".experts.0." in tensor.name and tensor.layer is not None:
                    self.expert[tensor.layer] += tensor.nbytes
                continue
            self.plain += tensor.nbytes
            placement = place(tensor.name, args.text_config)
            if placement is None or stays_as_it_is(placement, tensor, wanted):
                continue
            if tensor.layer is None:
                self.largest = max(self.largest, tensor.nbytes)
            else:
                self.made[tensor.layer] += tensor.nbytes


def _quantised_weights(layout: BuildLayout, plan: ExpertPlan) -> int:
    """Weights of all matrices that ``plan`` quantises again."""
    modules = quantised_modules(layout, plan)
    count = 0
    for shard in layout.shards:
        for tensor in shard.tensors:
            module, _, suffix = tensor.name.rpartition(".")
            if suffix == "weight" and module in modules:
                count += tensor.nbytes * 8 // modules[module].bits
    return count


def _memory(layout: BuildLayout, source: _Source, quantises: bool) -> dict[str, int]:
    """Bytes by part in the shard that needs most."""

    def needed(shard: BuildShard) -> int:
        if shard.layer is None:
            return source.largest
        return source.made[shard.layer] + max(
            (t.nbytes for t in shard.tensors if ".switch_mlp." not in t.name), default=0
        )

    return {
        "what is remade of a layer, or head": max(map(needed, layout.shards)),
        "buffer for copying": BUFFER_BYTES,
        "quantising": _CHUNK * _CHUNK_BYTES if quantises else 0,
        "names of tensors, Python": source.tensors * TENSOR_BYTES + PROCESS_BYTES,
    }
