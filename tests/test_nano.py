"""The writers of small checkpoints: what lies in the files they make."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_k3
from closeness import assert_same, relative_error, to_numpy
from golden_data import case_folders, read_stored
from loading import load_float32
from two_bank_copy import write_two_bank_copy

from kimi_k3.checkpoint import mxfp4
from kimi_k3.checkpoint.source_layout import source_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.errors import ConfigError
from kimi_k3.nano import random_checkpoint
from kimi_k3.nano.config import NANO_CONFIG
from kimi_k3.nano.random_checkpoint import random_tensors, write_random_checkpoint

STORED_TYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8}
TOKENS = mx.array([[7, 300, 12, 99, 5, 250, 31, 8]])


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_k3.write_t1(tmp_path_factory.mktemp("t1"))


@pytest.fixture(scope="module")
def wide_t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1 with the 64 wide experts that T2 is made from."""
    folder = tmp_path_factory.mktemp("wide")
    return tiny_k3.write_t1(folder, **tiny_k3.WIDE_EXPERTS)


@pytest.fixture(scope="module")
def t2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_k3.write_t2(tmp_path_factory.mktemp("t2"))


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits_of(folder: Path) -> mx.array:
    return load_float32(folder)(TOKENS)


def test_nano_is_a_small_k3():
    args = ModelArgs.from_dict(NANO_CONFIG)
    text = args.text_config
    tensors = list(source_tensors(args))
    assert sum(spec.nbytes for spec in tensors) < 3.7e6
    assert text.attn_res_block_size
    assert math.ceil(text.num_hidden_layers / text.attn_res_block_size) >= 3
    assert text.num_experts >= 32
    assert text.num_experts_per_token == 4
    assert text.num_shared_experts
    assert not text.is_moe_layer(0)
    layers = range(text.num_hidden_layers)
    assert [i for i in layers if not text.is_kda_layer(i)] == [3, 7]
    for width in (text.routed_expert_hidden_size, text.moe_intermediate_size):
        assert width
        assert width % 64 == 0


