"""What convert refuses, before it writes anything."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from calibration_cases import THREE_LAYERS, samples_for
from tiny_k3 import TEXT_SIZES, WIDE_EXPERTS, write_t1, write_t2

from kimi_k3 import convert
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.conversion import convert_checks, source_files
from kimi_k3.conversion.file_hashes import FileHashes
from kimi_k3.errors import (
    CheckpointError,
    ConversionError,
    KimiK3Error,
    PlanError,
    TruncatedShardError,
)
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

SIZES = THREE_LAYERS | WIDE_EXPERTS

PLAN = ExpertPlan(
    experts=TEXT_SIZES["num_experts"],
    top_k=TEXT_SIZES["num_experts_per_token"],
    layers=dict.fromkeys((1, 2), LayerPlan((0, 1, 2), (3, 4))),
)


@pytest.fixture(scope="module")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("source") / "t1", tokenizer=True, **SIZES)


@pytest.fixture
def source(shared_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_source, tmp_path / "source"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def rewrite(source: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    """Change the tensors of the last shard and the index with them."""
    path = sorted(source.glob("*.safetensors"))[-1]
    tensors: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    mx.eval(tensors)
    before = set(tensors)
    change(tensors)
    mx.save_safetensors(str(path), tensors)
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for name in before - set(tensors):
        del index["weight_map"][name]
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    index_path.write_text(json.dumps(index))


def change_config(source: Path, **text: Any) -> None:
    path = source / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text
    path.write_text(json.dumps(config))


def refused(source: Path, out: Path, message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(KimiK3Error, match=message):
        convert(source, out, *args, **options)
    assert not out.exists()


NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight_packed"


def lose(tensors: dict[str, mx.array]) -> None:
    del tensors[NORM]


def add(tensors: dict[str, mx.array]) -> None:
    tensors["language_model.model.layers.2.extra.weight"] = mx.zeros(3)


def round_bias(tensors: dict[str, mx.array]) -> None:
    name = "language_model.model.layers.2.block_sparse_moe.gate.e_score_correction_bias"
    tensors[name] = tensors[name].astype(mx.bfloat16)


def shorten(tensors: dict[str, mx.array]) -> None:
    tensors[EXPERT] = tensors[EXPERT][:-1]


def few_heads(tensors: dict[str, mx.array]) -> None:
    name = "language_model.model.layers.2.self_attn.A_log"
    tensors[name] = tensors[name][:3]


SOURCES: dict[str, tuple[Callable[[dict[str, mx.array]], None], str]] = {
    "lost": (lose, f"lacks {NORM}"),
    "extra": (add, "holds .*extra.weight, which the release's format does not"),
    "rounded": (round_bias, "correction_bias is stored as BF16 .*format is F32"),
    "shape": (shorten, r"w1.weight_packed is stored as U8 \(63, 32\)"),
    "heads": (few_heads, r"A_log is stored as F32 \(3,\)"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_is_not_whole_in_the_releases_format(
    source: Path, out: Path, kind: str
):
    change, message = SOURCES[kind]
    rewrite(source, change)
    refused(source, out, message)


def test_a_log_of_any_length_from_the_heads_on(source: Path, tmp_path: Path):
    builds = []
    for stored in (4, 32):
        padded = write_t1_of(tmp_path / f"padded-{stored}", stored)
        builds.append(convert(padded, tmp_path / f"build-{stored}"))
    one, other = (
        sorted(build.glob("*.safetensors"), key=lambda path: path.name)
        for build in builds
    )
    for mine, theirs in zip(one, other, strict=True):
        assert mine.read_bytes() == theirs.read_bytes()


def write_t1_of(folder: Path, a_log_stored: int) -> Path:
    from tiny_k3 import t1_config, write_tk

    from kimi_k3.nano.random_checkpoint import write_random_checkpoint

    write_tk(folder)
    return write_random_checkpoint(
        folder, t1_config(**SIZES), shards=2, a_log_stored=a_log_stored
    )


def test_other_formats_are_named(source: Path, out: Path, tmp_path: Path):
    build = convert(source, tmp_path / "build")
    refused(build, out, r"build in MLX's format: it holds .*switch_mlp.*Moonshot's own")
    refused(write_t2(tmp_path / "t2"), out, "is a build in MLX's format")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "k3.gguf").touch()
    refused(tmp_path / "gguf", out, "GGUF is the format of llama.cpp")
    refused(tmp_path / "nothing", out, "is not a folder")


def test_a_truncated_or_missing_shard(source: Path, out: Path):
    last = sorted(source.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-1])
    refused(source, out, "incomplete download")
    last.unlink()
    refused(source, out, f"shard {last.name} named by .* is not there")


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"experts": 15}, "checkpoint with experts = 15, but this one has 16"),
    "layers": ({"layers": {1: PLAN.layers[1]}}, "the plan lacks layer 2"),
    "fingerprint": (
        {"source": {"fingerprint": "0" * 32}},
        "made for the checkpoint with the fingerprint 0000.*Plan with the saliency",
    ),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_of_another_checkpoint(source: Path, out: Path, kind: str):
    change, message = PLANS[kind]
    refused(source, out, message, replace(PLAN, **change))


def test_a_plan_of_this_checkpoint(source: Path, out: Path):
    """Broken twin: the very fingerprint passes."""
    fingerprint = source_files.SourceFiles(source).fingerprint
    convert(source, out, replace(PLAN, source={"fingerprint": fingerprint}))
    assert (out / "config.json").exists()


def test_a_plan_that_is_none(source: Path, out: Path, tmp_path: Path):
    (tmp_path / "plan.json").write_text("{}")
    refused(source, out, "plan.json: it does not hold", tmp_path / "plan.json")
    refused(source, out, "gone.json cannot be read", tmp_path / "gone.json")
    with pytest.raises(PlanError):
        convert(source, out, tmp_path / "gone.json")


@pytest.fixture(scope="module")
def calibration(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibration") / "out"
    calibrate(shared_source, samples_for(shared_source), out)
    return out


def test_moments_of_another_checkpoint(
    source: Path, out: Path, calibration: Path, tmp_path: Path
):
    change_config(source, rms_norm_eps=1e-6)
    refused(
        source, out, "a calibration of another checkpoint", PLAN, moments=calibration
    )
    refused(source, out, r"holds no saliency\.npz", PLAN, moments=tmp_path)


def test_moments_that_are_not_there(
    source: Path, out: Path, calibration: Path, tmp_path: Path
):
    mine = Path(shutil.copytree(calibration, tmp_path / "calibration"))
    (mine / "moments" / "layer-002.npz").unlink()
    refused(source, out, r"layer-002\.npz cannot be read", PLAN, moments=mine)
    shutil.rmtree(mine / "moments")
    refused(source, out, "made with `--moments off`", PLAN, moments=mine)


def cut(content: bytes) -> bytes:
    return content[:-9]


def flip(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flip])
def test_moments_that_are_damaged_are_found_first(
    source: Path,
    out: Path,
    calibration: Path,
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
):
    """Not when the last layer is reached, after hours."""
    mine = Path(shutil.copytree(calibration, tmp_path / "calibration"))
    last = mine / "moments" / "layer-002.npz"
    last.write_bytes(damage(last.read_bytes()))
    refused(source, out, r"layer-002\.npz is damaged", PLAN, moments=mine)


def test_moments_of_another_layer(
    source: Path, out: Path, calibration: Path, tmp_path: Path
):
    mine = Path(shutil.copytree(calibration, tmp_path / "calibration"))
    folder = mine / "moments"
    shutil.copy(folder / "layer-001.npz", folder / "layer-002.npz")
    told = r"layer-002\.npz and layer-001\.npz hold the same"
    refused(source, out, told, PLAN, moments=mine)
    shutil.copy(folder / "layer-000.npz", folder / "layer-002.npz")
    refused(source, out, r"layer-002\.npz: no moments of mlp", PLAN, moments=mine)

    path = calibration / "moments" / "layer-002.npz"
    moments = LayerMoments.load(path)
    assert moments.down is not None
    replace(moments, down=moments.down[:-1]).save(folder / "layer-002.npz")
    told = (
        r"layer-002\.npz: the moments of .*bank_lo\.down_proj are of shape \(15, 64\)"
    )
    refused(source, out, told, PLAN, moments=mine)
    shutil.copy(path, folder)
    convert(source, out, PLAN, moments=mine)


def test_moments_that_nothing_needs(source: Path, out: Path, calibration: Path):
    said: list[str] = []
    convert(source, out, moments=calibration / "moments", tell=said.append)
    assert any("is not used: nothing is quantised again" in text for text in said)


def test_the_target_is_a_folder_of_its_own(source: Path, tmp_path: Path):
    before = sorted(path.name for path in source.iterdir())
    for out in (source, source / ".." / "source"):
        with pytest.raises(ConversionError, match="is the source"):
            convert(source, out)
    for out in (source / "build", tmp_path):
        with pytest.raises(ConversionError, match="is not apart from the source"):
            convert(source, out)
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="is not a folder"):
        convert(source, tmp_path / "file")
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_target_that_holds_something(source: Path, out: Path):
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / ".hidden").touch()
    for resume in (False, True):
        with pytest.raises(ConversionError, match=r"it holds \.hidden and 1 more"):
            convert(source, out, resume=resume)
    assert sorted(path.name for path in out.iterdir()) == [".hidden", "notes.txt"]
    assert (out / "notes.txt").read_text() == "mine"


def test_an_empty_target_is_fine(source: Path, out: Path):
    out.mkdir()
    (out / ".DS_Store").touch()
    convert(source, out)
    assert (out / "config.json").exists()


def test_room_on_the_disk(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    usage = SimpleNamespace(free=convert_checks.SPARE_BYTES + 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(source, out, r"has 0\.1 GB free, but 0\.1 GB are .* bytes too few")
    usage.free = 10**9
    convert(source, out)


SIDE_FILES = {
    "generation_config.json": ("[]", "generation_config.json holds no JSON object"),
    "tiktoken.model": (None, "tiktoken.model cannot be read"),
    "tokenizer_config.json": ("{", "tokenizer_config.json is not JSON"),
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_files_beside_the_shards_are_read_first(source: Path, out: Path, name: str):
    """B41: not when all shards are written, and never left out in silence."""
    content, message = SIDE_FILES[name]
    (source / name).unlink()
    if content is not None:
        (source / name).write_text(content)
    refused(source, out, message)


def test_a_source_that_names_no_end_of_a_turn(source: Path, out: Path):
    for name in ("generation_config.json", "tiktoken.model", "tokenizer_config.json"):
        (source / name).unlink()
    path = source / "config.json"
    config = json.loads(path.read_text())
    for block in (config, config["text_config"]):
        block.pop("eos_token_id", None)
    path.write_text(json.dumps(config))
    refused(source, out, "says nowhere which ids end a turn")


def test_what_is_left_out_is_told(source: Path, out: Path):
    (source / "secrets.json").write_text("{}")
    (source / "README.md").touch()
    said: list[str] = []
    convert(source, out, tell=said.append)
    assert said == ["left out of the build: README.md, secrets.json."]
    assert not (out / "secrets.json").exists()


def test_targets_and_sources_that_no_path_can_name(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    for mine, target, message in (
        ("", out, "source is ''; wanted the path of a folder"),
        (source, "", "out is ''; wanted the path of a folder"),
        (None, out, "source is None; wanted"),
        (source, tmp_path / ("x" * 300), "out: .* cannot be looked at: File name too"),
        ("x" * 300, out, "source: x+ cannot be looked at: File name too long"),
        (source, f"{tmp_path}/a\0b", "out is .*: no path can hold that"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert(mine, target)  # type: ignore[arg-type]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match="is a link to .*nowhere, which is not"):
        convert(source, link)
    with pytest.raises(PlanError, match="the plan is .*'a': 1.*; wanted an Exp"):
        convert(source, out, {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the plan is ''; wanted an ExpertPlan"):
        convert(source, out, "")
    with pytest.raises(ConversionError, match="moments is ''; wanted the path"):
        convert(source, out, moments="")
    assert not out.exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_target_in_a_file_system_that_takes_none(source: Path):
    with pytest.raises(ConversionError, match="/proc/x cannot be written: No such"):
        convert(source, "/proc/x")


def test_a_target_that_cannot_be_made(source: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="cannot be written: Not a directory"):
        convert(source, tmp_path / "file" / "out")


def test_scales_that_are_no_numbers(source: Path, out: Path):
    def damage(tensors: dict[str, mx.array]) -> None:
        name = EXPERT.replace("packed", "scale")
        tensors[name] = tensors[name].at[0, 0].add(255 - tensors[name][0, 0])

    rewrite(source, damage)
    for plan in (None, PLAN):  # copied, and quantised again
        shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(
            CheckpointError, match="experts.3.w1.weight_scale holds .*255"
        ):
            convert(source, out, plan)
        assert not (out / "config.json").exists()


QKV = "language_model.model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("bits", [{}, {"kda.qkv_proj": 4}], ids=["fused", "quantised"])
def test_values_that_are_none_are_named(
    source: Path, out: Path, value: float, bits: dict[str, int]
):
    """The source's tensor, its layer and its file, where values are put anew."""

    def damage(tensors: dict[str, mx.array]) -> None:
        tensors[QKV][3, 5] = value

    rewrite(source, damage)
    last = sorted(source.glob("*.safetensors"))[-1].name
    with pytest.raises(CheckpointError, match=f"{last}: {QKV} holds NaN or infinity"):
        convert(source, out, replace(PLAN, bits=bits))
    assert not (out / "config.json").exists()


