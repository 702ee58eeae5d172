"""What a conversion makes: the source's bytes, where the plan says, and nothing else."""

import filecmp
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibration_cases import samples_for
from small_builds import BITS, HIGH_COUNTS, patch, scrambled, write_source
from tiny_k3 import TEXT_SIZES

from kimi_k3 import convert
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.verify import verify
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.checkpoint.headers import read_header
from kimi_k3.checkpoint.source_layout import SourceTensor, source_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.conversion.build_layout import build_layout
from kimi_k3.conversion.convert_shard import ShardMaker
from kimi_k3.conversion.importance import Importance
from kimi_k3.conversion.provenance import RECORD, Provenance, ShardRecord
from kimi_k3.conversion.quantizer import quantize
from kimi_k3.errors import ConversionError
from kimi_k3.folder_check import check_folder
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.plan_sizes import SourceSizes

HEADS, NOPE, VALUE = 4, TEXT_SIZES["qk_nope_head_dim"], TEXT_SIZES["v_head_dim"]
LATENT = TEXT_SIZES["kv_lora_rank"]
MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

#: A matrix that is put together from three.
FUSED = "language_model.model.layers.0.self_attn.qkv_proj"

#: A graded plan with two banks, one bank, and quantised classes.
GRADED = scrambled(high=HIGH_COUNTS, bits=BITS | {"embed_tokens": 5})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted without a plan."""
    return convert(source, tmp_path_factory.mktemp("whole") / "build")


@pytest.fixture(scope="module")
def graded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("graded") / "build", GRADED)


@pytest.fixture(scope="module")
def calibration(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibration") / "out"
    calibrate(source, samples_for(source), out)
    return out


def identity(source: Path) -> ExpertPlan:
    return ExpertPlan.identity(ModelArgs.from_dict(read_config(source)).text_config)


def every_tensor(source: Path) -> Iterator[SourceTensor]:
    yield from source_tensors(ModelArgs.from_dict(read_config(source)))


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Name → bytes, one row for each entry of the first axis."""
    found = {}
    for path in folder.glob("*.safetensors"):
        raw = np.frombuffer(path.read_bytes(), np.uint8)
        for name, tensor in read_header(path).tensors.items():
            rows = raw[tensor.start : tensor.stop]
            found[name] = rows.reshape(tensor.shape[0], -1)
    return found


class Parts:
    """Bytes of the tensors of a build; what was asked for counts as used."""

    def __init__(self, build: Path):
        self.tensors = all_tensors(build)
        self.used: set[str] = set()

    def rows(self, name: str) -> np.ndarray:
        self.used.add(name)
        return self.tensors[name]

    def array(self, name: str, *shape: int) -> np.ndarray:
        return self.rows(name).reshape(-1).view(np.uint16).reshape(shape)


def as_in_source(parts: Parts, tensor: SourceTensor) -> bytes:
    """The bytes that ``tensor`` of the source has, from a build that keeps everything."""
    name = tensor.name
    if not name.startswith("language_model."):
        return parts.rows(name).tobytes()
    name = name.replace(".block_sparse_moe.", ".mlp.")
    module, _, leaf = name.rpartition(".")
    if ".experts." in name:
        layer, _, rest = module.partition(".experts.")
        expert, part = rest.split(".")
        suffix = "weight" if leaf == "weight_packed" else "scales"
        stacked = f"{layer}.switch_mlp.{MATRICES[part]}.{suffix}"
        return parts.rows(stacked)[int(expert)].tobytes()
    for place, letter in enumerate("qkv"):
        for stored, fused in (("conv1d", "conv.conv"), ("proj", "proj")):
            kda = tensor.layer != 3
            if kda and name.endswith(f".{letter}_{stored}.weight"):
                at = module.removesuffix(f"{letter}_{stored}")
                rows = parts.rows(f"{at}qkv_{fused}.weight")
                return np.split(rows, 3)[place].tobytes()
    if name.endswith(".kv_b_proj.weight"):
        at = module.removesuffix("kv_b_proj")
        keys = parts.array(f"{at}embed_q.weight", HEADS, LATENT, NOPE)
        values = parts.array(f"{at}unembed_out.weight", HEADS, VALUE, LATENT)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).tobytes()
    if name.endswith(".gate.e_score_correction_bias"):
        name = name.replace(".gate.", ".")
    return parts.rows(name).tobytes()


def differing(source: Path, build: Path) -> list[str]:
    """Source tensors that ``build`` does not give back; all of it must be asked for."""
    parts, stored, odd = Parts(build), all_tensors(source), []
    for tensor in every_tensor(source):
        wanted, found = stored[tensor.name], as_in_source(parts, tensor)
        if tensor.name.endswith(".A_log"):  # padded behind the heads
            wanted = wanted[:HEADS]
        if found != wanted.tobytes():
            odd.append(tensor.name)
    index = json.loads((build / "model.safetensors.index.json").read_text())
    assert parts.used == set(index["weight_map"])
    return odd


