"""What a conversion writes, before it writes: names, shapes, types, shards, config."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plans import random_plan, wide_config

from kimi_k3.checkpoint.names import PREFIX
from kimi_k3.checkpoint.source_layout import full_size_config, source_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.conversion.build_config import build_config
from kimi_k3.conversion.build_layout import BuildLayout, build_layout
from kimi_k3.errors import ConfigError, PlanError
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan
from kimi_k3.planning.plan_sizes import SourceSizes

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
EXPERTS = f"{PREFIX}model.layers.{{}}.mlp.switch_mlp"


def plan_of(layers: Mapping[int, LayerPlan], **changes: Any) -> ExpertPlan:
    return ExpertPlan(16, 4, layers, **changes)


def kept(high: int, low: int = 0) -> LayerPlan:
    return LayerPlan(tuple(range(high)), tuple(range(high, high + low)))


UNIFORM = plan_of({n: kept(6) for n in (1, 2, 3, 4)})
PER_LAYER = plan_of({1: kept(6), 2: kept(5), 3: kept(16), 4: kept(4)})
GRADED = plan_of({n: kept(3, 4) for n in (1, 2, 3, 4)})
MIXED = plan_of({1: kept(6), 2: kept(0, 9), 3: kept(2, 3), 4: kept(4)}, low_bits=3)
ALL_LOW = plan_of({n: kept(0, 6) for n in (1, 2, 3, 4)}, low_bits=4)


def entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation block's entries by module."""
    return {k: v for k, v in config["quantization"].items() if isinstance(v, dict)}


@pytest.fixture(scope="module")
def release() -> BuildLayout:
    config = full_size_config()
    identity = ExpertPlan.identity(ModelArgs.from_dict(config).text_config)
    return build_layout(config, identity)


# The release


def test_the_release_in_numbers(release: BuildLayout):
    assert len(release.shards) == 95
    assert release.nbytes == 1_560_860_316_032
    assert [shard.layer for shard in release.shards] == [*range(93), None, None]
    assert release.shards[7].file == "model-00008-of-000095.safetensors"
    vision = sum(
        t.nbytes
        for t in source_tensors(ModelArgs.from_dict(full_size_config()))
        if not t.name.startswith("language_model.")
    )
    assert release.shards[-1].nbytes == vision


def test_every_tensor_is_in_one_shard(release: BuildLayout):
    names = [t.name for shard in release.shards for t in shard.tensors]
    assert len(names) == len(set(names)) == len(release.weight_map)
    assert set(release.weight_map.values()) == {s.file for s in release.shards}
    layer_7 = [n for n, file in release.weight_map.items() if ".layers.7." in n]
    assert {release.weight_map[n] for n in layer_7} == {release.shards[7].file}


def test_types_of_the_release(release: BuildLayout):
    types = {t.name: t.dtype for shard in release.shards for t in shard.tensors}
    layer = f"{PREFIX}model.layers.5"
    for name, dtype in {
        "self_attn.A_log": "F32",
        "self_attn.dt_bias": "F32",
        "self_attn.qkv_conv.conv.weight": "F32",
        "self_attn.o_norm.weight": "F32",
        "mlp.e_score_correction_bias": "F32",
        "mlp.gate.weight": "BF16",
        "self_attn.qkv_proj.weight": "BF16",
        "mlp.shared_experts.up_proj.weight": "BF16",
        "mlp.switch_mlp.up_proj.weight": "U32",
        "mlp.switch_mlp.up_proj.scales": "U8",
    }.items():
        assert types[f"{layer}.{name}"] == dtype
    assert set(types.values()) == {"F32", "BF16", "U32", "U8"}
    shapes = {t.name: t.shape for t in release.shards[5].tensors}
    assert shapes[f"{layer}.self_attn.A_log"] == (96,)
    assert shapes[f"{layer}.mlp.switch_mlp.down_proj.weight"] == (896, 3584, 384)


def test_config_of_the_release_changes_nothing_but_the_format(release: BuildLayout):
    source, config = full_size_config(), copy.deepcopy(dict(release.config))
    assert config.pop("quantization") == MXFP4
    del source["text_config"]["quantization_config"]
    assert config == source


# Plans


def test_uniform_counts_change_one_number():
    source = wide_config()
    config = build_config(source, UNIFORM)
    assert config["text_config"]["num_experts"] == 6
    assert config["quantization"] == MXFP4
    changed = {"num_experts", "quantization_config"}
    for key, value in source["text_config"].items():
        assert key in changed or config["text_config"][key] == value
    assert set(source["text_config"]) - set(config["text_config"]) == {
        "quantization_config"
    }
    assert source == wide_config()  # is left alone


def test_other_counts_are_listed_by_layer():
    text = build_config(wide_config(), PER_LAYER)["text_config"]
    assert text["num_experts"] == 16
    assert text["expert_counts"] == [0, 6, 5, 16, 4]
    assert "expert_bank_split" not in text


def test_two_banks():
    config = build_config(wide_config(), GRADED)
    text = config["text_config"]
    assert (text["num_experts"], text["expert_bank_split"]) == (7, [0, 3, 3, 3, 3])
    assert "expert_counts" not in text
    found = entries(config)
    assert len(found) == 4 * 2 * 3
    for layer in (1, 2, 3, 4):
        high = found[f"{EXPERTS.format(layer)}.bank_hi.up_proj"]
        low = found[f"{EXPERTS.format(layer)}.bank_lo.up_proj"]
        assert high == MXFP4
        assert low == {"group_size": 64, "bits": 2, "mode": "affine"}


