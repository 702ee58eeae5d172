"""Write a small K3 with random weights in Moonshot's source format.

A tensor's values depend on the seed, its name and its shape only. The scales are chosen
so that every part of the model shows in the logits: decays differ from head to head
and channel to channel, short convolutions are strong, correction biases change which
experts are picked, norm weights are not one.
"""

import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint import mxfp4
from ..checkpoint.source_layout import SourceTensor, shard_name, source_tensors
from ..config import ModelArgs
from ..errors import ConfigError

_MLX_TYPE = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8}


def random_values(
    name: str, shape: tuple[int, ...], *, seed: int = 0, heads: int | None = None
) -> np.ndarray:
    """Random float32 values for the tensor or parameter called ``name``.

    The end of the name decides the distribution: ``A_log`` is U(-1, 1), and zero past
    the first ``heads`` entries if given; ``dt_bias`` N(0, 1);
    ``e_score_correction_bias`` 0.05 N(0, 1); one-dimensional weights 1 + 0.1 N(0, 1);
    conv weights N(0, 1) / 2; embeddings N(0, 1); other matrices N(0, 1) over the square
    root of their inputs, residual projections with one output N(0, 1).
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        values = rng.uniform(-1, 1, shape)
        if heads is not None:
            values.reshape(-1)[heads:] = 0
        return values.astype(np.float32)
    normal = rng.standard_normal(shape)
    if leaf == "e_score_correction_bias":
        normal *= 0.05
    elif leaf != "dt_bias":
        normal = _scaled_weight(name, normal)
    return normal.astype(np.float32)


def _scaled_weight(name: str, normal: np.ndarray) -> np.ndarray:
    if normal.ndim == 1:
        return 1 + 0.1 * normal
    if "conv" in name:
        return 0.5 * normal
    if "embed_tokens" in name or "pos_emb" in name or normal.shape[0] == 1:
        return normal
    fan_in = math.prod(normal.shape[1:]) if normal.ndim == 4 else normal.shape[-1]
    gain = 2.0 if "lm_head" in name else 1.0
    return normal * (gain / math.sqrt(fan_in))


def random_tensors(
    config: dict[str, Any],
    *,
    seed: int = 0,
    a_log_stored: int | None = None,
) -> dict[str, mx.array]:
    """Every source tensor of ``config`` with random values, under its stored type.

    ``a_log_stored`` is the stored length of ``A_log``, zero-filled past the heads; the
    default is the KDA head_dim, as in the release.
    """
    args = ModelArgs.from_dict(config)
    heads = args.text_config.linear_attn_config.num_heads
    stored = a_log_stored or args.text_config.linear_attn_config.head_dim
    if stored < heads:
        raise ConfigError(
            f"A_log would be stored with {stored} entries for {heads} heads; pass "
            f"a_log_stored={heads} or more."
        )
    tensors: dict[str, mx.array] = {}
    for spec in source_tensors(args, a_log_shape=(stored,)):
        if spec.name.endswith(".weight_packed"):
            tensors |= _random_expert(spec, seed)
        elif not spec.name.endswith(".weight_scale"):
            values = random_values(spec.name, spec.shape, seed=seed, heads=heads)
            tensors[spec.name] = mx.array(values).astype(_MLX_TYPE[spec.dtype])
    return tensors


def _random_expert(packed: SourceTensor, seed: int) -> dict[str, mx.array]:
    """One expert matrix: a random float matrix rounded to MXFP4."""
    rows, half = packed.shape
    prefix = packed.name.removesuffix(".weight_packed")
    values = random_values(f"{prefix}.weight", (rows, 2 * half), seed=seed)
    codes, scales = mxfp4.quantize(values)
    return {
        f"{prefix}.weight_packed": mx.array(codes),
        f"{prefix}.weight_scale": mx.array(scales),
    }


def write_random_checkpoint(
    folder: str | Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    shards: int = 3,
    a_log_stored: int | None = None,
) -> Path:
    """Write ``config`` with random weights as a source-format checkpoint; its folder.

    ``folder`` is created and must not hold a checkpoint. Decoder layers are dealt to
    ``shards`` files in order, each layer whole; ``config.json`` is written last, so an
    interrupted run leaves nothing that looks finished. Tokenizer files are not written.
    ``a_log_stored`` as in :func:`random_tensors`.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} already holds a config.json; name an empty folder instead."
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed=seed, a_log_stored=a_log_stored)
    write_shards(folder, _deal(config, tensors, shards), shards)
    write_json(folder / "config.json", config)
    return folder


def _deal(
    config: dict[str, Any], tensors: dict[str, mx.array], shards: int
) -> list[dict[str, mx.array]]:
    """Layers in order over the shards; the embedding in the first, the rest last."""
    args = ModelArgs.from_dict(config)
    layers = args.text_config.num_hidden_layers
    parts: list[dict[str, mx.array]] = [{} for _ in range(shards)]
    for spec in source_tensors(args):
        if spec.layer is not None:
            part = spec.layer * shards // layers
        else:
            part = 0 if "embed_tokens" in spec.name else shards - 1
        parts[part][spec.name] = tensors[spec.name]
    return parts


def write_shards(
    folder: Path, parts: Iterable[dict[str, mx.array]], shards: int
) -> None:
    """Write each of ``shards`` dictionaries as one file, then the index.

    ``parts`` may be a generator: no more than one dictionary is held.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        name = shard_name(number, shards)
        mx.save_safetensors(str(folder / name), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in part.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON under a temporary name and move it into place."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
