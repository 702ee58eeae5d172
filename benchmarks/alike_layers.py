"""Checkpoints with random weights whose layers are alike, written a layer at a time.

For measuring what a run through many layers takes, by any number of them; and samples to
run. No more than a layer is in memory while one is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kimi_k3.build.samples import Samples, load_tokenizer, tokenizer_fingerprint
from kimi_k3.checkpoint.source_layout import SourceTensor, source_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.nano.config import small_config
from kimi_k3.nano.random_checkpoint import random_values, write_json, write_shards
from kimi_k3.nano.tokenizer_files import write_tokenizer

MLX_TYPES = {"BF16": mx.bfloat16, "F32": mx.float32}
VOCAB = 576
CORPORA = ("code", "prose")

#: Root mean square of MXFP4's sixteen codes.
CODE_RMS = 2.926


@dataclass(frozen=True)
class Shape:
    """A model whose layers are alike but for the first, which is dense, and for the kind
    of attention. ``block`` is the layers of a residual block.
    """

    layers: int
    block: int
    hidden: int = 1024
    heads: int = 8
    expert: int = 576
    experts: int = 64
    top_k: int = 4

    def config(self) -> dict[str, Any]:
        layers = range(1, self.layers + 1)
        text = {
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": 2 * self.hidden,
            "attn_res_block_size": self.block,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.hidden // 4,
            "kv_lora_rank": self.hidden // 8,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": self.experts,
            "num_experts_per_token": self.top_k,
            "num_shared_experts": 1,
            "moe_intermediate_size": self.expert,
            "routed_expert_hidden_size": self.expert,
        }
        linear = {
            "kda_layers": [i for i in layers if i % 4],
            "full_attn_layers": [i for i in layers if i % 4 == 0],
            "num_heads": self.heads,
            "head_dim": 128,
        }
        return small_config(text=text, linear=linear)


def write_checkpoint(folder: Path, shape: Shape) -> Path:
    """A source checkpoint with tokenizer, a layer a shard, none of it held; its folder.

    Codes of experts are random bytes, each matrix scaled so that it keeps a vector's size.
    """
    config = shape.config()
    write_tokenizer(folder, vocab_size=VOCAB)
    write_shards(folder, _parts(config), shape.layers + 1)
    write_json(folder / "config.json", config)
    return folder


def _parts(config: dict[str, Any]) -> Iterator[dict[str, mx.array]]:
    """The tensors of each shard: one a layer, and one of the rest."""
    rest, part, layer = {}, {}, 0
    for spec in source_tensors(ModelArgs.from_dict(config)):
        if spec.layer is None:
            rest[spec.name] = _values(spec)
            continue
        if spec.layer != layer:
            yield part
            part, layer = {}, spec.layer
        part[spec.name] = _values(spec)
    yield part
    yield rest


def _values(spec: SourceTensor) -> mx.array:
    if spec.name.endswith(".weight_packed"):
        rng = np.random.default_rng(list(spec.name.encode()))
        return mx.array(rng.integers(0, 256, spec.shape, np.uint8))
    if spec.name.endswith(".weight_scale"):
        inputs = 32 * spec.shape[-1]
        exponent = round(-np.log2(CODE_RMS * inputs**0.5))
        return mx.full(spec.shape, 127 + exponent, dtype=mx.uint8)
    values = random_values(spec.name, spec.shape)
    return mx.array(values).astype(MLX_TYPES[spec.dtype])


def random_samples(folder: Path, rows: int, length: int) -> Samples:
    """Random text tokens of two corpora, half a row each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB - 256, (rows, length)).astype(np.int32)
    labels = np.zeros((rows, length), np.int16)
    labels[:, length // 2 :] = 1
    tokenizer = tokenizer_fingerprint(load_tokenizer(folder))
    hashes = tuple(f"{i:032x}" for i in range(len(CORPORA)))
    documents = labels.astype(np.int32)
    return Samples(tokens, labels, documents, CORPORA, hashes, tokenizer, "calibration")