def test_every_tensor_maps_back_to_its_source_bytes(source: Path, whole: Path):
    assert differing(source, whole) == []
    assert verify(whole).passed
    layers = "language_model.model.layers"
    stored = check_folder(whole).folder.tensors
    for name, dtype in (
        (f"{layers}.0.self_attn.A_log", "F32"),
        (f"{layers}.0.self_attn.qkv_conv.conv.weight", "F32"),
        (f"{layers}.1.mlp.e_score_correction_bias", "F32"),
        (f"{layers}.1.mlp.gate.weight", "BF16"),
    ):
        assert stored[name].dtype == dtype


@pytest.mark.parametrize("suffix", ["weight", "scales", "A_log", "bias", "vision"])
def test_a_changed_tensor_does_not_map_back(
    source: Path, whole: Path, suffix: str, tmp_path: Path
):
    """Broken twins: a bit of one tensor of each kind."""
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    names = check_folder(whole).folder.tensors
    odd = next(
        name
        for name in names
        if (name.endswith(suffix) and "layers.1" in name)
        or (suffix == "vision" and name.startswith("vision"))
    )

    def change(rows: np.ndarray) -> None:
        rows[-1, -1] ^= 1

    patch(copy, odd, change)
    assert len(differing(source, copy)) == 1


def test_an_identity_plan_changes_the_record_only(
    source: Path, whole: Path, tmp_path: Path
):
    build = convert(source, tmp_path / "build", identity(source))
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in build.iterdir())
    same, other, _ = filecmp.cmpfiles(whole, build, names, shallow=False)
    assert other == ["config.json"]
    assert len(same) == 7 + 1 + 4  # shards, index, side files
    one, two = read_config(whole), read_config(build)
    assert one[RECORD].pop("plan") is None
    assert ExpertPlan.from_dict(two[RECORD].pop("plan")) == identity(source)
    assert one == two


def test_another_order_is_another_build(source: Path, whole: Path, tmp_path: Path):
    """Broken twin of the identity."""
    build = convert(source, tmp_path / "build", scrambled((16, 16, 16, 16)))
    names = [path.name for path in whole.iterdir()]
    _, other, _ = filecmp.cmpfiles(whole, build, names, shallow=False)
    assert len(other) == 1 + 4  # the config, and layers with experts
    assert len(differing(source, build)) > 4 * 16