def test_banks_in_some_layers():
    config = build_config(wide_config(), MIXED)
    text = config["text_config"]
    assert text["expert_counts"] == [0, 6, 9, 5, 4]
    assert text["expert_bank_split"] == [0, 0, 0, 2, 0]
    low = {"group_size": 64, "bits": 3, "mode": "affine"}
    matrices = ("gate_proj", "up_proj", "down_proj")
    wanted = {f"{EXPERTS.format(2)}.{m}": low for m in matrices}
    wanted |= {f"{EXPERTS.format(3)}.bank_lo.{m}": low for m in matrices}
    wanted |= {f"{EXPERTS.format(3)}.bank_hi.{m}": MXFP4 for m in matrices}
    assert entries(config) == wanted


def test_low_experts_only():
    config = build_config(wide_config(), ALL_LOW)
    assert config["text_config"]["num_experts"] == 6
    assert not {"expert_counts", "expert_bank_split"} & set(config["text_config"])
    assert set(map(str, entries(config).values())) == {
        str({"group_size": 64, "bits": 4, "mode": "affine"})
    }


def test_quantised_classes_are_named_module_by_module():
    layers = UNIFORM.layers
    plan = plan_of(layers, bits={"kda.o_proj": 8, "lm_head": 6, "mla.kv_b_proj": 16})
    assert entries(build_config(wide_config(), plan)) == {
        f"{PREFIX}model.layers.{layer}.self_attn.o_proj": {
            "group_size": 64,
            "bits": 8,
            "mode": "affine",
        }
        for layer in (0, 1, 2, 4)
    } | {f"{PREFIX}lm_head": {"group_size": 64, "bits": 6, "mode": "affine"}}


@pytest.mark.parametrize("plan", [UNIFORM, PER_LAYER, GRADED, MIXED, ALL_LOW])
def test_shapes_follow_the_plan(plan: ExpertPlan):
    layout = build_layout(wide_config(), plan)
    shapes = {t.name: (t.shape, t.dtype) for s in layout.shards for t in s.tensors}
    for layer, each in plan.layers.items():
        experts = len(each.order)
        mlp = f"{PREFIX}model.layers.{layer}.mlp"
        assert shapes[f"{mlp}.gate.weight"] == ((experts, 64), "BF16")
        assert shapes[f"{mlp}.e_score_correction_bias"] == ((experts,), "F32")
        banks = {"": each.high or each.low}
        if plan.split(layer):
            banks = {".bank_hi": each.high, ".bank_lo": each.low}
        for bank, members in banks.items():
            matrix = f"{mlp}.switch_mlp{bank}.down_proj"
            high = members is each.high
            bits = 4 if high else plan.low_bits
            wanted = (len(members), 64, 64 * bits // 32)
            assert shapes[f"{matrix}.weight"] == (wanted, "U32")
            groups = (len(members), 64, 64 // (32 if high else 64))
            assert shapes[f"{matrix}.scales"] == (groups, "U8" if high else "BF16")
            assert (f"{matrix}.biases" in shapes) != high


@pytest.mark.parametrize("seed", range(3))
def test_the_config_says_what_the_layout_holds(seed: int):
    """The lazily built model of the config alone has the layout's shapes."""
    from mlx.utils import tree_flatten

    from kimi_k3.conversion.build_layout import build_model

    plan = random_plan(SourceSizes.of(wide_config()), seed)
    layout = build_layout(wide_config(), plan)
    config = json.loads(json.dumps(dict(layout.config)))
    text = ModelArgs.from_dict(config).text_config
    for layer in plan.layers:
        assert text.experts_in_layer(layer) == len(plan.order(layer))
        assert text.bank_split(layer) == plan.split(layer)
    flat: Any = tree_flatten(build_model(config, plan).parameters())
    stored = {t.name: t.shape for s in layout.shards for t in s.tensors}
    language = {n: s for n, s in stored.items() if n.startswith(PREFIX)}
    assert language == {name: array.shape for name, array in flat}


def test_a_written_layout_is_a_whole_folder(tmp_path: Path):
    """Zeros of these names, shapes and types pass the check of any folder."""
    import mlx.core as mx

    from kimi_k3.checkpoint.shard_index import INDEX
    from kimi_k3.folder_check import check_folder

    types = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8, "U32": mx.uint32}
    plan = plan_of(MIXED.layers, low_bits=3, bits={"kda.o_proj": 8, "lm_head": 5})
    layout = build_layout(wide_config(), plan)
    for shard in layout.shards:
        zeros = {t.name: mx.zeros(t.shape, types[t.dtype]) for t in shard.tensors}
        mx.save_safetensors(str(tmp_path / shard.file), zeros, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(dict(layout.config)))
    index = {"metadata": {"total_size": layout.nbytes}, "weight_map": layout.weight_map}
    (tmp_path / INDEX).write_text(json.dumps(index))
    check_folder(tmp_path)
    wrong = copy.deepcopy(dict(layout.config))
    wrong["quantization"][f"{PREFIX}lm_head"]["bits"] = 6
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match="lm_head"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of({1: kept(6)}), "lacks layer 2"),
        (ExpertPlan(8, 4, UNIFORM.layers), "experts = 8, but this one has 16"),
        (plan_of(UNIFORM.layers, bits={"o_proj": 8}), "class .* called 'o_proj'"),
    ],
)
def test_a_plan_of_another_checkpoint(plan: ExpertPlan, message: str):
    with pytest.raises(PlanError, match=message):
        build_layout(wide_config(), plan)


def test_no_config_of_kimi_k3():
    with pytest.raises(ConfigError):
        build_layout({"model_type": "kimi_k3"}, UNIFORM)
