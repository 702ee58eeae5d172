"""The released model by its numbers, and the source layout against golden shards."""

import json
import struct
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from kimi_k3.checkpoint.source_layout import (
    SourceTensor,
    expert_prefix,
    full_size_config,
    layer_tensors,
    release_shard_of_layer,
    source_tensors,
)
from kimi_k3.config import ModelArgs
from kimi_k3.errors import ConfigError
from kimi_k3.models import Model

TENSORS = 497_220
BYTES = 1_560_860_324_864

MLX_TYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8}

Stored = dict[str, tuple[tuple[int, ...], str]]


def stored_headers(folder: Path) -> Stored:
    """Name to (shape, type) as the headers of the shards in ``folder`` say."""
    found: Stored = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {k: (tuple(v["shape"]), v["dtype"]) for k, v in header.items()}
    return found


@pytest.fixture(scope="module")
def full_args() -> ModelArgs:
    return ModelArgs.from_dict(full_size_config())


@pytest.fixture(scope="module")
def full_tensors(full_args) -> list[SourceTensor]:
    return list(source_tensors(full_args))


def total_bytes(tensors: Iterable[SourceTensor]) -> int:
    return sum(spec.nbytes for spec in tensors)


def test_release_has_the_published_totals(full_tensors):
    assert len(full_tensors) == TENSORS
    assert len({spec.name for spec in full_tensors}) == TENSORS
    assert total_bytes(full_tensors) == BYTES


def test_release_parameters(full_tensors):
    counts: Counter[str] = Counter()
    for spec in full_tensors:
        routed = ".experts." in spec.name
        text = spec.name.startswith("language_model.")
        counts["experts" if routed else "rest" if text else "vision"] += spec.parameters
    assert counts["experts"] == 2_722_740_830_208
    assert abs(counts["rest"] / 57.2e9 - 1) < 0.01
    assert abs(counts.total() / 2.78e12 - 1) < 0.001
    assert abs(counts["vision"] / 447e6 - 1) < 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"q_lora_rank": 1535},
        {"attn_res_block_size": None},
        {"num_experts": 17},
        {"mla_use_output_gate": False},
        {"latent_moe_use_norm": False},
        {"first_k_dense_replace": 2},
        {"tie_word_embeddings": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_config_has_other_totals(change):
    few = full_size_config()
    few["text_config"]["num_experts"] = 16
    want = total_bytes(source_tensors(ModelArgs.from_dict(few)))
    few["text_config"] |= change
    assert total_bytes(source_tensors(ModelArgs.from_dict(few))) != want


def test_a_log_length_and_the_vision_tower_count(full_args, full_tensors):
    a_logs = [spec for spec in full_tensors if spec.name.endswith(".A_log")]
    assert {spec.shape for spec in a_logs} == {(128,)}
    assert len(a_logs) == 69
    per_head = layer_tensors(full_args.text_config, 0, (96,))
    padded = [spec for spec in full_tensors if spec.layer == 0]
    assert total_bytes(padded) - total_bytes(per_head) == 32 * 4
    vision = [s for s in full_tensors if not s.name.startswith("language_model.")]
    assert len(vision) == 27 * 6 + 3 + 3


def test_layers_of_the_release(full_args):
    text = full_args.text_config
    linear = text.linear_attn_config
    assert len(linear.kda_layers) == 69
    assert linear.full_attn_layers == (*range(4, 93, 4), 93)
    assert not text.is_moe_layer(0)
    assert all(text.is_moe_layer(layer) for layer in range(1, 93))
    assert release_shard_of_layer(0) == "model-00001-of-000096.safetensors"
    assert release_shard_of_layer(92) == "model-00093-of-000096.safetensors"


def test_expert_tensors_follow_each_other(full_tensors):
    names = [spec.name for spec in full_tensors]
    first = names.index(f"{expert_prefix(1, 7)}w1.weight_packed")
    assert names[first : first + 6] == [
        f"{expert_prefix(1, 7)}{matrix}.{part}"
        for matrix in ("w1", "w2", "w3")
        for part in ("weight_packed", "weight_scale")
    ]


def test_layout_is_that_of_the_golden_shards(golden):
    stored = stored_headers(golden.folder)
    a_log = next(shape for name, (shape, _) in stored.items() if "A_log" in name)
    args = ModelArgs.from_dict(golden.config)
    expected = {
        spec.name: (spec.shape, spec.dtype)
        for spec in source_tensors(args, a_log_shape=a_log)
    }
    assert expected == stored
    index = json.loads((golden.folder / "model.safetensors.index.json").read_text())
    total = total_bytes(source_tensors(args, a_log_shape=a_log))
    assert index["metadata"]["total_size"] == total
    longer = source_tensors(args, a_log_shape=(a_log[0] + 1, *a_log[1:]))
    assert {spec.name: (spec.shape, spec.dtype) for spec in longer} != stored


def test_vision_biases_are_refused():
    config = full_size_config()
    config["text_config"]["num_experts"] = 16
    config["vision_config"]["attn_bias"] = True
    with pytest.raises(ConfigError, match=r"vision_config\.attn_bias is True"):
        list(source_tensors(ModelArgs.from_dict(config)))


def quantized_model(args: ModelArgs) -> Model:
    model = Model(args)
    assert args.quantization == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    nn.quantize(
        model, 32, 4, mode="mxfp4", class_predicate=lambda p, _: ".switch_mlp." in p
    )
    return model


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore
    return {name: array.shape for name, array in flat}


def test_full_model_builds_lazily(full_args, full_tensors):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    start = time.process_time()
    model = Model(full_args)
    seconds = time.process_time() - start
    sizes = [array.size for _, array in tree_flatten(model.parameters())]  # type: ignore
    assert seconds < 5
    assert mx.get_peak_memory() - before < 2**24
    text = [
        s for s in source_tensors(full_args) if s.name.startswith("language_model.")
    ]
    padding = sum(s.shape[0] - 96 for s in text if s.name.endswith(".A_log"))
    assert padding == 69 * 32
    assert sum(sizes) == sum(spec.parameters for spec in text) - padding
    assert abs(sum(sizes) / 2.78e12 - 1) < 0.001


def test_full_model_takes_the_source_tensors(full_args, full_tensors):
    """Through the names table and sanitize, with tensors that are never computed.

    The experts of the first and last MoE layer stand for those of all.
    """
    with_experts = (1, 92)
    weights = {
        spec.name: mx.zeros(spec.shape, dtype=MLX_TYPES[spec.dtype])
        for spec in full_tensors
        if ".experts." not in spec.name or spec.layer in with_experts
    }
    model = quantized_model(full_args)
    placed = {k: v.shape for k, v in model.sanitize(weights).items()}
    expected = {
        name: shape
        for name, shape in shapes_of(model).items()
        if ".switch_mlp." not in name or int(name.split(".")[3]) in with_experts
    }
    assert placed == expected
    del weights["language_model.model.layers.92.self_attn.g_proj.weight"]
    assert {k: v.shape for k, v in model.sanitize(weights).items()} != expected
