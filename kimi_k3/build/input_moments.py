"""Second moments of what each matrix of a layer reads: how much an error in it costs.

To first order, an error D in a matrix W adds Σ (D x)² to what it writes, and with inputs
that do not depend on each other that is Σ D²·x²: so Σ x² of each input channel weighs
the columns of W. Experts count each token by the square of the weight that multiplies
their output.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import CalibrationError, PartialResultError
from ..models.latent_moe import Router
from ..models.mla import GatedMLA
from ..models.text import DecoderLayer
from .sealed_npz import read_sealed, write_sealed
from .step_labels import StepLabels

KIND, VERSION = "input moments of a layer", 1

#: Matrices that tokens go through as they are, and the experts', which have a recorder
#: of their own. Whatever else can be quantised must be one of these.
PLAIN = (nn.Linear, nn.QuantizedLinear)
PER_HEAD = (MultiLinear, QuantizedMultiLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)

#: Names under which a file keeps what experts read; gate and up read the same.
GATE_UP, DOWN, TOKENS = "experts.gate_up", "experts.down", "tokens"

#: MLA's keys and values, of which attention multiplies some heads at a time, or what is
#: equal to it, so nothing is watched there. The columns of ``embed_q`` meet the queries,
#: those of ``unembed_out`` the latents, which a norm makes.
_EMBED_Q, _UNEMBED = "self_attn.embed_q", "self_attn.unembed_out"
_LATENTS = "self_attn.kv_a_layernorm"


@dataclass(frozen=True)
class LayerMoments:
    """The moments of one layer.

    Attributes:
        tokens: tokens of each corpus, (corpora,).
        matrices: Σ x² by module name inside the layer ("self_attn.o_proj"), (corpora,
            inputs), float32; of ``self_attn.embed_q`` (corpora, heads, inputs).
        gate_up: Σ g²·x² of what experts' gate and up matrices read, (experts, width),
            float32, all corpora together; None in a dense layer.
        down: the same of the down matrices, (experts, inner).
    """

    tokens: np.ndarray
    matrices: Mapping[str, np.ndarray]
    gate_up: np.ndarray | None = None
    down: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, array in self._arrays().items():
            if not np.isfinite(array).all():
                raise CalibrationError(
                    f"the inputs of {name} overflow or are no numbers. Run `kimi-k3 "
                    "verify` on the source."
                )

    def of(self, module: str) -> np.ndarray:
        """The moment of the matrix ``module``, as named inside the layer.

        An expert matrix may lie in either bank: experts count through both. Raises
        CalibrationError for a matrix that was not recorded.
        """
        found = self.matrices.get(module)
        if module.startswith("mlp.switch_mlp."):
            found = self.down if module.endswith(".down_proj") else self.gate_up
        if found is None:
            raise CalibrationError(
                f"no moments of {module}; recorded are {', '.join(self.matrices)}."
            )
        return found

    def save(self, path: Path) -> None:
        """Write one file, durably; equal moments give equal bytes."""
        write_sealed(path, KIND, VERSION, self._arrays())

    @classmethod
    def load(cls, path: Path) -> "LayerMoments":
        """Raises PartialResultError for a file that is not whole."""
        remedy = "Calibrate again with --restart."
        arrays = read_sealed(path, KIND, VERSION, PartialResultError, remedy)
        gate_up, down = arrays.pop(GATE_UP, None), arrays.pop(DOWN, None)
        return cls(arrays.pop(TOKENS), arrays, gate_up, down)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {TOKENS: self.tokens, **self.matrices}
        if self.gate_up is not None and self.down is not None:
            arrays |= {GATE_UP: self.gate_up, DOWN: self.down}
        return arrays


class MatrixRecorder:
    """Σ x² of what the matrices of one layer read, while it stands in for them.

    Set :attr:`labels` before each step, and :meth:`collect` after it.
    """

    def __init__(self, corpora: int):
        self.corpora = corpora
        self.labels: StepLabels | None = None
        self.sums: dict[str, np.ndarray] = {}
        self._pending: dict[str, mx.array] = {}

    def add(self, name: str, x: mx.array, axes: int = 1) -> None:
        """Add tokens, in the order of the labels, whose inputs are the last ``axes``."""
        if self.labels is None:
            raise CalibrationError(f"{name} reads tokens without labels.")
        inputs, hot = x.shape[-axes:], self.labels.one_hot
        if x.size != hot.shape[1] * math.prod(inputs):
            raise CalibrationError(
                f"{name} reads {x.shape} for {hot.shape[1]} labelled tokens."
            )
        rows = x.reshape(hot.shape[1], -1).astype(mx.float32)
        moment = (hot @ mx.square(rows)).reshape(-1, *inputs)
        before = self._pending.get(name)
        self._pending[name] = moment if before is None else before + moment

    def collect(self) -> None:
        """Evaluate what the step recorded, and add it up in float64."""
        mx.eval(self._pending)
        for name, moment in self._pending.items():
            found = np.array(moment, np.float64)
            self.sums[name] = self.sums.get(name, 0) + found
        self._pending = {}

    def moments(self) -> dict[str, np.ndarray]:
        """Σ x² by name, float32, in alphabetical order of the names."""
        self.collect()
        return {n: self.sums[n].astype(np.float32) for n in sorted(self.sums)}


class _Watched:
    """Stands in for a module and shows a recorder what it reads."""

    def __init__(self, inner: Any, name: str, recorder: MatrixRecorder):
        self.inner, self.name, self.recorder = inner, name, recorder

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.recorder.add(self.name, x)
        return self.inner(x, *args, **kwargs)


class _Queries(_Watched):
    """A query projection, whose output is also what ``embed_q`` would read."""

    def __init__(
        self, inner: Any, name: str, recorder: MatrixRecorder, attention: GatedMLA
    ):
        super().__init__(inner, name, recorder)
        self.attention = attention

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        queries = super().__call__(x, *args, **kwargs)
        heads, nope = self.attention.num_heads, self.attention.nope_dim
        parts = queries.reshape(-1, heads, self.attention.head_dim)
        self.recorder.add(_EMBED_Q, parts[..., :nope], axes=2)
        return queries


class _Latents(_Watched):
    """The norm of the latents, which are what ``unembed_out`` reads."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        latents = self.inner(x, *args, **kwargs)
        self.recorder.add(self.name, latents)
        return latents


