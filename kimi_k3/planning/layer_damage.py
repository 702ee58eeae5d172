"""What plans can do to one layer, measured on its weights and the inputs it met.

An error D in a matrix W adds Σ (D x)² to what it writes; with inputs that do not depend
on each other that is Σ D²·x², to be read beside Σ W²·x², all that it writes. Σ x² of each
input channel is what a calibration recorded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..build.sealed_npz import read_sealed, write_sealed
from ..checkpoint.stored_format import StoredFormat
from ..conversion.build_config import EXPERT_MATRICES
from ..conversion.importance import Importance
from ..conversion.quantizer import quantize, squared_error
from ..errors import PartialResultError, PlanError
from .expert_plan import LOW_GROUP
from .matrix_classes import CLASS_BITS, affine_format, inputs_of

KIND, VERSION = "measured damage of a layer", 1

#: A class of matrices, its module's path and the module.
ClassMatrix = tuple[str, str, nn.Module]


@dataclass(frozen=True, eq=False)
class LayerDamage:
    """Of one layer, or of what belongs to none.

    Attributes:
        drop: (E,) float64, shares of the layer's routed output energy; empty without
            experts.
        low: (F, E) float64.
        sampled: numbers of the experts that were quantised.
        classes: class → (B,) float64, by :data:`CLASS_BITS`, summed over its matrices.
    """

    drop: np.ndarray
    low: np.ndarray
    sampled: np.ndarray
    classes: Mapping[str, np.ndarray]

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write the file ``path``, durably, with what the figures depend on."""
        content = {f"class.{name}": array for name, array in self.classes.items()}
        content |= {"drop": self.drop, "low": self.low, "sampled": self.sampled}
        content["settings"] = np.array(json.dumps(settings, sort_keys=True))
        write_sealed(path, KIND, VERSION, content)

    @classmethod
    def load(cls, path: Path, remedy: str) -> tuple["LayerDamage", Mapping[str, Any]]:
        """What :meth:`save` wrote. Raises PartialResultError if that is damaged."""
        arrays = read_sealed(path, KIND, VERSION, PartialResultError, remedy)
        try:
            settings = json.loads(str(arrays.pop("settings")))
            drop, low, sampled = (arrays.pop(n) for n in ("drop", "low", "sampled"))
        except (KeyError, ValueError) as error:
            raise PartialResultError(
                f"{path} is not {KIND}: {error}. {remedy}"
            ) from error
        classes = {name.removeprefix("class."): array for name, array in arrays.items()}
        return cls(drop, low, sampled, classes), settings


def no_experts(low_bits: Sequence[int]) -> dict[str, np.ndarray]:
    """The attributes of a :class:`LayerDamage` that are about experts, without any."""
    return {
        "drop": np.zeros(0),
        "low": np.zeros((len(low_bits), 0)),
        "sampled": np.zeros(0, np.int64),
    }


def measure_experts(
    modules: Mapping[str, nn.Module],
    prefix: str,
    importance: Importance,
    *,
    low_bits: Sequence[int],
    count: int,
    rows: int,
) -> dict[str, np.ndarray]:
    """``drop``, ``low`` and ``sampled`` of the experts of one layer.

    Args:
        modules: the stacked matrices by name (gate_proj, up_proj, down_proj), loaded.
        prefix: path of the module that they are in.
        count: experts to quantise, spread over the ranking by energy; those that no
            token chose are none of them.
        rows: of a matrix to quantise at most, spread over it.
    """
    energies = _energies(modules["down_proj"], f"{prefix}.down_proj", importance)
    if not 0 < energies.sum() < float("inf"):
        raise PlanError(
            f"{prefix}: the experts write Σ {energies.sum()} on the calibration's text: "
            "no token reached them, or an input overflows. Calibrate on more text."
        )
    drop = energies / energies.sum()
    ranked = np.argsort(-drop, kind="stable")[: np.count_nonzero(drop)]
    places = np.linspace(0, len(ranked) - 1, min(count, len(ranked)))
    sampled = np.sort(ranked[np.unique(np.round(places).astype(int))])
    ratios = np.zeros((len(low_bits), len(sampled)))
    for at, expert in enumerate(sampled.tolist()):
        for name in EXPERT_MATRICES:
            module = modules[name]
            every = _spread(module["weight"].shape[-2], rows)
            weight = _expert_matrix(module, expert, every)
            channel = importance.expert(f"{prefix}.{name}", expert)
            for width, bits in enumerate(low_bits):
                stored = StoredFormat("affine", bits, LOW_GROUP)
                ratios[width, at] += _relative_error(weight, stored, channel)
    low = np.repeat(ratios.mean(axis=1, keepdims=True), len(drop), axis=1)
    low[:, sampled] = ratios
    return {"drop": drop, "low": np.minimum(low, 1) * drop, "sampled": sampled}


def measure_classes(
    matrices: Sequence[ClassMatrix], importance: Importance, rows: int
) -> dict[str, np.ndarray]:
    """``classes`` of some loaded matrices, a stack of one a head counting as one.

    Args:
        rows: of a matrix, or of a stack together, to quantise at most.
    """
    found: dict[str, np.ndarray] = {}
    for name, path, module in matrices:
        weight: mx.array = module["weight"]
        heads = weight.size // (weight.shape[-1] * weight.shape[-2])
        every = _spread(weight.shape[-2], max(1, rows // heads))
        # Sampled here: a matrix of a vocabulary is hundreds of times as large.
        weight = weight[..., every, :]
        channel = importance.of(path)
        for place, bits in enumerate(CLASS_BITS):
            sums = found.setdefault(name, np.zeros(len(CLASS_BITS)))
            stored = affine_format(bits, inputs_of(module))
            if stored is not None:
                sums[place] += _relative_error(weight, stored, channel)
    return found


def _energies(module: nn.Module, path: str, importance: Importance) -> np.ndarray:
    """(E,) float64: Σ W²·x² of each expert's matrix."""
    experts = module["weight"].shape[0]
    energies = np.zeros(experts)
    for expert in range(experts):
        weight = _expert_matrix(module, expert).astype(mx.float32)
        columns = np.array(mx.square(weight).sum(axis=0), np.float64)
        moments = np.array(importance.expert(path, expert), np.float64)
        energies[expert] = (columns * moments).sum()
    return energies


def _expert_matrix(
    module: Any, expert: int, every: mx.array | slice = slice(None)
) -> mx.array:
    """(rows, in) of one expert, of a stack in any quantised format."""
    parts = [
        module[name][expert][every]
        for name in ("weight", "scales", "biases")
        if module.get(name) is not None
    ]
    return mx.dequantize(
        *parts, group_size=module.group_size, bits=module.bits, mode=module.mode
    )


def _relative_error(
    weight: mx.array, stored: StoredFormat, channel: mx.array | None
) -> float:
    """Σ h·(w - w')² over Σ h·w² of a matrix quantised as a conversion does it."""
    options: Any = {
        "bits": stored.bits,
        "group_size": stored.group_size,
        "importance": channel,
    }
    error, energy = squared_error(weight, quantize(weight, **options), **options)
    return error / energy if energy else 0.0


def _spread(total: int, count: int) -> mx.array | slice:
    """``count`` of ``total`` rows, evenly spread; all of them where that is as many."""
    if total <= count:
        return slice(None)
    return mx.array(np.arange(count) * total // count)
