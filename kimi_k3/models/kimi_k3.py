"""The model class that mlx-lm loads for ``model_type: kimi_k3``.

``Model`` and ``TOKENIZER_DEFAULTS`` share this file: mlx-lm reads the defaults from the
module that defines the model class.
"""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.completeness import check_complete
from ..checkpoint.sanitize import module_weights, quantize_as_stored
from ..config import ModelArgs
from ..tokenizer import TOKENIZER_DEFAULTS, register_tokenizer
from .distributed import shard_head, shard_layers
from .text import DecoderLayer, LanguageModel, TextModel

__all__ = ["TOKENIZER_DEFAULTS", "Model", "ModelArgs"]

# mlx-lm imports this module before it asks transformers for a tokenizer.
register_tokenizer()

#: Parameters that stay float32 when a model is cast: the source stores them so.
FLOAT32_PARAMETERS = (
    "A_log",
    "dt_bias",
    "e_score_correction_bias",
    "qkv_conv.conv.weight",
    "o_norm.weight",
)


class Model(nn.Module):
    """Kimi K3's language model, for any build: one bank or two, any expert counts."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.language_model = LanguageModel(args.text_config)

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Token ids (B, T) → logits (B, T, vocab).

        ``cache`` comes from :meth:`make_cache` and is updated in place.
        ``input_embeddings`` (B, T, D) stand in for the embedded ids where given.
        """
        return self.language_model(inputs, cache, input_embeddings)

    @property
    def model(self) -> TextModel:
        return self.language_model.model

    @property
    def layers(self) -> list[DecoderLayer]:
        """The layers that this process runs: all of them unless pipelined."""
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """One mlx-lm cache for each of :attr:`layers`."""
        return self.language_model.make_cache()

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keep this rank's slice of every layer and the head, in place.

        Raises DistributedError, before changing anything, for a number of ranks that
        does not divide the model.
        """
        group = group or mx.distributed.init()
        if group.size() > 1:
            shard_layers(self.layers, self.args.text_config, group)
            if "lm_head" in self.language_model:
                head = shard_head(self.language_model.lm_head, group)
                self.language_model.update_modules({"lm_head": head})

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Checkpoint tensors of any format under this model's own names.

        ``weights`` may be any part of a checkpoint, also none of it: only what is there
        is judged. Raises CheckpointError where it contradicts the config.
        """
        renamed = module_weights(weights, self.args, self)
        if self.args.quantization is None:
            quantize_as_stored(self, renamed)
        return renamed

    def load_weights(
        self,
        file_or_weights: str | list[tuple[str, mx.array]],
        strict: bool = True,
    ) -> nn.Module:
        """As every MLX module; missing tensors are named by layer, experts by number."""
        if strict and not isinstance(file_or_weights, str):
            parameters = cast(
                list[tuple[str, mx.array]], tree_flatten(self.parameters())
            )
            check_complete(
                dict(file_or_weights),
                {name: array.shape for name, array in parameters},
                self.args.text_config,
            )
        return super().load_weights(file_or_weights, strict)

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Whether mlx-lm's converter may cast the parameter at a path."""
        return lambda path: not path.endswith(FLOAT32_PARAMETERS)

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool]:
        """Whether mlx-lm's converter may quantise the module at a path."""
        return lambda path, module: not path.endswith("mlp.gate")
