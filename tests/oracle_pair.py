"""One tiny random checkpoint read twice: by the package and by the oracle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from closeness import to_numpy
from golden_data import Case
from loading import load_float32
from oracle_model import Oracle, float64_weights
from tiny_k3 import write_t1

#: Float32 against float64, one module at a time.
MODULE = 1e-5

#: Token counts: shorter than the convolution, and no multiple of anything.
SIZES = (1, 2, 3, 33, 63)


@dataclass(frozen=True)
class Pair:
    """The float32 model and the float64 oracle of the same files."""

    model: Any
    oracle: Oracle

    @property
    def hidden(self) -> int:
        return self.oracle.config["hidden_size"]

    def inputs(self, rows: int, tokens: int, seed: int = 0) -> mx.array:
        """Random activations (rows, tokens, hidden)."""
        key = mx.random.key(100 * seed + tokens)
        return mx.random.normal((rows, tokens, self.hidden), key=key)


def read_pair(folder: Path) -> Pair:
    case = Case(folder)
    oracle = Oracle(float64_weights(case.stored), case.text_config)
    return Pair(load_float32(folder), oracle)


def make_pair(folder: Path, *, seed: int = 0, **text: Any) -> Pair:
    """A T1 checkpoint with ``text`` changed, written to ``folder`` and read twice."""
    return read_pair(write_t1(folder, seed=seed, **text))


def float64(x: mx.array) -> np.ndarray:
    return to_numpy(x).astype(np.float64)
