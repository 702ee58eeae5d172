"""DamageTable: what every choice of a plan costs, measured on the weights themselves.

The unit is the relative squared error of what a branch of a layer writes, as in
:mod:`.damage`, which plans are made from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..build.saliency import TOOL
from ..build.sealed_npz import digest_of, read_sealed, write_sealed
from ..errors import PlanError
from .expert_plan import LOW_BITS
from .matrix_classes import CLASS_BITS

#: Name of the file in the folder of the calibration.
FILE_NAME = "damage.npz"
KIND, VERSION = "measured damage of a checkpoint", 1

REPLACE = "Measure again with `kimi-k3 damage`."

#: No expert, where a layer has fewer samples than another.
NONE = -1

_ARRAYS = ("layers", "experts", "drop", "low", "classes_damage", "sampled_experts")
_TEXTS = ("source", "low_bits", "classes", "bits", "settings", "tool")


@dataclass(frozen=True, eq=False)
class DamageTable:
    """Damage by expert and by class of matrices. Compare tables by ``digest``.

    L MoE layers, E experts of the largest of them (others are padded with 0), F low
    widths, C classes, B bits.

    Attributes:
        source: what was measured, as :attr:`SaliencyTable.source`.
        layers: (L,) int64, 0-based.
        experts: (L,) int64, how many each layer has.
        low_bits: F widths of the low bank.
        drop: (L, E) float64, the expert's share of the layer's routed output energy.
        low: (F, L, E) float64, what the low bank makes of that share; never more of it.
        classes: names of C classes.
        bits: B widths of a class; the first is 16.
        classes_damage: (C, B) float64, summed over the matrices of a class; 0 at 16 bits
            and where a width changes nothing.
        sampled_experts: (L, S) int64, the experts that were quantised; the others have
            the layer's mean ratio of low to drop. Padded with -1.
        settings: what else the figures depend on; plain JSON values.
        tool: name and version of what made the table.

    Raises PlanError for anything that no measurement gives.
    """

    source: Mapping[str, Any]
    layers: np.ndarray
    experts: np.ndarray
    low_bits: tuple[int, ...]
    drop: np.ndarray
    low: np.ndarray
    classes: tuple[str, ...]
    bits: tuple[int, ...]
    classes_damage: np.ndarray
    sampled_experts: np.ndarray
    settings: Mapping[str, Any]
    tool: str = TOOL

    def __post_init__(self) -> None:
        for name in ("source", "settings"):
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))
        for name in ("low_bits", "classes", "bits"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_shapes()
        self._check_values()

    @property
    def digest(self) -> str:
        """SHA-256 over the whole content, as hex."""
        return digest_of(self._content())

    def save(self, path: str | Path) -> Path:
        """Write the file ``path``, or :data:`FILE_NAME` in the folder ``path``; where."""
        path = _file(path)
        write_sealed(path, KIND, VERSION, self._content())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of :meth:`save`, or the folder it lies in; PlanError names it."""
        path = _file(path)
        arrays = read_sealed(path, KIND, VERSION, PlanError, REPLACE)
        try:
            values: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
            values |= {name: json.loads(str(arrays[name])) for name in _TEXTS}
            return cls(**values)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{path} does not hold what {KIND} holds: {error}. {REPLACE}"
            ) from error

    def _content(self) -> dict[str, np.ndarray]:
        texts = {
            name: np.array(json.dumps(getattr(self, name), sort_keys=True))
            for name in _TEXTS
        }
        return texts | {name: getattr(self, name) for name in _ARRAYS}

    def _check_shapes(self) -> None:
        if not self.source or not len(self.layers):
            raise PlanError(
                f"the table does not say what was measured, or nothing was. {REPLACE}"
            )
        if not set(self.low_bits) <= set(LOW_BITS) or self.bits != CLASS_BITS:
            raise PlanError(
                f"the table is of low banks of {self.low_bits} bits and classes of "
                f"{self.bits}; wanted some of {LOW_BITS}, and {CLASS_BITS}. {REPLACE}"
            )
        layers, experts = len(self.layers), int(np.max(self.experts, initial=0))
        wanted: dict[str, tuple[tuple[int, ...], type]] = {
            "layers": ((layers,), np.int64),
            "experts": ((layers,), np.int64),
            "drop": ((layers, experts), np.float64),
            "low": ((len(self.low_bits), layers, experts), np.float64),
            "classes_damage": ((len(self.classes), len(self.bits)), np.float64),
            "sampled_experts": ((layers, *self.sampled_experts.shape[1:2]), np.int64),
        }
        for name, (shape, dtype) in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                raise PlanError(
                    f"{name} is of shape {array.shape} and type {array.dtype}; wanted "
                    f"{shape} and {np.dtype(dtype)}. {REPLACE}"
                )
            array = array.copy()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def _check_values(self) -> None:
        for name in ("drop", "low", "classes_damage"):
            array = getattr(self, name)
            if not (np.isfinite(array) & (array >= 0)).all():
                raise PlanError(f"{name} holds values below 0 or no numbers. {REPLACE}")
        real = np.arange(self.drop.shape[1]) < self.experts[:, None]
        if (self.drop[~real] > 0).any() or (self.low > self.drop).any():
            raise PlanError(
                "an expert that does not exist has damage, or the low bank does more "
                f"damage than dropping. {REPLACE}"
            )
        sums = self.drop.sum(axis=1)
        if (odd := np.abs(sums - 1) > 1e-9).any():
            at = int(np.argmax(odd))
            raise PlanError(
                f"layer {self.layers[at]}: dropping all experts has damage {sums[at]}, "
                f"wanted 1. {REPLACE}"
            )
        if self.classes_damage[:, self.bits.index(16)].any():
            raise PlanError(f"a class has damage at 16 bits. {REPLACE}")


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path
