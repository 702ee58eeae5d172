"""Write a pruned two-bank copy of a small source checkpoint in the published format.

The result has the layout of the published graded builds: no ``language_model.``
prefix, other expert counts from layer to layer, and the kept experts of a layer in
two stacks, ``bank_hi`` (the source's MXFP4 bytes) and ``bank_lo`` (affine 2-bit). Which
experts stay is the caller's word; nothing here judges their worth. One difference is
deliberate: float32 tensors stay float32, where those builds round some to bfloat16.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from kimi_k3.checkpoint.shard_index import INDEX, read_index
from kimi_k3.checkpoint.source_layout import layer_prefix
from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.errors import CheckpointError, ConfigError
from kimi_k3.nano.random_checkpoint import write_json, write_shards

HIGH = {"mode": "mxfp4", "group_size": 32, "bits": 4}
LOW = {"mode": "affine", "group_size": 64, "bits": 2}

_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_two_bank_copy(
    source: str | Path,
    folder: str | Path,
    *,
    keep: Mapping[int, Sequence[int]],
    high: Mapping[int, int],
) -> Path:
    """Write ``source`` pruned to ``keep`` into the new ``folder``, which is returned.

    ``keep[layer]`` lists the experts that stay in a 0-based MoE layer, in their new
    order; the first ``high[layer]`` of them form the high bank, the rest the low bank.
    With 0 (or all) the layer has one MXFP4 bank. One layer is in memory at a time;
    ``config.json`` is written last. Side files are copied, Python files are not.
    """
    source, folder = Path(source), Path(folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    args = ModelArgs.from_dict(config)
    text = args.text_config
    _check_plan(text, keep, high)
    if (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} already holds a config.json; name an empty folder instead."
        )
    folder.mkdir(parents=True, exist_ok=True)
    shards = text.num_hidden_layers + 1
    write_shards(folder, _converted_parts(source, text, keep, high), shards)
    for path in sorted(source.iterdir()):
        side = path.suffix not in (".safetensors", ".py")
        if side and path.is_file() and path.name not in (INDEX, "config.json"):
            shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", two_bank_config(config, keep, high))
    return folder


def two_bank_config(
    config: dict[str, Any],
    keep: Mapping[int, Sequence[int]],
    high: Mapping[int, int],
) -> dict[str, Any]:
    """The source's ``config`` with per-layer counts, bank sizes and widths."""
    config = copy.deepcopy(config)
    text = config["text_config"]
    text.pop("quantization_config", None)
    layers = range(text["num_hidden_layers"])
    text["expert_counts"] = [len(keep.get(layer, ())) for layer in layers]
    text["expert_bank_split"] = [_split(keep, high, layer) for layer in layers]
    widths: dict[str, Any] = dict(HIGH)
    for layer in layers:
        if _split(keep, high, layer):
            for matrix in _MATRICES:
                experts = f"model.layers.{layer}.block_sparse_moe.switch_mlp"
                widths[f"{experts}.bank_hi.{matrix}"] = dict(HIGH)
                widths[f"{experts}.bank_lo.{matrix}"] = dict(LOW)
    config["quantization"] = widths
    config["reap"] = {"keep": {str(layer): list(keep[layer]) for layer in keep}}
    return config


def _moe_layers(text: TextArgs) -> list[int]:
    return [i for i in range(text.num_hidden_layers) if text.is_moe_layer(i)]


def _split(
    keep: Mapping[int, Sequence[int]], high: Mapping[int, int], layer: int
) -> int:
    split = high.get(layer, 0)
    return 0 if split == len(keep.get(layer, ())) else split


def _check_plan(
    text: TextArgs, keep: Mapping[int, Sequence[int]], high: Mapping[int, int]
) -> None:
    if sorted(keep) != _moe_layers(text):
        raise ConfigError(
            f"keep names the layers {sorted(keep)}, but the MoE layers are "
            f"{_moe_layers(text)}; name each of them once."
        )
    for layer, experts in keep.items():
        known = range(text.num_experts)
        if len(set(experts)) != len(experts) or not set(experts) <= set(known):
            raise ConfigError(
                f"layer {layer}: keep lists {list(experts)}; wanted distinct experts "
                f"of 0 to {text.num_experts - 1}."
            )
        if len(experts) < text.num_experts_per_token:
            raise ConfigError(
                f"layer {layer} keeps {len(experts)} experts but the router picks "
                f"{text.num_experts_per_token}; keep at least as many."
            )
        if not 0 <= high.get(layer, 0) <= len(experts):
            raise ConfigError(
                f"layer {layer}: {high[layer]} experts in the high bank, but only "
                f"{len(experts)} are kept."
            )
    narrow = min(text.expert_hidden_size, text.moe_intermediate_size)
    if narrow % LOW["group_size"] and any(_split(keep, high, i) for i in keep):
        raise ConfigError(
            f"Experts of width {narrow} cannot be stored in groups of "
            f"{LOW['group_size']}, as the low bank is; use a multiple of it."
        )


