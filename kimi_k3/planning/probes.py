"""Changes to one part of a running model, made and taken back: what a probe tries."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..build.input_moments import LayerMoments
from ..config import TextArgs
from ..conversion.quantizer import quantize
from ..models.latent_moe import LatentMoE
from ..models.text import DecoderLayer
from .expert_plan import HIGH, LOW_GROUP
from .matrix_classes import affine_format, is_class_matrix, matrix_class

#: Classes that lie in no layer.
EMBEDDING_CLASS, HEAD_CLASS = "embed_tokens", "lm_head"

#: ``first`` of their probes.
NO_LAYER = -1

#: Weights of experts that are requantised at once.
_EXPERTS_AT_ONCE = 8


@dataclass(frozen=True)
class ClassProbe:
    """All matrices of class ``name`` at ``bits``; ``first`` is the first layer with one."""

    name: str
    bits: int
    first: int

    def touches(self, layer: int, text: TextArgs, module: DecoderLayer) -> bool:
        return any(True for _ in _matrices(module, layer, text, self.name))

    @contextmanager
    def made(
        self, layer: int, text: TextArgs, module: DecoderLayer, _: LayerMoments | None
    ) -> Iterator[None]:
        """Every matrix of the class in ``module`` is rounded while the block runs."""
        kept = [(m, m["weight"]) for m in _matrices(module, layer, text, self.name)]
        for matrix, weight in kept:
            matrix["weight"] = rounded(weight, self.bits)
        try:
            yield
        finally:
            for matrix, weight in kept:
                matrix["weight"] = weight


@dataclass(frozen=True)
class LowProbe:
    """All experts of layer ``first`` in a low bank of ``bits``."""

    first: int
    bits: int

    def touches(self, layer: int, _: TextArgs, __: DecoderLayer) -> bool:
        return layer == self.first

    @contextmanager
    def made(
        self,
        _: int,
        __: TextArgs,
        module: DecoderLayer,
        moments: LayerMoments | None,
    ) -> Iterator[None]:
        """The layer's experts are requantised, by ``moments`` if given."""
        experts: Any = _moe(module).switch_mlp
        kept: list[tuple[Any, dict[str, Any]]] = []
        names = ("weight", "scales", "biases", "mode", "bits", "group_size")
        for name in ("gate_proj", "up_proj", "down_proj"):
            matrix = experts[name]
            kept.append((matrix, {n: getattr(matrix, n, None) for n in names}))
            importance = None
            if moments is not None:
                importance = moments.of(f"mlp.switch_mlp.{name}")
            low = low_bank(matrix.weight, matrix.scales, self.bits, importance)
            matrix.weight, matrix.scales, matrix.biases = low
            matrix.mode, matrix.bits, matrix.group_size = "affine", self.bits, LOW_GROUP
        try:
            yield
        finally:
            for matrix, values in kept:
                for name, value in values.items():
                    setattr(matrix, name, value)


@dataclass(frozen=True)
class DropProbe:
    """``experts`` of layer ``first`` are out of the router's reach."""

    first: int
    experts: tuple[int, ...]

    def touches(self, layer: int, _: TextArgs, __: DecoderLayer) -> bool:
        return layer == self.first

    @contextmanager
    def made(
        self, _: int, __: TextArgs, module: DecoderLayer, ___: LayerMoments | None
    ) -> Iterator[None]:
        """The router's correction bias is −∞ for the dropped experts."""
        moe = _moe(module)
        kept = moe.e_score_correction_bias
        biases = np.array(kept)
        biases[list(self.experts)] = -np.inf
        moe.e_score_correction_bias = mx.array(biases)
        try:
            yield
        finally:
            moe.e_score_correction_bias = kept


Probe = ClassProbe | LowProbe | DropProbe


def rounded(weight: mx.array, bits: int) -> mx.array:
    """``weight`` (..., out, in) as it comes back from ``bits``, in its own type."""
    stored = affine_format(bits, weight.shape[-1])
    if stored is None:
        return weight
    packed = quantize(weight, bits=bits, group_size=stored.group_size)
    return stored.dequantize(*packed).astype(weight.dtype)


def low_bank(
    codes: mx.array, scales: mx.array, bits: int, importance: np.ndarray | None
) -> tuple[mx.array, mx.array, mx.array]:
    """MXFP4 experts (E, out, in) as affine codes, scales and biases of ``bits``."""
    parts = []
    for start in range(0, codes.shape[0], _EXPERTS_AT_ONCE):
        some = slice(start, start + _EXPERTS_AT_ONCE)
        dense = mx.dequantize(codes[some], scales[some], **HIGH.parameters)
        weights = None if importance is None else mx.array(importance[some])
        part = quantize(dense, bits=bits, group_size=LOW_GROUP, importance=weights)
        mx.eval(part)
        parts.append(part)
    found = tuple(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    return found[0], found[1], found[2]


def _matrices(
    module: DecoderLayer, layer: int, text: TextArgs, name: str
) -> Iterator[nn.Module]:
    for path, matrix in module.named_modules():
        whole = f"layers.{layer}.{path}"
        if is_class_matrix(whole, matrix) and matrix_class(whole, text) == name:
            yield matrix


def _moe(module: DecoderLayer) -> LatentMoE:
    assert isinstance(module.mlp, LatentMoE)
    return module.mlp
