"""Checkpoints of any size whose data takes no room on the disk: only headers are real."""

import json
from pathlib import Path
from typing import Any

from kimi_k3.checkpoint.source_layout import shard_name, source_tensors
from kimi_k3.config import ModelArgs


def write_sparse_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """The source checkpoint of ``config``, a shard a layer, all of it zeros that the
    file system does not store; its folder. What reads it must not compute with it.
    """
    args = ModelArgs.from_dict(config)
    layers = args.text_config.num_hidden_layers
    shards: list[dict[str, Any]] = [{} for _ in range(layers + 1)]
    sizes, shard_of = [0] * (layers + 1), {}
    for spec in source_tensors(args):
        part = layers if spec.layer is None else spec.layer
        start, sizes[part] = sizes[part], sizes[part] + spec.nbytes
        shards[part][spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [start, sizes[part]],
        }
        shard_of[spec.name] = shard_name(part + 1, layers + 1)
    for number, (header, size) in enumerate(zip(shards, sizes, strict=True), start=1):
        text = json.dumps(header).encode()
        with (folder / shard_name(number, layers + 1)).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