@contextmanager
def recorded_matrices(layer: DecoderLayer, corpora: int) -> Iterator[MatrixRecorder]:
    """A recorder of every matrix of ``layer`` but the experts'; it goes at the end."""
    recorder = MatrixRecorder(corpora)
    attention = layer.self_attn
    replaced: list[tuple[Any, str, Any]] = []
    for name, module in recordable(layer).items():
        if name == _EMBED_Q:
            continue
        place, watched = name, _Watched(module, name, recorder)
        if isinstance(attention, GatedMLA):
            if name == _queries_of(attention):
                watched = _Queries(module, name, recorder, attention)
            elif name == _UNEMBED:
                place, module = _LATENTS, attention.kv_a_layernorm
                watched = _Latents(module, name, recorder)
        parent, leaf = _parent(layer, place)
        replaced.append((parent, leaf, module))
        setattr(parent, leaf, watched)
    try:
        yield recorder
    finally:
        for parent, leaf, module in replaced:
            setattr(parent, leaf, module)


def recordable(layer: DecoderLayer) -> dict[str, nn.Module]:
    """The matrices of ``layer`` by name, without the router and the experts'.

    Raises CalibrationError for a module that could be quantised and is none that this
    file knows: it would be left out in silence.
    """
    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        if isinstance(module, PLAIN + PER_HEAD):
            found[name] = module
        elif hasattr(module, "to_quantized") and not isinstance(
            module, (*EXPERTS, Router)
        ):
            raise CalibrationError(
                f"{name} is a {type(module).__name__}, whose inputs cannot be recorded; "
                "pass --moments off."
            )
    return dict(sorted(found.items()))


def _queries_of(attention: GatedMLA) -> str:
    leaf = "q_proj" if attention.q_lora_rank is None else "q_b_proj"
    return f"self_attn.{leaf}"


def _parent(layer: nn.Module, name: str) -> tuple[Any, str]:
    *path, leaf = name.split(".")
    module: Any = layer
    for part in path:
        module = getattr(module, part)
    return module, leaf
