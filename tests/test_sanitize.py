"""Stored tensors become parameters: parts of checkpoints, mixed widths, derived ones."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import damage
import mlx.core as mx
import pytest
from closeness import assert_close, assert_same, relative_error, to_numpy
from damage import Tensors, copy_folder, edit_config, edit_tensors
from golden_data import DATA, read_stored
from loading import load_stored
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tiny_k3 import write_t1, write_t2

from kimi_k3.config import ModelArgs
from kimi_k3.errors import CheckpointError, ConfigError
from kimi_k3.folder_check import check_folder
from kimi_k3.models import Model

FORMATS = DATA / "formats"
IDS = mx.array([[5, 1, 80, 33, 2, 17, 41]])

Widths = dict[str, Any]

AFFINE8 = {"mode": "affine", "bits": 8, "group_size": 32}
AFFINE4 = {"mode": "affine", "bits": 4, "group_size": 64}
AFFINE4_SMALL = {"mode": "affine", "bits": 4, "group_size": 32}
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}
MXFP8 = {"mode": "mxfp8", "bits": 8, "group_size": 32}


def parameters(model: Any) -> Tensors:
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1 whose MLA latent is wide enough to be stored in groups of 32 and 64."""
    return write_t1(tmp_path_factory.mktemp("t1"), kv_lora_rank=64)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return copy_folder(source, tmp_path / "build")


def quantise(tensors: Tensors, base: str, width: Widths) -> None:
    """Store the matrix ``base`` packed, as converters do."""
    names = ("weight", "scales", "biases")
    packed = mx.quantize(tensors.pop(f"{base}.weight"), **width)
    for name, tensor in zip(names, packed, strict=False):
        tensors[f"{base}.{name}"] = tensor


def dequantise(tensors: Tensors, base: str, width: Widths) -> mx.array:
    """The values of a packed matrix, float32."""
    scales, biases = tensors[f"{base}.scales"], tensors.get(f"{base}.biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    dense = mx.dequantize(tensors[f"{base}.weight"], scales, biases, **width)
    return dense.astype(mx.float32)


def store_widths(
    folder: Path, widths: Mapping[str, Widths | None], top: Widths = AFFINE4
) -> None:
    """Quantise matrices of ``folder`` as ``widths`` say, and say so in its config."""

    def change(tensors: Tensors) -> None:
        for base, width in widths.items():
            if width is not None and f"{base}.weight" in tensors:
                quantise(tensors, base, width)

    edit_tensors(folder, change)
    entries = {base: width for base, width in widths.items() if width is not None}
    edit_config(folder, lambda config: config.update(quantization={**top, **entries}))


# A part of a checkpoint, or nothing


@pytest.fixture(scope="module")
def two_bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t2(tmp_path_factory.mktemp("t2"))


def model_of(folder: Path) -> Model:
    return Model(ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))


def test_nothing_is_nothing(source: Path, two_bank: Path) -> None:
    for folder in (source, two_bank, FORMATS / "D-lm-q8", FORMATS / "A-vlm-saved"):
        assert model_of(folder).sanitize({}) == {}


