"""Every tensor name of every format has one place in the model."""

from typing import Any

import pytest
from golden_data import Case
from mlx.utils import tree_flatten
from tiny_k3 import t0_config

from kimi_k3.checkpoint.names import (
    OTHER_PARTS,
    Placement,
    biases_name,
    layer_of,
    parts_of,
    place,
    place_all,
    scales_name,
)
from kimi_k3.checkpoint.source_layout import full_size_config, source_tensors
from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.errors import CheckpointError
from kimi_k3.models import Model

IN_MODEL = "language_model.model.layers"

#: Stored name → the parameter, and the part of it; layer 3 is MLA, 0 is dense.
PLACES = {
    # source
    "language_model.model.layers.1.block_sparse_moe.experts.7.w1.weight_packed": (
        f"{IN_MODEL}.1.mlp.switch_mlp.gate_proj.weight",
        7,
    ),
    "language_model.model.layers.1.block_sparse_moe.experts.12.w2.weight_scale": (
        f"{IN_MODEL}.1.mlp.switch_mlp.down_proj.scales",
        12,
    ),
    "language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight_packed": (
        f"{IN_MODEL}.1.mlp.switch_mlp.up_proj.weight",
        0,
    ),
    "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias": (
        f"{IN_MODEL}.1.mlp.e_score_correction_bias",
        None,
    ),
    "language_model.model.layers.0.self_attn.q_conv1d.weight": (
        f"{IN_MODEL}.0.self_attn.qkv_conv.conv.weight",
        0,
    ),
    "language_model.model.layers.0.self_attn.v_proj.weight": (
        f"{IN_MODEL}.0.self_attn.qkv_proj.weight",
        2,
    ),
    "language_model.model.layers.3.self_attn.kv_b_proj.weight": (
        f"{IN_MODEL}.3.self_attn.kv_b_proj.weight",
        None,
    ),
    "language_model.model.output_attn_res_proj.weight": (
        "language_model.model.output_attn_res_proj.weight",
        None,
    ),
    # mlx-lm
    "language_model.model.layers.1.mlp.switch_mlp.up_proj.biases": (
        f"{IN_MODEL}.1.mlp.switch_mlp.up_proj.biases",
        None,
    ),
    "language_model.model.layers.1.self_attn.qkv_proj.scales": (
        f"{IN_MODEL}.1.self_attn.qkv_proj.scales",
        None,
    ),
    "language_model.lm_head.weight": ("language_model.lm_head.weight", None),
    # pipenetwork
    "model.layers.1.block_sparse_moe.switch_mlp.bank_lo.gate_proj.biases": (
        f"{IN_MODEL}.1.mlp.switch_mlp.bank_lo.gate_proj.biases",
        None,
    ),
    "model.layers.1.block_sparse_moe.e_score_correction_bias": (
        f"{IN_MODEL}.1.mlp.e_score_correction_bias",
        None,
    ),
    "model.layers.1.self_attention_res.proj_weight": (
        f"{IN_MODEL}.1.self_attention_res_proj.weight",
        None,
    ),
    "model.layers.2.mlp_res.norm_weight": (f"{IN_MODEL}.2.mlp_res_norm.weight", None),
    "model.output_attn_res.norm_weight": (
        "language_model.model.output_attn_res_norm.weight",
        None,
    ),
    "model.layers.2.self_attn.k_conv.conv.weight": (
        f"{IN_MODEL}.2.self_attn.qkv_conv.conv.weight",
        1,
    ),
    "model.layers.2.self_attn.k_proj.biases": (
        f"{IN_MODEL}.2.self_attn.qkv_proj.biases",
        1,
    ),
    "lm_head.weight": ("language_model.lm_head.weight", None),
    "model.embed_tokens.scales": ("language_model.model.embed_tokens.scales", None),
}


@pytest.fixture
def args() -> TextArgs:
    return ModelArgs.from_dict(t0_config(expert_bank_split=[0, 5, 1, 0, 6])).text_config