def _converted_parts(
    source: Path,
    text: TextArgs,
    keep: Mapping[int, Sequence[int]],
    high: Mapping[int, int],
) -> Iterator[dict[str, mx.array]]:
    """One dictionary of converted tensors a layer, then one with all that remains."""
    left = dict(read_index(source).shard_of)
    for layer in range(text.num_hidden_layers):
        prefix = layer_prefix(layer)
        names = [name for name in left if name.startswith(prefix)]
        tensors = _load(source, {name: left.pop(name) for name in names})
        if layer in keep:
            yield _convert(tensors, text, list(keep[layer]), _split(keep, high, layer))
        else:
            yield _convert(tensors, text, [], 0)
    yield _convert(_load(source, left), text, [], 0)


def _load(source: Path, wanted: Mapping[str, str]) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for shard in sorted(set(wanted.values())):
        stored: dict[str, mx.array] = mx.load(str(source / shard))  # type: ignore
        for name in (name for name in wanted if wanted[name] == shard):
            if name not in stored:
                raise CheckpointError(
                    f"{source / shard} lacks {name}, which the index places there; "
                    "write or download the source again."
                )
            tensors[name] = stored[name]
    return tensors


def _convert(
    tensors: dict[str, mx.array], text: TextArgs, kept: list[int], split: int
) -> dict[str, mx.array]:
    """Rename and reshape the tensors of one layer; experts are stacked in banks."""
    converted: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if kept and ".block_sparse_moe.gate." in name:
            tensor = tensor[mx.array(kept)]
        if name.endswith(".kv_b_proj.weight"):
            converted |= _absorbed_heads(name, tensor, text)
        else:
            converted[_renamed(name)] = _conv_last(name, tensor)
    if kept:
        converted |= _banks(tensors, kept, split)
    return converted


def _renamed(name: str) -> str:
    name = name.removeprefix("language_model.")
    name = name.replace("_conv1d.weight", "_conv.conv.weight")
    name = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
    for part in ("proj", "norm"):
        name = name.replace(f"_res_{part}.weight", f"_res.{part}_weight")
    return name


def _conv_last(name: str, tensor: mx.array) -> mx.array:
    """Conv weights (D, 1, width) as MLX has them: (D, width, 1)."""
    return tensor.swapaxes(1, 2) if name.endswith("_conv1d.weight") else tensor


def _absorbed_heads(name: str, tensor: mx.array, text: TextArgs) -> dict[str, mx.array]:
    """``kv_b_proj`` (H*(nope+v), latent) as ``embed_q`` and ``unembed_out``."""
    nope, value = text.qk_nope_head_dim, text.v_head_dim
    heads = tensor.reshape(text.num_attention_heads, nope + value, -1)
    prefix = _renamed(name).removesuffix("kv_b_proj.weight")
    return {
        f"{prefix}embed_q.weight": heads[:, :nope].swapaxes(1, 2),
        f"{prefix}unembed_out.weight": heads[:, nope:],
    }


def _banks(
    tensors: dict[str, mx.array], kept: list[int], split: int
) -> dict[str, mx.array]:
    """Expert stacks of one layer, ``switch_mlp.[bank.]{gate,up,down}_proj.*``."""
    example = next(name for name in tensors if ".experts." in name)
    experts = example.split(".experts.")[0] + ".experts"
    target = _renamed(experts.removesuffix(".experts")) + ".switch_mlp"
    banks: dict[str, mx.array] = {}
    for matrix, source_name in _MATRICES.items():
        names = [f"{experts}.{expert}.{source_name}" for expert in kept]
        codes = mx.stack([tensors[f"{n}.weight_packed"] for n in names])
        scales = mx.stack([tensors[f"{n}.weight_scale"] for n in names])
        codes = codes.view(mx.uint32)
        if not split:
            banks[f"{target}.{matrix}.weight"] = codes
            banks[f"{target}.{matrix}.scales"] = scales
            continue
        banks[f"{target}.bank_hi.{matrix}.weight"] = codes[:split]
        banks[f"{target}.bank_hi.{matrix}.scales"] = scales[:split]
        dense = mx.dequantize(codes[split:], scales[split:], **HIGH)
        low = mx.quantize(dense, **LOW)
        for part, tensor in zip(("weight", "scales", "biases"), low, strict=True):
            banks[f"{target}.bank_lo.{matrix}.{part}"] = tensor
    return banks