@pytest.mark.parametrize("name", ["source", "two_bank", "D-lm-q8", "D-pn-2bit"])
def test_a_folder_with_a_config_only(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What stock sharded load does first, to see what kind of model it is."""
    folder = FORMATS / name if "-" in name else request.getfixturevalue(name)
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    loaded: Any = load_model(tmp_path, lazy=True, strict=False)
    model, config = loaded
    assert len(model.layers) == config["text_config"]["num_hidden_layers"]
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path)


@pytest.mark.filterwarnings("ignore:this build stores the router")
@pytest.mark.parametrize("name", ["source", "two_bank", "D-pn-graded-q8"])
def test_each_shard_alone(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What stock sharded load does next: the shards of one rank's layers."""
    folder = FORMATS / name if "-" in name else request.getfixturevalue(name)
    want = parameters(load_stored(folder))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        part = tmp_path / shard.stem
        part.mkdir()
        for file in (folder / "config.json", shard):
            (part / file.name).write_bytes(file.read_bytes())
        model, _ = load_model(part, lazy=True, strict=False)
        got = model_of(folder).sanitize(damage.load_shard(shard))
        assert got
        loaded = parameters(model)
        for key, tensor in got.items():
            assert_same(tensor, want[key], where=key)
            assert_same(loaded[key], want[key], where=key)


@pytest.mark.filterwarnings("ignore:this build stores the router")
@pytest.mark.parametrize("name", ["source", "two_bank", "D-pn-graded-q8", "D-lm-q8"])
def test_any_part_is_accepted(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever tensors a shard holds: no error, and nothing is made of halves."""
    folder = FORMATS / name if "-" in name else request.getfixturevalue(name)
    want = parameters(load_stored(folder))
    stored = read_stored(folder)
    random = Random(5)
    config = (folder / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    for kept in (0.02, 0.3, 0.5, 0.7, 0.9, 0.98):
        part = {k: v for k, v in stored.items() if random.random() < kept}
        # Without one bank a whole layer is known to be damaged; that is told elsewhere.
        part.pop("model.layers.3.mlp_res.norm_weight", None)
        for layer in range(8):
            part.pop(f"model.layers.{layer}.input_layernorm.weight", None)
        got = model_of(folder).sanitize(part)
        for key in set(got) & set(want):
            if got[key].dtype == want[key].dtype and key.endswith("weight"):
                assert_same(got[key], want[key], where=key)
        mx.save_safetensors(str(tmp_path / "model.safetensors"), part)
        load_model(tmp_path, lazy=True, strict=False)


# Query, key and value rows at different widths

KDA = "language_model.model.layers.1.self_attn"

MIXED = {
    "three widths": (AFFINE8, AFFINE4, None),
    "one of three": (None, None, AFFINE8),
    "two of three": (AFFINE4, AFFINE4, None),
    "other groups": (AFFINE4, AFFINE4_SMALL, AFFINE4),
    "affine and mxfp4": (AFFINE4_SMALL, MXFP4, AFFINE4_SMALL),
    "mxfp8 and affine": (MXFP8, AFFINE8, AFFINE8),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mix", MIXED)
def test_rows_of_different_widths_become_dense(
    copy: Path, mix: str, reverse: bool
) -> None:
    widths = dict(zip("qkv", MIXED[mix], strict=True))
    store_widths(copy, {f"{KDA}.{n}_proj": width for n, width in widths.items()})
    stored = read_stored(copy)
    names = sorted(stored, reverse=reverse)
    got = model_of(copy).sanitize({name: stored[name] for name in names})
    rows = []
    for name, width in widths.items():
        base = f"{KDA}.{name}_proj"
        dense = stored[f"{base}.weight"]
        rows.append(dequantise(stored, base, width) if width else dense)
    joined = got[f"{KDA}.qkv_proj.weight"]
    assert f"{KDA}.qkv_proj.scales" not in got
    assert f"{KDA}.qkv_proj.biases" not in got
    want = mx.concatenate(rows).astype(mx.bfloat16)
    assert_same(joined, want, where="qkv_proj")
    model = load_stored(copy)
    assert_same(model.layers[1].self_attn.qkv_proj.weight, want, where="loaded")
    assert model(IDS).shape == (1, 7, 576)


@pytest.mark.parametrize("width", [AFFINE8, AFFINE4, MXFP4, MXFP8, None])
def test_rows_of_one_width_stay_packed(copy: Path, width: Widths | None) -> None:
    store_widths(copy, {f"{KDA}.{name}_proj": width for name in "qkv"})
    stored = read_stored(copy)
    got = parameters(load_stored(copy))
    suffixes = ("weight", "scales", "biases")
    compared = 0
    for suffix in suffixes:
        rows = [stored.get(f"{KDA}.{name}_proj.{suffix}") for name in "qkv"]
        if rows[0] is not None:
            joined = got[f"{KDA}.qkv_proj.{suffix}"]
            assert_same(joined, mx.concatenate(rows), where=suffix)  # type: ignore
            compared += 1
    assert compared == (1 if width is None else 3 if width["mode"] == "affine" else 2)


# kv_b_proj, from which two parameters are derived (B29)

MLA = "language_model.model.layers.3.self_attn"
KV_B = f"{MLA}.kv_b_proj"


@pytest.mark.parametrize("width", [AFFINE8, AFFINE4, MXFP4, None])
def test_derived_from_kv_b_proj(copy: Path, source: Path, width: Widths | None) -> None:
    """Global 4-bit g64; the entry that names kv_b_proj names neither derived one."""
    others = [f"{MLA}.o_proj", f"{MLA}.g_proj", f"{KDA}.o_proj"]
    store_widths(copy, dict.fromkeys(others, AFFINE4) | {KV_B: width})
    stored, original = read_stored(copy), read_stored(source)[f"{KV_B}.weight"]
    model = load_stored(copy)
    got = parameters(model)
    heads, nope, values = 4, 16, 16

    def by_head(tensor: mx.array) -> mx.array:
        return tensor.reshape(heads, nope + values, -1)

    for suffix in ("weight", "scales", "biases"):
        if (tensor := stored.get(f"{KV_B}.{suffix}")) is not None:
            rows = by_head(tensor)[:, nope:]
            assert_same(got[f"{MLA}.unembed_out.{suffix}"], rows, where=suffix)
    assert (f"{MLA}.unembed_out.scales" in got) == (width is not None)

    embed_q = got[f"{MLA}.embed_q.weight"]
    assert embed_q.dtype == mx.bfloat16
    assert f"{MLA}.embed_q.scales" not in got
    keys = by_head(original)[:, :nope].swapaxes(1, 2)
    if width is None:
        assert_same(embed_q, keys, where="embed_q")
    else:
        exact = dequantise(stored, KV_B, width)
        want = by_head(exact)[:, :nope].swapaxes(1, 2)
        assert_close(embed_q, want, rel=2**-8, where="embed_q")
        # The source's own values are away by the width's error and no more.
        lost = mx.abs(exact - original.astype(mx.float32)).max()
        away = mx.abs(embed_q - keys.astype(mx.float32)).max()
        rounding = 2**-8 * mx.abs(exact).max()
        assert (away > 0).item()
        assert (away <= lost + rounding).item()
    layer = model.layers[3].self_attn.o_proj
    assert (layer.bits, layer.group_size) == (4, 64)
    assert mx.isfinite(model(IDS)).all().item()


@pytest.mark.parametrize("suffix", ["scales", "biases", "weight"])
def test_half_of_a_packed_kv_b_proj(copy: Path, suffix: str) -> None:
    store_widths(copy, {KV_B: AFFINE8})
    damage.drop_tensors(copy, f"{KV_B}.{suffix}")
    for load in (load_model, check_folder):
        with pytest.raises(
            CheckpointError, match=rf"layer 3: .*(kv_b_proj\.{suffix}|embed_q)"
        ):
            load(copy)


def test_swapped_halves_of_kv_b_proj_are_seen(copy: Path, source: Path) -> None:
    """Broken twin: value rows first."""
    want = load_stored(source)(IDS)

    def swap(tensor: mx.array) -> mx.array:
        heads = tensor.reshape(4, 32, -1)
        return mx.concatenate([heads[:, 16:], heads[:, :16]], axis=1).reshape(
            tensor.shape
        )

    damage.replace_tensor(copy, f"{KV_B}.weight", swap)
    assert relative_error(load_stored(copy)(IDS), want) > 1e-2


# Which block says how tensors are packed (B28)


def drop_block(config: dict[str, Any]) -> None:
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    config["text_config"].pop("quantization_config", None)


def nested_block(config: dict[str, Any]) -> None:
    block = config["quantization"]
    drop_block(config)
    config["text_config"]["quantization"] = block


@pytest.mark.parametrize("change", [drop_block, nested_block])
@pytest.mark.parametrize("name", ["D-lm-q8", "D-pn-graded-q8", "A-lm-uvmax-like"])
def test_without_a_block_the_tensors_decide(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = copy_folder(FORMATS / name, tmp_path / "build")
    edit_config(folder, change)
    want, got = load_stored(FORMATS / name), load_stored(folder)
    assert_same(got(IDS), want(IDS), where="logits")
    for key, tensor in parameters(want).items():
        assert_same(parameters(got)[key], tensor, where=key)


def test_mlx_widths_where_no_host_reads_them(tmp_path: Path) -> None:
    folder = copy_folder(FORMATS / "D-lm-q8", tmp_path / "build")
    edit_config(folder, lambda config: config.pop("quantization"))
    with pytest.raises(ConfigError, match="only under quantization_config"):
        load_model(folder)


def test_entries_are_found_whatever_their_prefix(tmp_path: Path) -> None:
    """The same build with its entries spelled in another format's names."""
    folder = copy_folder(FORMATS / "D-pn-graded-q8", tmp_path / "build")

    def respell(config: dict[str, Any]) -> None:
        block = config["quantization"]
        for path in [p for p in block if "." in p]:
            name = path.replace("block_sparse_moe", "mlp")
            block[f"language_model.{name}"] = block.pop(path)

    edit_config(folder, respell)
    want, got = load_stored(FORMATS / "D-pn-graded-q8"), load_stored(folder)
    assert_same(got(IDS), want(IDS), where="logits")


def test_the_block_itself_can_be_an_entry(copy: Path) -> None:
    """``true`` stands for the block's width."""
    store_widths(copy, {f"{MLA}.o_proj": AFFINE4})
    edit_config(copy, lambda c: c["quantization"].update({f"{MLA}.o_proj": True}))
    assert load_stored(copy).layers[3].self_attn.o_proj.bits == 4
    edit_config(copy, lambda c: c["quantization"].update(bits=8))
    with pytest.raises(CheckpointError, match=r"says affine 8-bit .* is affine 4-bit"):
        load_model(copy)


# Single transformations


def test_tied_embeddings_need_no_head(copy: Path) -> None:
    damage.edit_text_config(copy, tie_word_embeddings=True)
    store_widths(copy, {"language_model.lm_head": AFFINE4})
    model = load_stored(copy)
    assert not any("lm_head" in key for key in parameters(model))
    assert model(IDS).shape == (1, 7, 576)


def test_convolutions_of_either_layout(copy: Path, source: Path) -> None:
    """(channels, 1, width) and (channels, width, 1), also mixed in one layer."""
    want = parameters(load_stored(source))
    for name in "kv":
        damage.replace_tensor(
            copy, f"{KDA}.{name}_conv1d.weight", lambda t: t.swapaxes(1, 2)
        )
    got = parameters(load_stored(copy))
    assert_same(
        got[f"{KDA}.qkv_conv.conv.weight"],
        want[f"{KDA}.qkv_conv.conv.weight"],
        where="convolutions",
    )


def test_stored_types_are_kept(source: Path) -> None:
    got = parameters(load_stored(source))
    float32 = {key for key, tensor in got.items() if tensor.dtype == mx.float32}
    endings = {key.split(".self_attn.")[-1].split(".mlp.")[-1] for key in float32}
    assert endings == {
        "A_log",
        "dt_bias",
        "qkv_conv.conv.weight",
        "o_norm.weight",
        "e_score_correction_bias",
    }


def test_one_tensor_under_two_names(copy: Path) -> None:
    """The fused projection beside its parts, from another build's shard."""

    def fuse(tensors: Tensors) -> None:
        if f"{KDA}.q_proj.weight" in tensors:
            rows = [tensors[f"{KDA}.{name}_proj.weight"] for name in "qkv"]
            tensors[f"{KDA}.qkv_proj.weight"] = mx.concatenate(rows)

    edit_tensors(copy, fuse)
    with pytest.raises(
        CheckpointError, match=r"qkv_proj.weight and .*[qkv]_proj.weight are the same"
    ):
        load_model(copy)


def test_one_router_warning_for_all_layers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = load_model(FORMATS / "D-pn-graded-q8")[0]
    (warning,) = caught
    assert "router of 7 layers (first: layer 1)" in str(warning.message)
    gates = [layer.mlp.gate.weight for layer in model.layers[1:]]
    assert {gate.dtype for gate in gates} == {mx.float32}
    stored = read_stored(FORMATS / "D-pn-graded-q8")
    for i, gate in enumerate(gates, start=1):
        base = f"model.layers.{i}.block_sparse_moe.gate"
        want = dequantise(stored, base, {"bits": 8, "group_size": 64, "mode": "affine"})
        assert_close(gate, want, rel=1e-6, where=base, dtype=mx.float32)


def test_one_padding_warning_for_all_layers(copy: Path) -> None:
    def fill(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(".A_log"):
                values = to_numpy(tensors[name]).copy()
                values[-1] = 2.0
                tensors[name] = mx.array(values)

    edit_tensors(copy, fill)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(copy)
    (warning,) = caught
    assert "2 values more than there are heads" in str(warning.message)
    assert "(as in 3 more layers)" in str(warning.message)