def test_source_folder_is_as_the_layout_says(t1):
    args = ModelArgs.from_dict(read_config(t1))
    expected = {
        spec.name: (spec.shape, STORED_TYPES[spec.dtype])
        for spec in source_tensors(args, a_log_shape=(tiny_k3.A_LOG_STORED,))
    }
    stored = read_stored(t1)
    assert {k: (v.shape, v.dtype) for k, v in stored.items()} == expected
    assert any(name.startswith("vision_tower.") for name in stored)
    index = json.loads((t1 / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{number}-of-000003.safetensors" for number in (1, 2, 3)
    ]
    assert read_config(t1)["text_config"]["quantization_config"]["format"] == (
        "mxfp4-pack-quantized"
    )


def test_each_layer_lies_in_one_shard(t1):
    index = json.loads((t1 / "model.safetensors.index.json").read_text())
    for layer in range(5):
        prefix = f"language_model.model.layers.{layer}."
        files = {f for k, f in index["weight_map"].items() if k.startswith(prefix)}
        assert len(files) == 1


def test_recipe_of_the_random_values(t1):
    stored = read_stored(t1)
    at = "language_model.model.layers.0.self_attn."
    a_log = to_numpy(stored[f"{at}A_log"])
    assert (a_log[4:] == 0).all()
    assert (np.abs(a_log[:4]) < 1).all()
    assert len(np.unique(a_log[:4])) == 4
    dt_bias = to_numpy(stored[f"{at}dt_bias"])
    assert 0.8 < dt_bias.std() < 1.2
    assert len(np.unique(dt_bias)) == dt_bias.size
    moe = "language_model.model.layers.1.block_sparse_moe."
    bias = to_numpy(stored[f"{moe}gate.e_score_correction_bias"])
    assert 0.02 < bias.std() < 0.1
    assert to_numpy(stored[f"{at}q_conv1d.weight"]).std() > 0.4
    codes = to_numpy(stored[f"{moe}experts.3.w1.weight_packed"])
    scales = to_numpy(stored[f"{moe}experts.3.w1.weight_scale"])
    assert 0.1 < mxfp4.dequantize(codes, scales).std() < 0.25


def test_values_depend_on_the_seed_alone():
    first = random_tensors(tiny_k3.t1_config(), seed=0)
    again = random_tensors(tiny_k3.t1_config(), seed=0)
    other = random_tensors(tiny_k3.t1_config(), seed=1)
    for name, tensor in first.items():
        assert_same(again[name], tensor, where=name)
        assert not mx.array_equal(other[name], tensor), name


def test_every_part_of_the_source_moves_the_logits(t1):
    """No random tensor is idle: each one scaled by 1.5 changes the logits."""
    model = load_float32(t1)
    want = model(TOKENS)
    assert mx.isfinite(want).all()
    assert to_numpy(want).std() > 1
    idle = []
    for at in ("A_log", "dt_bias", "qkv_conv.conv.weight", "o_norm.weight"):
        module = model.layers[2].self_attn
        *path, leaf = at.split(".")
        for part in path:
            module = getattr(module, part)
        before = module[leaf]
        module[leaf] = before * 1.5
        if relative_error(model(TOKENS), want) < 1e-3:
            idle.append(at)
        module[leaf] = before
    assert not idle


def test_a_log_shorter_than_the_heads_is_refused():
    with pytest.raises(ConfigError, match="3 entries for 4 heads.*a_log_stored=4"):
        random_tensors(tiny_k3.t1_config(), a_log_stored=3)


def test_an_interrupted_write_leaves_no_config(tmp_path, monkeypatch):
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(random_checkpoint.mx, "save_safetensors", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_random_checkpoint(tmp_path, tiny_k3.t1_config())
    assert not (tmp_path / "config.json").exists()


def test_a_folder_with_a_checkpoint_is_left_alone(t1, wide_t1):
    before = {path: path.stat().st_mtime_ns for path in t1.iterdir()}
    with pytest.raises(ConfigError, match=r"already holds a config\.json"):
        write_random_checkpoint(t1, tiny_k3.t1_config())
    keep = tiny_k3.t2_keep()
    with pytest.raises(ConfigError, match=r"already holds a config\.json"):
        write_two_bank_copy(wide_t1, t1, keep=keep, high=dict.fromkeys(keep, 0))
    assert {path: path.stat().st_mtime_ns for path in t1.iterdir()} == before


def test_t0_in_memory():
    model = tiny_k3.t0_model()
    logits = model(TOKENS)
    assert logits.shape == (1, 8, tiny_k3.VOCAB)
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all()
    assert to_numpy(logits).std() > 1
    assert model.layers[0].self_attn.A_log.shape == (4,)
    assert relative_error(tiny_k3.t0_model(seed=1)(TOKENS), logits) > 0.1


def test_two_bank_config_of_t2(t2):
    config = read_config(t2)
    text = config["text_config"]
    assert text["expert_counts"] == [0, 12, 9, 16, 7]
    assert text["expert_bank_split"] == [0, 5, 1, 0, 6]
    assert "quantization_config" not in text
    blocks = config["quantization"]
    at = "model.layers.1.block_sparse_moe.switch_mlp"
    assert blocks[f"{at}.bank_lo.up_proj"] == {
        "mode": "affine",
        "group_size": 64,
        "bits": 2,
    }
    assert blocks[f"{at}.bank_hi.up_proj"]["mode"] == "mxfp4"
    assert not any("layers.3." in name for name in blocks)


def test_banks_hold_the_kept_experts(t2, wide_t1):
    source, copy = read_stored(wide_t1), read_stored(t2)
    keep = tiny_k3.t2_keep()
    matrices = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for layer, count in zip(keep, tiny_k3.T2_COUNTS, strict=True):
        split = tiny_k3.T2_HIGH[layer - 1]
        at = f"model.layers.{layer}.block_sparse_moe."
        assert len(keep[layer]) == count
        gate = source[f"language_model.{at}gate.weight"]
        assert_same(copy[f"{at}gate.weight"], gate[mx.array(keep[layer])], where=at)
        for place, expert in enumerate(keep[layer]):
            for ours, theirs in matrices.items():
                name = f"language_model.{at}experts.{expert}.{theirs}"
                codes = source[f"{name}.weight_packed"]
                scales = source[f"{name}.weight_scale"]
                bank, row = f"{at}switch_mlp.{ours}", place
                if split:
                    low = place >= split
                    bank = f"{at}switch_mlp.bank_{'lo' if low else 'hi'}.{ours}"
                    row = place - split if low else place
                if f"{bank}.biases" in copy:
                    check_low_bank(copy, bank, row, codes, scales)
                    continue
                assert_same(
                    copy[f"{bank}.weight"][row].view(mx.uint8), codes, where=bank
                )
                assert_same(copy[f"{bank}.scales"][row], scales, where=bank)


def check_low_bank(
    copy: dict[str, mx.array], bank: str, row: int, codes: mx.array, scales: mx.array
) -> None:
    """2-bit values lie within half a step of the MXFP4 values they stand for."""
    want = mxfp4.dequantize(to_numpy(codes), to_numpy(scales))
    step = copy[f"{bank}.scales"][row]
    got = mx.dequantize(
        copy[f"{bank}.weight"][row], step, copy[f"{bank}.biases"][row], 64, 2
    )
    steps = np.abs(to_numpy(step)).repeat(64, axis=-1)
    # MLX moves the grid so that one end is met; that may cost the other end a step.
    assert (np.abs(to_numpy(got) - want) <= 1.05 * steps).all(), bank
    assert np.abs(to_numpy(got) - want).mean() < 0.3 * steps.mean(), bank


def test_t2_runs(t2):
    logits = logits_of(t2)
    assert mx.isfinite(logits).all()
    assert to_numpy(logits).std() > 1


def test_one_bank_copy_equals_its_source_with_experts_masked(wide_t1, tmp_path):
    keep = tiny_k3.t2_keep()
    write_two_bank_copy(wide_t1, tmp_path, keep=keep, high=dict.fromkeys(keep, 0))
    model = load_float32(wide_t1)
    for layer, kept in keep.items():
        dropped = [expert for expert in range(16) if expert not in kept]
        if dropped:
            moe = model.layers[layer].mlp
            moe.e_score_correction_bias[mx.array(dropped)] = -1e9
    masked = model(TOKENS)
    assert relative_error(logits_of(tmp_path), masked) < 1e-5
    assert relative_error(logits_of(wide_t1), masked) > 1e-2


def test_copy_is_the_published_converters_to_the_bit(request, tmp_path):
    """The pipenetwork build of a golden case, from the same lists of experts.

    Their converter rounds the float32 conv and o_norm weights to bfloat16.
    """
    extra = request.config.getoption("--extra-data")
    builds = {folder.name: folder for folder in case_folders("formats", extra)}
    cases = {folder.name: folder for folder in case_folders("golden", extra)}
    if "A-pn-graded" not in builds or "A" not in cases:
        pytest.skip("case A with its graded build comes with --extra-data")
    theirs = read_config(builds["A-pn-graded"])
    keep = {int(layer): kept for layer, kept in theirs["reap"]["keep"].items()}
    split = theirs["text_config"]["expert_bank_split"]
    high = {layer: split[layer] for layer in keep}
    write_two_bank_copy(cases["A"], tmp_path, keep=keep, high=high)
    ours = read_config(tmp_path)
    assert ours["text_config"] == theirs["text_config"]
    assert ours["quantization"] == theirs["quantization"]
    got, want = read_stored(tmp_path), read_stored(builds["A-pn-graded"])
    assert set(got) == set(want)
    for name, tensor in got.items():
        if name.endswith(("_conv.conv.weight", "o_norm.weight")):
            tensor = tensor.astype(mx.bfloat16)
        assert_same(tensor, want[name], where=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": {1: [0, 1, 2]}}, r"MoE layers are \[1, 2, 3, 4\]"),
        ({2: [0, 1, 1, 3]}, "layer 2: keep lists .* distinct experts of 0 to 15"),
        ({2: [0, 1, 2, 16]}, "layer 2: keep lists .* distinct experts of 0 to 15"),
        ({2: [0, 1, 2]}, "layer 2 keeps 3 experts but the router picks 4"),
        ({"high": {4: 8}}, "layer 4: 8 experts in the high bank, but only 7"),
    ],
)
def test_impossible_plans_are_refused(wide_t1, tmp_path, change, message):
    keep = change.get("keep") or tiny_k3.t2_keep() | {
        key: value for key, value in change.items() if key != "high"
    }
    high = change.get("high", {})
    with pytest.raises(ConfigError, match=message):
        write_two_bank_copy(wide_t1, tmp_path / "copy", keep=keep, high=high)
    assert not (tmp_path / "copy").exists()


def test_narrow_experts_have_no_low_bank(t1, tmp_path):
    keep = tiny_k3.t2_keep()
    with pytest.raises(ConfigError, match="width 32 cannot be stored in groups of 64"):
        write_two_bank_copy(t1, tmp_path, keep=keep, high=dict.fromkeys(keep, 2))