def test_files_are_those_of_the_layout(source: Path, graded: Path):
    layout = build_layout(read_config(source), GRADED)
    for shard in layout.shards:
        header = read_header(graded / shard.file)
        assert [(n, t.shape, t.dtype) for n, t in header.tensors.items()] == [
            (t.name, t.shape, t.dtype) for t in shard.tensors
        ]
    index = json.loads((graded / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == layout.weight_map
    assert list(index["weight_map"]) == sorted(layout.weight_map)
    assert index["metadata"] == {"total_size": layout.nbytes}
    assert layout.nbytes == SourceSizes.of(read_config(source)).plan_bytes(GRADED)
    assert check_folder(graded).data_bytes == layout.nbytes


def test_router_and_high_bank_follow_the_plan(source: Path, graded: Path):
    layers, copied = "language_model.model.layers", 0
    stored_in, built = all_tensors(source), all_tensors(graded)
    for layer, plan in GRADED.layers.items():
        moe = f"{layers}.{layer}.block_sparse_moe."
        for mine, theirs in (
            ("gate.weight", "gate.weight"),
            ("e_score_correction_bias", "gate.e_score_correction_bias"),
        ):
            rows = stored_in[f"{moe}{theirs}"][list(plan.order)]
            assert (built[f"{layers}.{layer}.mlp.{mine}"] == rows).all()
        bank = "bank_hi." if plan.low else ""
        for part, matrix in MATRICES.items():
            for stored, suffix in (("packed", "weight"), ("scale", "scales")):
                name = f"{layers}.{layer}.mlp.switch_mlp.{bank}{matrix}.{suffix}"
                found = built[name]
                for row, expert in enumerate(plan.high):
                    wanted = f"{moe}experts.{expert}.{part}.weight_{stored}"
                    assert found[row].tobytes() == stored_in[wanted].tobytes()
                    copied += 1
    assert copied == 6 * sum(HIGH_COUNTS)


def dense_expert(
    tensors: dict[str, np.ndarray], layer: int, expert: int, part: str
) -> mx.array:
    at = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
    codes = mx.array(tensors[f"{at}.weight_packed"]).view(mx.uint32)
    scales = mx.array(tensors[f"{at}.weight_scale"])
    return mx.dequantize(codes, scales, group_size=32, bits=4, mode="mxfp4")


def same(
    build: dict[str, np.ndarray],
    module: str,
    row: int | None,
    parts: tuple[mx.array, ...],
) -> bool:
    """Whether a module, or its row, is stored as the three ``parts``."""
    for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
        found = build[f"{module}.{suffix}"]
        wanted = np.array(part.view(mx.uint8)).reshape(-1)
        found = found.reshape(-1) if row is None else found[row]
        if not np.array_equal(found, wanted):
            return False
    return True


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_low_bank_and_classes_are_quantised(
    source: Path, graded: Path, calibration: Path, weighed: bool, tmp_path: Path
):
    folder = graded
    if weighed:
        folder = convert(source, tmp_path / "build", GRADED, moments=calibration)
    build, stored_in = all_tensors(folder), all_tensors(source)
    layers = "language_model.model.layers"
    moments = {
        layer: LayerMoments.load(calibration / "moments" / f"layer-{layer:03d}.npz")
        for layer in range(5)
    }

    def importance(layer: int, module: str, expert: int | None = None) -> Any:
        if not weighed:
            return None
        found = moments[layer].of(module)
        return mx.array(found.sum(axis=0) if expert is None else found[expert])

    looked = 0
    for layer, plan in GRADED.layers.items():
        for row, expert in enumerate(plan.low):
            for part, matrix in MATRICES.items():
                dense = dense_expert(stored_in, layer, expert, part)
                weights = importance(layer, f"mlp.switch_mlp.{matrix}", expert)
                wanted = quantize(dense, bits=2, group_size=64, importance=weights)
                module = f"{layers}.{layer}.mlp.switch_mlp.bank_lo.{matrix}"
                assert same(build, module, row, wanted), (layer, expert, part)
                looked += 1
    assert looked == 3 * (7 + 8 + 1)

    up = f"{layers}.2.block_sparse_moe.shared_experts.up_proj.weight"
    weight = mx.array(stored_in[up]).view(mx.bfloat16)
    weights = importance(2, "mlp.shared_experts.up_proj")
    module = f"{layers}.2.mlp.shared_experts.up_proj"
    wanted = quantize(weight, bits=4, group_size=64, importance=weights)
    assert same(build, module, None, wanted)

    table = stored_in["language_model.model.embed_tokens.weight"]
    weight = mx.array(table).view(mx.bfloat16)
    wanted = quantize(weight, bits=5, group_size=64)
    assert same(build, "language_model.model.embed_tokens", None, wanted)


def test_moments_that_heads_share(calibration: Path):
    """``unembed_out`` has a matrix a head, and all read the same: one row for all."""
    module = "language_model.model.layers.3.self_attn.unembed_out"
    found = LayerMoments.load(calibration / "moments" / "layer-003.npz")
    inputs = found.of("self_attn.unembed_out").shape[-1]
    fingerprint = SaliencyTable.load(calibration / "saliency.npz").source["fingerprint"]
    importance = Importance(calibration, fingerprint, [module])
    importance.check({module: (4, inputs)})
    with pytest.raises(ConversionError, match=r"but it wants \(4, 17\)"):
        importance.check({module: (4, 17)})


def test_moments_matter(source: Path, graded: Path, calibration: Path, tmp_path: Path):
    """Broken twin of the weighed build: it is not the plain one."""
    weighed = convert(source, tmp_path / "build", GRADED, moments=calibration)
    names = [path.name for path in graded.iterdir()]
    _, other, _ = filecmp.cmpfiles(graded, weighed, names, shallow=False)
    assert len(other) > 4
    record = Provenance.of_config(read_config(weighed))
    plain = Provenance.of_config(read_config(graded))
    assert record
    assert plain
    assert record.moments
    assert plain.moments is None


def test_the_record_says_what_was_done(source: Path, graded: Path):
    record = Provenance.of_config(read_config(graded))
    assert record is not None
    assert record.plan == GRADED
    assert record.kept == {layer: GRADED.order(layer) for layer in GRADED.layers}
    assert set(record.tool) == {"kimi-k3-mlx", "mlx"}
    for folder, shards in ((source, record.source), (graded, record.shards)):
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert list(shards) == files
        for file, shard in shards.items():
            path = folder / file
            hashed = hashlib.sha256(path.read_bytes()).hexdigest()
            wanted = replace(
                ShardRecord.of(path), sha256=hashed if folder == graded else None
            )
            assert shard == wanted


def test_a_result_that_is_not_the_layouts_is_a_bug(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Broken twin of the writer's look at shapes: a file is never silently another."""
    monkeypatch.setattr(ShardMaker, "quantised", {FUSED: None}, raising=True)
    monkeypatch.setattr(
        "kimi_k3.conversion.convert_shard.ShardMaker._quantised",
        lambda self, writer, module, weight, *_: writer.put(
            f"{module}.weight", weight[1:]
        ),
    )
    with pytest.raises(
        ConversionError, match="qkv_proj.weight would be.*please report"
    ):
        convert(source, tmp_path / "build")
    assert not (tmp_path / "build" / "config.json").exists()


def test_the_plan_may_be_a_file(source: Path, graded: Path, tmp_path: Path):
    build = convert(source, tmp_path / "build", GRADED.save(tmp_path / "plan.json"))
    assert not filecmp.dircmp(graded, build).diff_files
