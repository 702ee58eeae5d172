"""The released model by its numbers, and the source layout against golden shards."""

import json
import struct
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from kimi_k3.checkpoint.source_layout import (
    expert_prefix,
    full_size_config,
    release_shard_of_layer,
    source_tensors,
)
from kimi_k3.config import ModelArgs
from kimi_k3.errors import ConfigError

TENSORS = 497_220
BYTES = 1_560_860_324_864

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


def totals(args: ModelArgs) -> tuple[int, int]:
    specs = list(source_tensors(args))
    return len(specs), sum(spec.nbytes for spec in specs)


def test_release_has_the_published_totals(full_args):
    assert totals(full_args) == (TENSORS, BYTES)


def test_release_parameters(full_args):
    counts: Counter[str] = Counter()
    for spec in source_tensors(full_args):
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
        {"num_experts": 895},
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
    want = totals(ModelArgs.from_dict(few))
    few["text_config"] |= change
    assert totals(ModelArgs.from_dict(few))[1] != want[1]


def test_a_log_length_and_the_vision_tower_count(full_args):
    per_head = list(source_tensors(full_args, a_log_shape=(96,)))
    kda_layers = len(full_args.text_config.linear_attn_config.kda_layers)
    assert BYTES - sum(spec.nbytes for spec in per_head) == kda_layers * 32 * 4
    vision = [spec for spec in per_head if not spec.name.startswith("language_model.")]
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


def test_expert_tensors_follow_each_other(full_args):
    names = [spec.name for spec in islice(source_tensors(full_args), 3000)]
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
    total = sum(spec.nbytes for spec in source_tensors(args, a_log_shape=a_log))
    assert index["metadata"]["total_size"] == total
    longer = source_tensors(args, a_log_shape=(a_log[0] + 1, *a_log[1:]))
    assert {spec.name: (spec.shape, spec.dtype) for spec in longer} != stored


def test_vision_biases_are_refused():
    config = full_size_config()
    config["vision_config"]["attn_bias"] = True
    with pytest.raises(ConfigError, match=r"vision_config\.attn_bias is True"):
        list(source_tensors(ModelArgs.from_dict(config)))
