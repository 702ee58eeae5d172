"""Tensors that contradict ``config.json``, in an MLX build and in the source format."""

import struct
from collections.abc import Callable
from pathlib import Path

import damage
import mlx.core as mx
import pytest
from damage import (
    GRADED,
    copy_folder,
    edit_config,
    edit_tensors,
    edit_text_config,
    refuse,
)
from mlx_lm.utils import load_model
from tiny_k3 import write_t1

from kimi_k3.errors import CheckpointError
from kimi_k3.folder_check import check_folder

LAYER = "model.layers.1."
MOE = f"{LAYER}block_sparse_moe."
SOURCE_MOE = "language_model.model.layers.2.block_sparse_moe."


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    return copy_folder(GRADED, tmp_path / "build")


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("t1"))


@pytest.fixture
def source(t1: Path, tmp_path: Path) -> Path:
    return copy_folder(t1, tmp_path / "source")


def rounded_rows(tensor: mx.array) -> mx.array:
    return tensor[:-1]


def drop(*parts: str) -> Callable[[Path], None]:
    return lambda folder: damage.drop_tensors(folder, *parts)


def replace(
    name: str, change: Callable[[mx.array], mx.array]
) -> Callable[[Path], None]:
    return lambda folder: damage.replace_tensor(folder, name, change)


def add(name: str, like: str) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        def put(tensors: damage.Tensors) -> None:
            if like in tensors:
                tensors[name] = tensors[like]

        edit_tensors(folder, put)

    return copy


def entry(path: str, **width: object) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        edit_config(folder, lambda config: config["quantization"].update({path: width}))

    return put