@pytest.mark.parametrize("name", PLACES)
def test_place(args: TextArgs, name: str) -> None:
    assert place(name, args) == Placement(*PLACES[name])
    twin = name.removeprefix("language_model.")
    for spelled in (twin, f"language_model.{twin}"):
        assert place(spelled, args) == Placement(*PLACES[name])


def test_queries_of_mla_are_whole(args: TextArgs) -> None:
    """Only KDA layers fuse; MLA's ``q_proj`` (no q_lora_rank) has the same name."""
    name = "model.layers.3.self_attn.q_proj.weight"
    assert place(name, args) == Placement(f"language_model.{name}")


@pytest.mark.parametrize("part", OTHER_PARTS)
def test_other_parts_of_the_model_are_left_out(args: TextArgs, part: str) -> None:
    assert place(f"{part}blocks.0.layers.99.weight", args) is None
    assert place_all([f"{part}x.experts.3.w"], args) == {}


def test_a_layer_that_the_config_does_not_have(args: TextArgs) -> None:
    for name in ("model.layers.5.x", "model.layers.77.block_sparse_moe.experts.3.w1.b"):
        with pytest.raises(CheckpointError, match=r"has a layer \d+, but .* is 5"):
            place_all([name], args)


def test_a_high_bank_of_all_experts_is_the_one_bank() -> None:
    name = "model.layers.1.block_sparse_moe.switch_mlp.bank_hi.up_proj.weight"
    one = f"{IN_MODEL}.1.mlp.switch_mlp.up_proj.weight"
    two = f"{IN_MODEL}.1.mlp.switch_mlp.bank_hi.up_proj.weight"
    for split, key in ((16, one), (15, two), (0, two)):
        config = t0_config(expert_bank_split=[0, split, 0, 0, 0])
        args = ModelArgs.from_dict(config).text_config
        assert place(name, args) == Placement(key)


def test_names_of_a_checkpoint_are_the_parameters_of_its_model(build: Case) -> None:
    args = ModelArgs.from_dict(build.config)
    check_places(build.stored, args)


def test_names_of_a_source_are_the_parameters_of_its_model(golden: Case) -> None:
    check_places(golden.stored, ModelArgs.from_dict(golden.config))


def check_places(names: Any, args: ModelArgs) -> None:
    text = args.text_config
    parameters = {key for key, _ in tree_flatten(Model(args).parameters())}  # type: ignore
    found: dict[str, list[int | None]] = {}
    for placement in place_all(names, text).values():
        found.setdefault(placement.key, []).append(placement.part)
    for key in [key for key in found if ".kv_b_proj." in key]:
        attention = key.rpartition(".kv_b_proj.")[0]
        del found[key]
        found[f"{attention}.embed_q.weight"] = [None]
        found[f"{attention}.unembed_out.weight"] = [None]
    dense = {key for key in found if not key.endswith((".scales", ".biases"))}
    assert dense == parameters
    for key, parts in found.items():
        whole = parts == [None]
        assert whole or sorted(parts) == list(range(parts_of(key, text))), key  # type: ignore


def test_the_short_way_through_many_names_is_the_long_way() -> None:
    """``place_all`` looks at one expert of each kind only."""
    config = full_size_config()
    config["text_config"]["num_experts"] = 24
    args = ModelArgs.from_dict(config)
    names = [spec.name for spec in source_tensors(args)]
    names += ["model.layers.1.block_sparse_moe.experts.3.odd.weight"]
    long = {name: place(name, args.text_config) for name in names}
    assert place_all(names, args.text_config) == {
        name: placement for name, placement in long.items() if placement is not None
    }
    assert len(names) > 12_000


def test_layer_of() -> None:
    assert layer_of("model.layers.17.self_attn.A_log") == 17
    assert layer_of("language_model.model.layers.0.x") == 0
    assert layer_of("model.norm.weight") is None


def test_names_that_belong_to_a_weight() -> None:
    assert scales_name("a.w1.weight_packed") == "a.w1.weight_scale"
    assert scales_name("a.o_proj.weight") == "a.o_proj.scales"
    assert biases_name("a.o_proj.weight") == "a.o_proj.biases"
