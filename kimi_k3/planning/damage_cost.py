"""What measuring damage will take: bytes, memory, arithmetic and hours, beforehand.

From a config alone. How fast a machine computes and quantises is assumed; the counts of
probes, passes, bytes and operations are not.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..build.calibration_cost import SPEEDS, Speed
from ..build.layer_flop import layer_flop
from ..checkpoint.source_layout import SourceTensor, source_tensors
from ..config import ModelArgs
from ..conversion.conversion_cost import QUANTISING_SPEEDS
from ..errors import PlanError
from ..models import Model
from .matrix_classes import CLASS_BITS, class_matrices
from .measure_damage import EXPERTS, ROWS
from .probe_damage import MEMORY, TOKENS
from .probe_list import all_probes, passes_of, state_bytes, work_of
from .probe_text import WINDOW
from .probes import ClassProbe, LowProbe, Probe


@dataclass(frozen=True)
class DamageHours:
    """Hours at a speed of disk and computing, with quantising at one of its speeds."""

    speed: Speed
    quantiser: str
    hours: float


@dataclass(frozen=True)
class DamageCost:
    """The answer; sizes are bytes.

    Attributes:
        stored: of the checkpoint. read: in all, once for errors and once a pass.
        probes, passes: how many. tokens: that each probe reads.
        memory: of a pass: hidden states, the layer in use and the next.
        flop: operations of all probes.
        quantised: weights that are quantised, for errors and for probes together.
        estimates: hours.
    """

    stored: int
    read: int
    probes: int
    passes: int
    tokens: int
    memory: int
    flop: int
    quantised: int
    estimates: tuple[DamageHours, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def text(self) -> str:
        """For a reader."""
        lines = [
            f"{self.probes} probes of {self.tokens:,} tokens, in {self.passes} passes",
            "",
            f"{'checkpoint':40}{self.stored / 1e9:12,.2f} GB",
            f"{'read, once for errors and once a pass':40}{self.read / 1e9:12,.2f} GB",
            f"{'peak memory':40}{self.memory / 1e9:12,.2f} GB",
            f"{'arithmetic of the probes':40}{self.flop / 1e15:12,.2f} PFLOP",
            f"{'weights quantised':40}{self.quantised / 1e9:12,.2f} billion",
            "",
            f"{'hours':24}" + "".join(f"{n:>18}" for n in QUANTISING_SPEEDS),
        ]
        rows: dict[Speed, dict[str, float]] = defaultdict(dict)
        for estimate in self.estimates:
            rows[estimate.speed][estimate.quantiser] = estimate.hours
        for speed, hours in rows.items():
            name = f"{speed.disk / 1e9:g} GB/s, {speed.compute / 1e12:g} TFLOPS"
            cells = "".join(f"{hours[n]:18.3g}" for n in QUANTISING_SPEEDS)
            lines.append(f"  {name:22}{cells}")
        return "\n".join(
            [
                *lines,
                "",
                "Columns: what quantises, at an assumed speed; rows: sustained speeds of",
                "the disk and of computing. --memory-limit trades passes for memory.",
            ]
        )


def damage_cost(
    config: dict[str, Any],
    *,
    low_bits: Sequence[int] = (2,),
    tokens: int = TOKENS,
    memory: int = MEMORY,
    probes: bool = True,
    corpora: int = 1,
    speeds: Sequence[Speed] = SPEEDS,
) -> DamageCost:
    """What ``kimi-k3 damage`` takes on the checkpoint of ``config``, of Moonshot's format.

    Args:
        low_bits, tokens, memory, probes: as :func:`~.measure.damage` takes them.
        corpora: of the calibration; each has a window of text at least.
    """
    if tokens < 1 or memory < 1 or corpora < 1:
        raise PlanError("tokens, memory and corpora must be 1 or more.")
    args = ModelArgs.from_dict(config)
    text = args.text_config
    layers: list[list[SourceTensor]] = [[] for _ in range(text.num_hidden_layers)]
    stored = 0
    for tensor in source_tensors(args):
        stored += tensor.nbytes if tensor.name.startswith("language_model.") else 0
        if tensor.layer is not None:
            layers[tensor.layer].append(tensor)
    windows = max(corpora, -(-tokens // WINDOW))
    read_tokens = windows * WINDOW
    some = _probes(args, low_bits) if probes else []
    passes = passes_of(some, text, read_tokens, memory) if some else []
    flop = [
        sum(layer_flop(text, i, found, WINDOW, moments=False).values())
        for i, found in enumerate(layers)
    ]
    operations = read_tokens * sum(
        count * of_layer
        for group in passes
        for count, of_layer in zip(work_of(group, len(layers)), flop, strict=True)
    )
    largest = max(sum(t.nbytes for t in found) for found in layers)
    most = max((len(group) for group in passes), default=0)
    quantised = _quantised(args, some, low_bits)
    read = stored * (1 + len(passes))
    return DamageCost(
        stored=stored,
        read=read,
        probes=len(some),
        passes=len(passes),
        tokens=read_tokens if some else 0,
        memory=2 * largest + (most + 1) * state_bytes(text, read_tokens) * bool(most),
        flop=operations,
        quantised=quantised,
        estimates=tuple(
            DamageHours(
                speed,
                name,
                (
                    read / speed.disk
                    + operations / speed.compute
                    + quantised / per_second
                )
                / 3600,
            )
            for speed in speeds
            for name, per_second in QUANTISING_SPEEDS.items()
        ),
    )


def _probes(args: ModelArgs, low_bits: Sequence[int]) -> list[Probe]:
    """As many as there will be; which experts are dropped makes no difference."""
    layers = args.text_config.moe_layers
    dropped = np.zeros((len(layers), 2), bool)
    dropped[:, 0] = True
    return all_probes(Model(args), dropped, low_bits=low_bits)


def _quantised(
    args: ModelArgs, probes: Sequence[Probe], low_bits: Sequence[int]
) -> int:
    """Weights: for errors some experts of a layer and some rows of each matrix."""
    text = args.text_config
    outer, inner = text.expert_hidden_size, text.moe_intermediate_size
    expert = 3 * outer * inner
    some_rows = outer * (2 * min(ROWS, inner)) + inner * min(ROWS, outer)
    layers = text.moe_layers
    total = sum(
        len(low_bits) * min(EXPERTS, text.experts_in_layer(layer)) * some_rows
        for layer in layers
    )
    classes: dict[str, int] = defaultdict(int)
    for name, _, module in class_matrices(Model(args)):
        *heads, rows, columns = module["weight"].shape
        classes[name] += math.prod(heads) * rows * columns
        some = math.prod(heads) * min(ROWS, rows) * columns
        total += (len(CLASS_BITS) - 1) * some
    for probe in probes:
        if isinstance(probe, ClassProbe):
            total += classes[probe.name]
        elif isinstance(probe, LowProbe):
            total += expert * text.experts_in_layer(probe.first)
    return total
