"""The last matrix of a model, which makes logits of final hidden states, in float32.

It is kept with final hidden states, so that distributions over the whole vocabulary can
be made of these without the model: 14 kB a token instead of 327 kB, at Kimi K3's size.
"""

from pathlib import Path
from typing import Self, cast

import mlx.core as mx
import mlx.nn as nn

from ..build.layer_stream import LayerStream
from ..errors import EvaluationError, NotFiniteError

#: Rows of the matrix that are in memory in float32 at once.
_ROWS = 16384

_ARRAYS = ("weight", "scales", "biases")


class Head:
    """A head as it is stored, plain or quantised.

    Raises EvaluationError for parameters that are none of a head, NotFiniteError for
    NaN or infinity in them.
    """

    def __init__(self, arrays: dict[str, mx.array], quantization: dict[str, str]):
        if "weight" not in arrays or not arrays.keys() <= {*_ARRAYS}:
            raise EvaluationError(
                f"a head has the parameters {', '.join(arrays) or 'none'}; wanted weight, "
                "and of a quantised one scales and biases."
            )
        for name, array in arrays.items():
            floating = mx.issubdtype(array.dtype, mx.floating)
            if floating and not mx.isfinite(array).all().item():
                raise NotFiniteError(
                    f"the head: {name} holds NaN or infinity. Run `kimi-k3 verify` on "
                    "the checkpoint."
                )
        self.arrays = arrays
        self.quantization = quantization

    @classmethod
    def of(cls, stream: LayerStream) -> Self:
        """The head of ``stream``, or its embedding where that is the head too."""
        with stream.head():
            tied = stream.args.tie_word_embeddings
            model = stream.model
            module: nn.Module = (
                model.model.embed_tokens if tied else model.language_model.lm_head
            )
            arrays = {n: module[n] for n in _ARRAYS if n in module}
            quantization: dict[str, str] = {}
            if "scales" in arrays:
                quantization = {
                    name: str(getattr(module, name))
                    for name in ("bits", "group_size", "mode")
                }
            return cls(arrays, quantization)

    def save(self, path: Path) -> None:
        """Write to the file ``path`` (``.safetensors``); EvaluationError if it fails."""
        try:
            mx.save_safetensors(str(path), self.arrays, metadata=self.quantization)
        except (RuntimeError, OSError) as error:
            raise EvaluationError(
                f"{path} cannot be written: {error}. Make room, then start the same "
                "command again."
            ) from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """What :meth:`save` wrote. Raises EvaluationError for anything else."""
        try:
            loaded = mx.load(str(path), return_metadata=True)
            arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
        except (RuntimeError, OSError, ValueError) as error:
            raise EvaluationError(
                f"{path} cannot be read: {error}. Make the teacher again."
            ) from error
        quantization = {
            name: metadata[name]
            for name in ("bits", "group_size", "mode")
            if name in metadata
        }
        return cls(arrays, quantization)

    @property
    def vocab(self) -> int:
        return self.arrays["weight"].shape[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """Final hidden states (N, D) → logits (N, vocab), all in float32."""
        hidden = hidden.astype(mx.float32)
        parts = []
        for start in range(0, self.vocab, _ROWS):
            part = hidden @ self._rows(start, start + _ROWS).T
            mx.eval(part)  # or all of the matrix is in float32 at once
            parts.append(part)
        return mx.concatenate(parts, axis=-1)

    def _rows(self, start: int, stop: int) -> mx.array:
        weight = self.arrays["weight"][start:stop]
        if not self.quantization:
            return weight.astype(mx.float32)
        biases = self.arrays.get("biases")
        scales = self.arrays["scales"][start:stop]
        if scales.dtype != mx.uint8:
            scales = scales.astype(mx.float32)
        return mx.dequantize(
            weight,
            scales,
            None if biases is None else biases[start:stop].astype(mx.float32),
            group_size=int(self.quantization["group_size"]),
            bits=int(self.quantization["bits"]),
            mode=self.quantization["mode"],
        ).astype(mx.float32)
