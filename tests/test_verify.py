"""``kimi-k3 verify``: planted faults are found, and a whole build passes."""

import json
from collections.abc import Callable
from pathlib import Path

import damage
import mlx.core as mx
import numpy as np
import pytest
from closeness import to_numpy
from damage import copy_folder
from fresh_python import installed_command, run_command
from golden_data import Case
from tiny_k3 import write_t1, write_t2

from kimi_k3.build import verify as module
from kimi_k3.build.verify import verify
from kimi_k3.build.verify_report import Check, Finding, VerifyReport
from kimi_k3.checkpoint import values
from kimi_k3.nano.tokenizer_files import write_tokenizer

LAYER = "language_model.model.layers.1."
EXPERT = f"{LAYER}block_sparse_moe.experts.5.w1"

CHECKS = ["files", "index", "tensors", "values", "side files"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1 with a tokenizer."""
    folder = write_t1(tmp_path_factory.mktemp("t1"))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return copy_folder(whole, tmp_path / "build")


def faults(folder: Path) -> str:
    """What is wrong with ``folder``, which must not pass."""
    report = verify(folder)
    assert not report.passed
    return "\n".join(finding.what for finding in report.faults)


def test_a_whole_build_passes(whole: Path) -> None:
    report = verify(whole)
    assert report.passed
    assert [check.name for check in report.checks] == CHECKS
    assert all(check.looked_at > 0 for check in report.checks)
    assert report.findings == ()
    assert "This build is whole." in report.text()


def test_a_two_bank_build_passes(tmp_path: Path) -> None:
    folder = write_t2(tmp_path)
    write_tokenizer(folder)
    assert verify(folder).passed


def lacks_side_files_only(folder: Path) -> bool:
    report = verify(folder)
    looked = [check.looked_at > 0 for check in report.checks]
    only = ["tokenizer_config.json" in fault.what for fault in report.faults] == [True]
    return only and looked == [True, True, True, True, False]


def test_builds_of_the_wild_lack_side_files_only(build: Case) -> None:
    assert lacks_side_files_only(build.folder)


def test_source_checkpoints_lack_side_files_only(golden: Case) -> None:
    assert lacks_side_files_only(golden.folder)


def test_every_fault_of_a_folder_is_listed(copy: Path) -> None:
    (copy / "model-00002-of-000003.safetensors").unlink()
    with (copy / "model-00001-of-000003.safetensors").open("r+b") as file:
        file.truncate(10_000)
    (copy / "model-extra.safetensors").write_bytes(b"")
    (copy / "tiktoken.model").unlink()
    found = faults(copy)
    assert found.count("\n") == 3
    assert "00001-of-000003.safetensors is 10000 bytes but" in found
    assert "shard model-00002-of-000003.safetensors named by" in found
    assert "model-extra.safetensors is not named by" in found
    assert "tiktoken.model cannot be read" in found


def test_foreign_and_unreadable_folders_are_findings(tmp_path: Path) -> None:
    assert "not a folder" in faults(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "a 'qwen3' model, not a Kimi K3" in faults(tmp_path)
    report = verify(tmp_path)
    assert report.checks == (Check("files", 0, "shards"),)


def first_value(value: float) -> Callable[[mx.array], mx.array]:
    def put(tensor: mx.array) -> mx.array:
        flat = tensor.astype(mx.float32).flatten()
        flat = mx.concatenate([mx.array([value]), flat[1:]])
        return flat.reshape(tensor.shape).astype(tensor.dtype)

    return put


def last_byte(value: int) -> Callable[[mx.array], mx.array]:
    def put(tensor: mx.array) -> mx.array:
        scales = to_numpy(tensor).copy()
        scales[-1, -1] = value
        return mx.array(scales)

    return put


VALUES = {
    "NaN scale byte": (
        f"{EXPERT}.weight_scale",
        last_byte(255),
        "holds the scale byte 255, which means NaN",
    ),
    "NaN in a norm": (
        f"{LAYER}input_layernorm.weight",
        first_value(float("nan")),
        "holds NaN or infinity",
    ),
    "infinity in A_log": (
        f"{LAYER}self_attn.A_log",
        first_value(float("inf")),
        "holds NaN or infinity",
    ),
    "infinity in float16": (
        f"{LAYER}self_attn.o_proj.weight",
        lambda tensor: first_value(float("-inf"))(tensor.astype(mx.float16)),
        "holds NaN or infinity",
    ),
    "A_log not padded with zeros": (
        f"{LAYER}self_attn.A_log",
        lambda tensor: mx.concatenate([tensor[:-1], mx.array([0.5])]),
        "has values other than zero behind those of its heads",
    ),
    "zeros for scales": (
        f"{EXPERT}.weight_scale",
        mx.zeros_like,
        "is all zero, as an interrupted download leaves it",
    ),
    "zeros for a matrix": (
        f"{LAYER}self_attn.o_proj.weight",
        mx.zeros_like,
        "is all zero",
    ),
    "zeros for a norm": (
        f"{LAYER}input_layernorm.weight",
        mx.zeros_like,
        "is all zero",
    ),
}


@pytest.mark.parametrize("fault", VALUES)
def test_planted_values_are_found(copy: Path, fault: str) -> None:
    name, change, message = VALUES[fault]
    damage.replace_tensor(copy, name, change)
    found = faults(copy)
    assert f"{name} {message}" in found
    assert ".safetensors: " in found
    assert found.count("\n") == 0


def test_zeros_where_they_may_be(copy: Path) -> None:
    damage.replace_tensor(copy, f"{LAYER}self_attn.dt_bias", mx.zeros_like)
    bias = f"{LAYER}block_sparse_moe.gate.e_score_correction_bias"
    damage.replace_tensor(copy, bias, mx.zeros_like)
    assert verify(copy).passed


def test_many_faults_of_a_shard_are_one_finding(copy: Path) -> None:
    def spoil(tensors: damage.Tensors) -> None:
        for name in tensors:
            if name.endswith("weight_scale") and name.startswith(LAYER):
                tensors[name] = last_byte(255)(tensors[name])

    damage.edit_tensors(copy, spoil)
    found = faults(copy)
    assert found.count("\n") == 0
    assert "(as do 47 more tensors)" in found


def test_values_are_read_a_little_at_a_time(
    whole: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in a later chunk is found, and no read is larger than a chunk."""
    sizes = []
    frombuffer = np.frombuffer

    def noted(raw: bytes, dtype: np.dtype) -> np.ndarray:
        sizes.append(len(raw))
        return frombuffer(raw, dtype)

    monkeypatch.setattr(values, "CHUNK_BYTES", 256)
    monkeypatch.setattr(np, "frombuffer", noted)
    assert verify(whole).passed
    damage.replace_tensor(copy, f"{EXPERT}.weight_scale", last_byte(255))
    damage.replace_tensor(
        copy, "language_model.lm_head.weight", lambda t: first_value(np.nan)(t)[::-1]
    )
    found = faults(copy)
    assert "lm_head.weight holds NaN" in found
    assert "scale byte 255" in found
    assert max(sizes) == 256


def test_progress_is_told(whole: Path) -> None:
    told: list[tuple[str, int, int]] = []
    assert verify(whole, progress=lambda *step: told.append(step)).passed
    what, done, totals = zip(*told, strict=True)
    assert set(what) == {"values"}
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def test_total_size_of_the_index(copy: Path) -> None:
    damage.edit_json(
        copy / damage.INDEX, lambda index: index["metadata"].update(total_size=7)
    )
    assert "gives a total_size of 7 bytes" in faults(copy)


def test_side_files(copy: Path, tmp_path: Path) -> None:
    damage.edit_config(copy, lambda config: config.update(eos_token_id=9999))
    (copy / "generation_config.json").unlink()
    found = faults(copy)
    assert "eos_token_id is 9999, which is none of the 576 token ids" in found
    assert "generation_config.json is not there" not in found
    assert "note: generation_config.json is not there" in verify(copy).text()
    smaller = write_t1(tmp_path / "smaller", vocab_size=512)
    write_tokenizer(smaller)
    assert "576 token ids, but config.json's vocab_size is 512" in faults(smaller)


def test_a_check_that_looked_at_nothing_is_a_failure(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not VerifyReport("x", (), (), 0.0).passed
    nothing = VerifyReport("x", (Check("files", 3, ""), Check("values", 0, "")), (), 0)
    assert not nothing.passed
    assert "Not every check could be done." in nothing.text()
    note = VerifyReport("x", (Check("files", 3, ""),), (Finding("n", note=True),), 0)
    assert note.passed
    monkeypatch.setattr(module, "value_faults", lambda *args: [])
    assert "values of 0 of" in faults(whole)


def test_command(whole: Path, copy: Path) -> None:
    kimi_k3 = installed_command("kimi-k3")
    done = run_command([kimi_k3, "verify", whole])
    assert (done.returncode, done.stderr) == (0, "")
    assert "This build is whole." in done.stdout
    (copy / "model-00002-of-000003.safetensors").unlink()
    done = run_command([kimi_k3, "verify", copy, "--json"])
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["passed"] is False
    assert "model-00002-of-000003.safetensors" in report["findings"][0]["what"]
    assert [check["name"] for check in report["checks"]] == CHECKS