def test_values_that_no_scale_fits_are_named(source: Path, out: Path):
    def damage(tensors: dict[str, mx.array]) -> None:
        tensors[QKV][3, 5] = 2.0**125

    rewrite(source, damage)
    told = "layers.2.self_attn.qkv_proj cannot be quantised: the weights hold"
    with pytest.raises(ConversionError, match=told):
        convert(source, out, replace(PLAN, bits={"kda.qkv_proj": 4}))


def test_a_repaired_source_begins_anew(source: Path, out: Path):
    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, progress=stop)
    change_config(source, rms_norm_eps=1e-6)
    told = (
        "source's fingerprint was '[0-9a-f]{12}' and is .*exchanged since: nothing of it "
        "can be kept. Delete the folder"
    )
    with pytest.raises(ConversionError, match=told):
        convert(source, out, resume=True)


def test_a_shard_that_becomes_shorter(source: Path, out: Path):
    last = sorted(source.glob("*.safetensors"))[-1]
    size = last.stat().st_size

    def cut(progress: Any) -> None:
        if progress.finished and progress.shard == 0:
            os.truncate(last, size - 1)

    with pytest.raises(TruncatedShardError, match="became shorter"):
        convert(source, out, progress=cut)


def test_hashes_are_held_against_the_hubs(source: Path, out: Path):
    first, *others = sorted(source.glob("*.safetensors"))
    with FileHashes([first, *others]) as hashes:
        found = hashes.take(wait=lambda: None)
        assert hashes.take() == {}
        assert hashes.nbytes == hashes.nbytes_all
    convert(source, out, hash_source=True)
    record = json.loads((out / "config.json").read_text())["conversion"]
    stated = {f: shard["sha256"] for f, shard in record["source"]["shards"].items()}
    assert stated == found

    noted = source / ".cache/huggingface/download"
    noted.mkdir(parents=True)
    for path in others:
        (noted / f"{path.name}.metadata").write_text(f"c\n{found[path.name]}\n1\n")
    (noted / f"{first.name}.metadata").write_text(f"c\n{'0' * 64}\n1\n")
    shutil.rmtree(out)
    with pytest.raises(
        CheckpointError, match=f"{first.name} is damaged: .*recorded 000"
    ):
        convert(source, out, hash_source=True)
    (noted / f"{first.name}.metadata").write_text(f"c\n{found[first.name]}\n1\n")
    convert(source, out, hash_source=True, resume=True)
    record = json.loads((out / "config.json").read_text())["conversion"]
    for shard in record["source"]["shards"].values():
        assert shard["sha256"] == shard["hub_sha256"]