TENSOR_FAULTS = {
    "one tensor missing": (
        drop(f"{LAYER}self_attn.o_norm.weight"),
        r"layer 1: 1 tensor is missing \(.*self_attn\.o_norm\.weight\)",
    ),
    "head missing": (
        drop("lm_head"),
        r"outside the layers: 1 tensor is missing \(lm_head\.weight\)",
    ),
    "tensors of several layers missing": (
        drop("routed_expert_norm"),
        r"layer 1: 1 tensor is missing .*, and tensors of 6 more layers",
    ),
    "scales missing": (
        drop(f"{LAYER}self_attn.o_proj.scales"),
        r"layers\.1\.self_attn\.o_proj\.(weight|biases|scales)",
    ),
    "biases of a router missing": (
        drop(f"{MOE}gate.biases"),
        r"layer 1: 1 tensor is missing \(.*layers\.1\.mlp\.gate\.biases\)",
    ),
    "scales of a router missing": (
        drop(f"{MOE}gate.scales"),
        r"layer 1: 1 tensor is missing \(.*layers\.1\.mlp\.gate\.scales\)",
    ),
    "biases of key rows missing": (
        drop(f"{LAYER}self_attn.k_proj.biases"),
        r"layer 1: 1 tensor is missing \(k_proj\.biases\)",
    ),
    "biases of all rows missing": (
        drop(*(f"{LAYER}self_attn.{name}_proj.biases" for name in "qkv")),
        r"layer 1: 3 tensors are missing \(q_proj\.biases, k_proj\.biases, v_proj",
    ),
    "biases of an output missing": (
        drop(f"{LAYER}self_attn.o_proj.biases"),
        r"layer 1: 1 tensor is missing \(.*self_attn\.o_proj\.biases\)",
    ),
    "key rows missing": (
        drop(f"{LAYER}self_attn.k_proj.scales"),
        r"layer 1: 1 tensor is missing \(k_proj\.scales\)",
    ),
    "unknown tensor": (
        add(f"{LAYER}self_attn.rotary.inv_freq", f"{LAYER}input_layernorm.weight"),
        r"1 tensor is not part of the model \(language_model\..*self_attn\.rotary\.inv",
    ),
    "layer beyond the last": (
        add("model.layers.8.input_layernorm.weight", f"{LAYER}input_layernorm.weight"),
        r"has a layer 8, but config\.json's num_hidden_layers is 8",
    ),
    "tensor under both prefixes": (
        add(
            f"language_model.{LAYER}input_layernorm.weight",
            f"{LAYER}input_layernorm.weight",
        ),
        r"layernorm\.weight and .*layernorm\.weight are the same tensor",
    ),
    "rows of a packed matrix": (
        replace(f"{LAYER}self_attn.o_proj.weight", rounded_rows),
        r"o_proj\.weight has shape \(63, 32\), but config\.json makes it \(64, …\)",
    ),
    "rows of its scales": (
        replace(f"{LAYER}self_attn.o_proj.scales", rounded_rows),
        r"o_proj\.scales has shape \(63, 2\)",
    ),
    "rows of a part": (
        replace(f"{LAYER}self_attn.k_proj.weight", rounded_rows),
        r"k_proj\.weight has shape \(127, 16\), but config\.json makes it \(128, …\)",
    ),
    "length of a norm": (
        replace(f"{LAYER}input_layernorm.weight", rounded_rows),
        r"input_layernorm\.weight has shape \(63,\), but config\.json makes it \(64\)",
    ),
    "length of a bias": (
        replace(f"{MOE}e_score_correction_bias", rounded_rows),
        r"layer 1: .* says 16 experts.* hold 15 \(bank_hi 6, bank_lo 10, bias 15, router",
    ),
    "length of dt_bias": (
        replace(f"{LAYER}self_attn.dt_bias", rounded_rows),
        r"dt_bias has 127 values, but the config asks for 128",
    ),
    "A_log too short": (
        replace(f"{LAYER}self_attn.A_log", rounded_rows),
        r"A_log has 3 values, but the config asks for 4",
    ),
    "width of a convolution": (
        replace(f"{LAYER}self_attn.q_conv.conv.weight", lambda t: t[:, :3]),
        r"q_conv\.conv\.weight has shape \(128, 3, 1\)",
    ),
    "packed columns that no format has": (
        replace(f"{LAYER}self_attn.o_proj.weight", lambda t: t[:, :-1]),
        r"o_proj\.weight: 31 packed columns and 2 scales a row are no format",
    ),
    "affine biases beside byte scales": (
        add(
            f"{MOE}switch_mlp.bank_hi.gate_proj.biases",
            f"{MOE}switch_mlp.bank_hi.gate_proj.scales",
        ),
        r"bank_hi\.gate_proj\.biases has shape .* only affine formats have biases",
    ),
    "codes as floats": (
        replace(f"{LAYER}self_attn.o_proj.weight", lambda t: t.astype(mx.bfloat16)),
        r"o_proj\.weight has shape|o_proj\.weight is .*bfloat16 and has scales",
    ),
    "a norm of integers": (
        replace(f"{LAYER}input_layernorm.weight", lambda t: t.astype(mx.int32)),
        r"input_layernorm\.weight is stored as .*int32; wanted bfloat16",
    ),
    "another width in the config": (
        entry("model.layers.1.self_attn.o_proj", bits=4, group_size=64, mode="affine"),
        r"o_proj\.weight: config\.json's quantization\.model\.layers\.1\.self_attn\."
        r"o_proj says affine 4-bit group 64, but the stored tensor is affine 8-bit",
    ),
    "mxfp4 in the config, affine stored": (
        entry(f"{MOE}switch_mlp.bank_lo.up_proj", bits=4, group_size=32, mode="mxfp4"),
        r"bank_lo\.up_proj\.weight: .* says mxfp4 4-bit group 32, but .* affine 2-bit",
    ),
    "entry in another format's words": (
        entry(
            "language_model.model.layers.1.mlp.switch_mlp.bank_lo.up_proj",
            bits=4,
            group_size=64,
        ),
        r"block_sparse_moe\.switch_mlp\.bank_lo\.up_proj\.weight: .* says affine 4-bit",
    ),
    "entry for the fused projection": (
        entry(
            "language_model.model.layers.1.self_attn.qkv_proj", bits=6, group_size=64
        ),
        r"layers\.1\.self_attn\.[qkv]_proj\.weight: .*qkv_proj says affine 6-bit",
    ),
    "entry for what is dense": (
        entry("model.layers.1.self_attn.f_b_proj", bits=4, group_size=64),
        r"f_b_proj\.weight: .* says affine 4-bit .* is mlx\.core\.bfloat16 without",
    ),
    "false for what is packed": (
        lambda folder: edit_config(
            folder,
            lambda c: c["quantization"].update(
                {"model.layers.1.self_attn.o_proj": False}
            ),
        ),
        r"o_proj\.weight: .* says not quantised, but the stored tensor is affine 8-bit",
    ),
    "one bank in the config": (
        lambda folder: edit_text_config(folder, expert_bank_split=[0] * 8),
        r"layer 1: the shards store two banks .*, but config\.json's expert_bank_split",
    ),
    "two banks in the config": (
        lambda folder: edit_text_config(
            folder, expert_bank_split=[0, 6, 1, 6, 3, 7, 8, 4]
        ),
        r"layer 4: .*bank|layer 4: expert_bank_split is 3 of 9 experts, but the shards",
    ),
    "another vocabulary": (
        lambda folder: edit_text_config(folder, vocab_size=321),
        r"embed_tokens\.\w+ has shape \(320, \d+\), but config\.json makes it \(321",
    ),
    "fewer layers": (
        lambda folder: edit_config(
            folder,
            lambda c: (
                c["text_config"].update(
                    num_hidden_layers=7,
                    expert_counts=c["text_config"]["expert_counts"][:7],
                    expert_bank_split=c["text_config"]["expert_bank_split"][:7],
                ),
                c["text_config"]["linear_attn_config"].update(full_attn_layers=[4]),
            ),
        ),
        r"has a layer 7, but config\.json's num_hidden_layers is 7",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_against_the_config(graded: Path, fault: str) -> None:
    spoil, message = TENSOR_FAULTS[fault]
    spoil(graded)
    refuse(graded, CheckpointError, message)


SOURCE_FAULTS = {
    "expert missing": (
        drop(f"{SOURCE_MOE}experts.3."),
        r"layer 2: 6 tensors are missing \(expert 3 \w+_proj\.(weight|scales), .*3 more",
    ),
    "matrix of an expert missing": (
        drop(f"{SOURCE_MOE}experts.3.w2."),
        r"layer 2: 2 tensors are missing \(expert 3 down_proj\.weight, expert 3 down_",
    ),
    "scales of an expert missing": (
        drop(f"{SOURCE_MOE}experts.3.w1.weight_scale"),
        r"layer 2: 1 tensor is missing \(expert 3 gate_proj\.scales\)",
    ),
    "all experts of a layer missing": (
        drop(f"{SOURCE_MOE}experts."),
        r"layer 2: \d tensors are missing \(.*switch_mlp",
    ),
    "one expert too many": (
        add(
            f"{SOURCE_MOE}experts.16.w1.weight_packed",
            f"{SOURCE_MOE}experts.0.w1.weight_packed",
        ),
        r"layer 2: config\.json's num_experts says 16 experts, but the tensors hold 17",
    ),
    "an expert of a far number": (
        add(
            f"{SOURCE_MOE}experts.99.w1.weight_packed",
            f"{SOURCE_MOE}experts.0.w1.weight_packed",
        ),
        r"layer 2: .* says 16 experts, but the tensors hold 100 \(bias 16, experts 100",
    ),
    "experts in a dense layer": (
        add(
            "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed",
            f"{SOURCE_MOE}experts.0.w1.weight_packed",
        ),
        r"layer 0: config\.json's num_experts says 0 experts",
    ),
    "an expert of another shape": (
        replace(f"{SOURCE_MOE}experts.5.w2.weight_packed", rounded_rows),
        r"experts\.5\.w2\.weight_packed has shape \(31, 16\), but .* \(32, …\)",
    ),
    "an expert of another width": (
        replace(
            f"{SOURCE_MOE}experts.5.w2.weight_packed",
            lambda t: mx.concatenate([t, t], axis=1),
        ),
        r"experts\.5\.w2\.weight_packed is stored in another format than .*experts\.0",
    ),
    "value rows missing": (
        drop("language_model.model.layers.1.self_attn.v_proj"),
        r"layer 1: 1 tensor is missing \(v_proj\.weight\)",
    ),
    "rows of kv_b_proj": (
        replace(
            "language_model.model.layers.3.self_attn.kv_b_proj.weight", rounded_rows
        ),
        r"kv_b_proj\.weight has shape \(127, 16\), but config\.json makes it \(128, 16\)",
    ),
    "scales for a dense matrix": (
        add(
            "language_model.model.layers.1.self_attn.o_proj.scales",
            "language_model.model.layers.1.self_attn.o_proj.weight",
        ),
        r"o_proj\.weight is mlx\.core\.bfloat16 and has scales beside it",
    ),
}


@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_source_tensors_against_the_config(source: Path, fault: str) -> None:
    spoil, message = SOURCE_FAULTS[fault]
    spoil(source)
    refuse(source, CheckpointError, message)


@pytest.mark.filterwarnings("ignore:this build stores the router")
@pytest.mark.parametrize("fault", TENSOR_FAULTS | SOURCE_FAULTS)
def test_stock_loader_says_the_same(tmp_path: Path, t1: Path, fault: str) -> None:
    """``mlx_lm.utils.load_model`` alone: what our class sees there, it names."""
    original = GRADED if fault in TENSOR_FAULTS else t1
    folder = copy_folder(original, tmp_path / "build")
    spoil, message = (TENSOR_FAULTS | SOURCE_FAULTS)[fault]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_vision_tensors_are_not_judged(source: Path) -> None:
    damage.replace_tensor(source, "mm_projector.post_norm.weight", rounded_rows)
    check_folder(source)


def test_a_number_format_that_no_k3_has(graded: Path) -> None:
    """FP8, patched into the header: same bytes, other type."""
    shard = graded / "model-00003-of-00010.safetensors"
    raw = shard.read_bytes()
    at = raw.index(b'"dtype":"U8"', raw.index(f"{MOE}switch_mlp".encode()))
    patched = raw[:at] + b'"dtype":"I8"' + raw[at + 12 :]
    shard.write_bytes(patched)
    refuse(graded, CheckpointError, r"\.scales is stored as mlx\.core\.int8; scales")
    (length,) = struct.unpack("<Q", raw[:8])
    fp8 = raw[:at] + b'"dtype":"F8_E8M0"' + raw[at + 12 :]
    shard.write_bytes(struct.pack("<Q", length + 5) + fp8[8:])
    refuse(
        graded, CheckpointError, r"is stored as F8_E8M0, which no Kimi K3 format has"
    )
