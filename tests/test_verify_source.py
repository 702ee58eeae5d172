"""``verify --source``: every planted fault of a converted build is found and named."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from damage import copy_folder, edit_config, edit_tensors
from small_builds import (
    BITS,
    HIGH_COUNTS,
    bank_tensors,
    patch,
    read_tensor,
    router_tensors,
    scrambled,
    write_source,
)

import kimi_k3
from kimi_k3.build import quantised_error, verify_source
from kimi_k3.build.verify_report import VerifyReport
from kimi_k3.cli import main
from kimi_k3.conversion.convert import convert
from kimi_k3.conversion.provenance import RECORD
from kimi_k3.errors import KimiK3Error
from kimi_k3.verbs.verify import progress_text

PLAN = scrambled(high=HIGH_COUNTS, bits=BITS)
LAYER = "language_model.model.layers."

#: The shard of layer 2, and the number of all shards.
SHARD = "model-00003-of-000007.safetensors"

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two banks in three of four layers, other counts in each, some classes quantised."""
    return convert(source, tmp_path_factory.mktemp("whole") / "build", PLAN)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the same plan and shapes, of other weights; its source beside it."""
    at = tmp_path_factory.mktemp("other")
    return convert(write_source(at / "source", seed=1), at / "build", PLAN)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Without hashes of whole shards in its record, which tell of any change."""
    build = copy_folder(whole, tmp_path / "build")

    def forget(config: dict[str, Any]) -> None:
        for shard in config[RECORD]["shards"].values():
            shard.pop("sha256", None)

    edit_config(build, forget)
    return build


def faults(report: VerifyReport) -> str:
    assert not report.passed
    assert report.faults
    return "\n".join(fault.what for fault in report.faults)


def looked_at(report: VerifyReport) -> dict[str, int]:
    return {check.name: check.looked_at for check in report.checks}


def test_a_clean_build_passes(whole: Path, source: Path) -> None:
    report = kimi_k3.verify(whole, source)
    assert report.passed, report.text()
    assert report.findings == ()
    assert looked_at(report) == {
        "files": 7,
        "index": 214,
        "tensors": 214,
        "values": 180,
        "side files": 3,
        "config": 175,
        "shards": 7,
        "layout": 214,
        "sampling": 4,
        "hashes": 7,
        "source": 3,
        "router": 8,
        "high bank": 28,
        "low bank": 16,
        "float32": 16,
        "bfloat16": 82,
        "quantised": 13,
        "vision": 18,
        "copied files": 3,
    }
    assert "and what its record says it is" in report.text()


def test_what_was_measured_is_reported(whole: Path, source: Path) -> None:
    report = json.loads(json.dumps(kimi_k3.verify(whole, source).to_dict()))
    compared = report["comparison"]
    assert compared["experts"] == "all"
    kept = {str(layer): list(range(len(PLAN.order(layer)))) for layer in PLAN.layers}
    assert compared["compared"] == kept
    low = {(e["layer"], e["expert"]): e["source"] for e in compared["low_bank"]}
    assert low == {
        (layer, new): expert
        for layer, plan in PLAN.layers.items()
        for new, expert in enumerate(plan.order)
        if expert in plan.low
    }
    assert all(0.08 < expert["error"] < 0.13 for expert in compared["low_bank"])
    classes = {found["name"]: found for found in compared["classes"]}
    assert {name: found["bits"] for name, found in classes.items()} == BITS
    assert 0 < classes["kda.qkv_proj"]["largest"] < 1e-4
    assert classes["kda.qkv_proj"]["matrices"] == 4


def rotate(row: np.ndarray) -> np.ndarray:
    return np.roll(row, 1, axis=0)


def swap(one: int, two: int) -> Callable[[np.ndarray], None]:
    def change(rows: np.ndarray) -> None:
        rows[[one, two]] = rows[[two, one]]

    return change


def both(change: Callable[[np.ndarray], Any], names: Any) -> Change:
    def apply(folder: Path) -> None:
        for name in names:
            patch(folder, name, change)

    return apply


def flip(byte: int, bit: int = 1) -> Callable[[np.ndarray], None]:
    def change(rows: np.ndarray) -> None:
        rows.reshape(-1)[byte] ^= bit

    return change


def round_through(dtype: mx.Dtype) -> Callable[[np.ndarray], np.ndarray]:
    def change(rows: np.ndarray) -> np.ndarray:
        values = mx.array(rows.view(np.float32)).astype(dtype).astype(mx.float32)
        return np.array(values).view(np.uint8)

    return change


#: Faults that only a look at the source can find: name, size and header stay.
PLANTED: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "router rotated": (
        both(rotate, router_tensors(2)),
        "layer 2: the router's rows .* they are rotated by 1. ",
        ("layer 2: the router's correction biases .* they are rotated by 1",),
    ),
    "router rotated, biases not": (
        both(rotate, router_tensors(2)[:1]),
        "layer 2: the router's rows .* they are rotated by 1. ",
        (),
    ),
    "biases not reordered": (
        both(swap(0, 1), router_tensors(3)[1:]),
        r"layer 3: the router's correction biases .* 2 of 16 differ, first that of "
        "expert 0, which should be that of source expert 14 and is that of source "
        "expert 0; all are there, in another order",
        (),
    ),
    "a bias changed": (
        both(flip(0), router_tensors(3)[1:]),
        "1 of 16 differ, .* source expert 14 and is that of no expert. ",
        (),
    ),
    "experts of the high bank swapped": (
        both(swap(0, 3), bank_tensors(1, "bank_hi.")),
        "layer 1: expert 0, which should be source expert 9, differs from it: "
        r"gate_proj.weight in .* it is source expert 0\.",
        ("layer 1: expert 3, which .* it is source expert 9",),
    ),
    "one matrix of them only": (
        both(swap(0, 3), bank_tensors(1, "bank_hi.")[4:]),
        r"expert 0, .* differs from it: down_proj.weight in .*, down_proj.scales in "
        r".*; it is source expert 0\.",
        ("layer 1: expert 3",),
    ),
    "experts of the one bank swapped": (
        both(swap(2, 15), bank_tensors(3)),
        "layer 3: expert 2, which should be source expert 7, .* it is source expert 2",
        ("layer 3: expert 15, which should be source expert 2, .* expert 7",),
    ),
    "experts of the low bank swapped": (
        both(swap(0, 1), bank_tensors(2, "bank_lo.")),
        "layer 2: expert 1 of the low bank, which should be source expert 14, has in "
        "gate_proj a relative squared error of [12].* more than 3 times that of "
        r"mx.quantize \(and in up_proj, down_proj\); it is source expert 0",
        ("layer 2: expert 2 of the low bank, .* it is source expert 14",),
    ),
    "one matrix in the low bank": (
        both(swap(0, 1), bank_tensors(2, "bank_lo.")[3:6]),
        "layer 2: expert 1 of the low bank, .* in up_proj a .* it is source expert 0",
        ("layer 2: expert 2",),
    ),
    "a scale byte flipped": (
        both(flip(7), bank_tensors(3)[1:2]),
        "layer 3: expert 0, .* gate_proj.scales in 1 of 128 bytes; it is that expert, "
        "damaged",
        (),
    ),
    "a code flipped": (
        both(flip(-1, 128), bank_tensors(4, "bank_hi.")[4:5]),
        "layer 4: expert 5, .* down_proj.weight in 1 of 2,048 bytes; it is that",
        (),
    ),
    "the exponent of a low scale flipped": (
        both(flip(1, 2), bank_tensors(4, "bank_lo.")[1:2]),
        "layer 4: expert 6 of the low bank, .* in gate_proj 1 of 64 groups more than 3 "
        "times as wrong as mx.quantize makes them; it is that expert, damaged",
        (),
    ),
    "float32 rounded to bfloat16": (
        both(round_through(mx.bfloat16), [f"{LAYER}1.self_attn.o_norm.weight"]),
        "layers.1.self_attn.o_norm.weight is not the source's: it was rounded to "
        "bfloat16",
        (),
    ),
    "float32 rounded to float16": (
        both(round_through(mx.float16), [f"{LAYER}0.self_attn.qkv_conv.conv.weight"]),
        "layers.0.self_attn.qkv_conv.conv.weight .* rounded to float16",
        (),
    ),
    "a float32 bit": (
        both(flip(0), [f"{LAYER}4.self_attn.A_log"]),
        "layers.4.self_attn.A_log is not the source's: 1 of 4 values differ",
        (),
    ),
    "a bfloat16 bit": (
        both(flip(100), [f"{LAYER}3.self_attn.embed_q.weight"]),
        "layers.3.self_attn.embed_q.weight is not the source's: 1 of 1,024 values",
        (),
    ),
    "a bit outside the layers": (
        both(flip(100), ["language_model.model.embed_tokens.weight"]),
        "model.embed_tokens.weight is not the source's: 1 of 36,864 values",
        (),
    ),
    "quantised of another matrix": (
        both(rotate, [f"{LAYER}1.self_attn.qkv_proj.weight"]),
        r"layers.1.self_attn.qkv_proj.weight \(affine 8-bit group 64\) has a relative "
        "squared error of .* more than 3 times that of mx.quantize: it is of another",
        (),
    ),
    "a scale of a quantised matrix": (
        both(flip(0, 128), ["language_model.lm_head.scales"]),
        r"lm_head.weight \(affine 6-bit group 64\) has 1 of 576 groups more than 3 times",
        (),
    ),
    "a vision byte": (
        both(flip(3), ["vision_tower.encoder.blocks.1.wo.weight"]),
        "vision_tower.encoder.blocks.1.wo.weight is not the source's: 1 of 3,072 bytes",
        (),
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_numbers_are_found(copy: Path, source: Path, fault: str) -> None:
    change, message, others = PLANTED[fault]
    change(copy)
    assert kimi_k3.verify(copy).passed, "headers and record tell nothing of this"
    report = kimi_k3.verify(copy, source)
    found = faults(report)
    told = found.splitlines()
    assert len(told) == 1 + len(others), found
    for wanted in (message, *others):
        assert any(re.search(wanted, line) for line in told), f"{wanted}\n{found}"
    assert all(check.done for check in report.checks)


def test_experts_swapped_across_the_banks(
    copy: Path, source: Path, tmp_path: Path
) -> None:
    """High bank's expert 0 and low bank's expert 5 of layer 1, each in its format."""
    kept = PLAN.layers[1]
    high, low = list(kept.high), list(kept.low)
    high[0], low[0] = low[0], high[0]
    layers = {**PLAN.layers, 1: type(kept)(tuple(high), tuple(low))}
    twisted = type(PLAN)(**{**vars(PLAN), "layers": layers})
    build = convert(source, tmp_path / "twisted", twisted)
    shutil.copyfile(
        build / "model-00002-of-000007.safetensors",
        copy / "model-00002-of-000007.safetensors",
    )
    for name in router_tensors(1):
        rows = read_tensor(copy, name)
        rows[[0, 5]] = rows[[5, 0]]
        patch(copy, name, lambda _, rows=rows: rows)
    found = faults(kimi_k3.verify(copy, source)).splitlines()
    assert len(found) == 2
    assert "layer 1: expert 0, which should be source expert 9" in found[0]
    assert f"it is source expert {high[0]}" in found[0]
    assert "layer 1: expert 5 of the low bank" in found[1]
    assert "it is source expert 9" in found[1]


def test_a_stale_shard_of_other_weights(copy: Path, source: Path, other: Path) -> None:
    shutil.copyfile(other / SHARD, copy / SHARD)
    report = kimi_k3.verify(copy, source)
    found = faults(report)
    assert "layer 2: the router's rows" in found
    assert "is that of no expert" in found
    assert f"resembles no expert of the source's layer; {SHARD} may be of" in found
    assert "6 more experts of layer 2 have such a fault" in found
    assert "layers.2.input_layernorm.weight is not the source's" in found
    assert "more tensors of layer 2 have such a fault" in found
    assert "layer 1" not in found
    assert "layer 3" not in found


def test_a_low_expert_of_another_source_expert(
    copy: Path, source: Path, tmp_path: Path
) -> None:
    """Quantised from an expert that is not kept at all; router rows are right."""
    kept = PLAN.layers[4]
    assert kept.low == (13,) or len(kept.low) == 1
    dropped = next(e for e in range(16) if e not in kept.order)
    layers = {**PLAN.layers, 4: type(kept)(kept.high, (dropped,))}
    twisted = type(PLAN)(**{**vars(PLAN), "layers": layers})
    build = convert(source, tmp_path / "twisted", twisted)
    for name in bank_tensors(4, "bank_lo."):
        patch(copy, name, lambda _, name=name: read_tensor(build, name))
    found = faults(kimi_k3.verify(copy, source))
    assert found.count("\n") == 0
    assert (
        f"expert 6 of the low bank, which should be source expert {kept.low[0]}"
        in found
    )
    assert f"it is source expert {dropped}." in found


def test_the_wrong_source(
    whole: Path, source: Path, other: Path, tmp_path: Path
) -> None:
    elsewhere = write_source(tmp_path / "narrow", seed=3)
    edit_tensors(elsewhere, lambda tensors: None)  # other places in the same shards
    found = faults(kimi_k3.verify(whole, elsewhere))
    assert "is not the source that this build was made of" in found
    renamed = copy_folder(source, tmp_path / "config")
    edit_config(renamed, lambda config: config["text_config"].update(rms_norm_eps=1e-6))
    assert "its config.json is another" in faults(kimi_k3.verify(whole, renamed))
    assert "not a folder" in faults(kimi_k3.verify(whole, tmp_path / "nothing"))
    report = kimi_k3.verify(whole, whole)
    assert "is not the source" in faults(report)
    assert report.comparison is None


def test_a_source_of_the_same_shapes_is_found_by_its_numbers(
    whole: Path, other: Path
) -> None:
    """Same names, shapes and sizes: without recorded hashes its values tell."""
    found = faults(kimi_k3.verify(whole, other.parent / "source"))
    assert "layer 1: expert 0, which should be source expert 9" in found


@pytest.mark.parametrize("kind", ["hub_sha256", "sha256"])
def test_recorded_hashes_name_the_wrong_source(
    copy: Path, source: Path, other: Path, tmp_path: Path, kind: str
) -> None:
    impostor = copy_folder(other.parent / "source", tmp_path / "impostor")
    shard = "model-00002-of-000003.safetensors"
    note = impostor / f".cache/huggingface/download/{shard}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"commit\n{'1' * 64}\n0.0\n")

    def record(config: dict[str, Any]) -> None:
        config[RECORD]["source"]["shards"][shard][kind] = "2" * 64

    edit_config(copy, record)
    found = faults(kimi_k3.verify(copy, impostor))
    told = {
        "hub_sha256": f"the hub recorded another checksum for {shard}",
        "sha256": f"{shard} does not have its recorded SHA-256",
    }
    assert told[kind] in found
    assert found.count("\n") == 0


def test_a_recorded_hash_that_is_right(copy: Path, source: Path) -> None:
    shard = "model-00002-of-000003.safetensors"
    digest = hashlib.sha256((source / shard).read_bytes()).hexdigest()

    def record(config: dict[str, Any]) -> None:
        config[RECORD]["source"]["shards"][shard]["sha256"] = digest

    edit_config(copy, record)
    told: list[tuple[str, int, int]] = []
    report = kimi_k3.verify(copy, source, progress=lambda *step: told.append(step))
    assert report.passed
    # The copy has no hashes of its own shards, so none of these are read through.
    assert {what for what, _, _ in told} == {"values", "hashes", "source"}
    size = (source / shard).stat().st_size
    assert ("hashes", size, size) in told
    totals = {total for what, _, total in told if what == "source"}
    assert [step for step in told if step[0] == "source"][-1][1:] == (*totals, *totals)


def test_side_files(copy: Path, source: Path) -> None:
    (copy / "LICENSE").unlink()
    tokens = (copy / "tiktoken.model").read_text().splitlines()
    swapped = [tokens[1].split()[0] + " 0", tokens[0].split()[0] + " 1", *tokens[2:]]
    (copy / "tiktoken.model").write_text("\n".join(swapped) + "\n")
    found = faults(kimi_k3.verify(copy, source))
    assert "LICENSE lies beside the source's shards but not here" in found
    assert "tiktoken.model is not the source's: text becomes other tokens" in found
    assert found.count("\n") == 1


def test_code_that_is_not_copied_is_no_difference(
    whole: Path, copy: Path, source: Path, tmp_path: Path
) -> None:
    """A tokenizer config without the entry that points at a Python file is the same."""
    path = copy / "tokenizer_config.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps(content | {"auto_map": {"AutoTokenizer": ["x.Y", None]}})
    )
    assert kimi_k3.verify(copy, source).passed
    path.write_text(json.dumps(content | {"chat_template": "other"}))
    assert "tokenizer_config.json is not the source's" in faults(
        kimi_k3.verify(copy, source)
    )


def test_experts_are_drawn(copy: Path, source: Path) -> None:
    report = kimi_k3.verify(copy, source, experts=2, seed=7)
    assert report.passed
    assert report.comparison is not None
    counts = {layer: len(e) for layer, e in report.comparison.compared.items()}
    assert counts == {1: 4, 2: 3, 3: 2, 4: 3}
    assert "experts: 12, up to 2 of each bank in a layer" in report.text()
    says = "what its record says it is as far as it was looked at (2 experts a bank)."
    assert says in report.text()
    again = kimi_k3.verify(copy, source, experts=2, seed=7).comparison
    assert again == report.comparison
    third = kimi_k3.verify(copy, source, experts=2, seed=8).comparison
    assert third is not None
    assert third.compared != report.comparison.compared
    # A fault in one that was drawn is found, in one that was not is not.
    seen = report.comparison.compared[3]
    patch(copy, bank_tensors(3)[0], lambda rows: flip_row(rows, seen[0]))
    assert not kimi_k3.verify(copy, source, experts=2, seed=7).passed
    patch(copy, bank_tensors(3)[0], lambda rows: flip_row(rows, seen[0]))
    unseen = next(e for e in range(16) if e not in seen)
    patch(copy, bank_tensors(3)[0], lambda rows: flip_row(rows, unseen))
    assert kimi_k3.verify(copy, source, experts=2, seed=7).passed
    assert not kimi_k3.verify(copy, source).passed
    for wrong in (0, True, "some"):
        with pytest.raises(KimiK3Error, match="wanted 'all', or how many"):
            kimi_k3.verify(copy, source, experts=wrong)


def test_draws_of_nothing_are_refused(
    copy: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KimiK3Error, match="2 experts of each bank .* but no source"):
        kimi_k3.verify(copy, experts=2)
    for seed in (-1, 1.0, True, "1"):
        with pytest.raises(KimiK3Error, match="seed is .*; wanted a whole number"):
            kimi_k3.verify(copy, source, experts=2, seed=seed)  # type: ignore
    assert main(["verify", str(copy), "--experts", "2"]) == 2
    assert "no source to compare" in capsys.readouterr().err
    given = ["--source", str(source), "--experts", "2", "--seed", "-1"]
    assert main(["verify", str(copy), *given]) == 2
    assert "seed is -1" in capsys.readouterr().err


def flip_row(rows: np.ndarray, row: int) -> None:
    rows[row, 0] ^= 1


def test_large_matrices_are_read_in_parts(
    whole: Path, copy: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures, and a fault of a later part, with few rows at a time."""
    want = kimi_k3.verify(whole, source).comparison
    monkeypatch.setattr(quantised_error, "_VALUES", 5 * 64)
    assert kimi_k3.verify(whole, source).comparison == want
    patch(copy, "language_model.lm_head.scales", flip(-1, 1))
    found = faults(kimi_k3.verify(copy, source))
    assert "lm_head.weight (affine 6-bit group 64) has 1 of 576 groups more" in found


def test_a_shard_of_the_same_plan_without_its_moments(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    """Names, shapes, size and header are the same; only recorded hashes tell."""
    weighed = copy_folder(whole, tmp_path / "build")
    # Another, equally good quantisation: every code of one matrix is the other way round.
    name = f"{LAYER}2.mlp.switch_mlp.bank_lo.gate_proj"
    codes = read_tensor(weighed, f"{name}.weight")
    patch(weighed, f"{name}.weight", lambda _: 255 - codes)
    scales, biases = (
        read_tensor(weighed, f"{name}.{part}").view(np.uint16)
        for part in ("scales", "biases")
    )
    found = [
        mx.array(part).view(mx.bfloat16).astype(mx.float32) for part in (scales, biases)
    ]
    top = (found[1] + 3 * found[0]).astype(mx.bfloat16).view(mx.uint16)
    patch(weighed, f"{name}.biases", lambda _: np.array(top).view(np.uint8))
    turned = np.array(scales) ^ 0x8000
    patch(weighed, f"{name}.scales", lambda _: turned.view(np.uint8))
    steps: list[tuple[str, int, int]] = []
    kimi_k3.verify(weighed, progress=lambda *step: steps.append(step))
    nbytes = sum(path.stat().st_size for path in weighed.glob("*.safetensors"))
    assert steps[-1] == ("shards", nbytes, nbytes)
    for report in (kimi_k3.verify(weighed), kimi_k3.verify(weighed, source)):
        told = (
            f"{SHARD} does not have its recorded SHA-256: it is of another conversion"
        )
        assert faults(report).startswith(told)
        assert faults(report).count("\n") == 0
        assert looked_at(report)["hashes"] == 7


def test_builds_without_recorded_hashes(copy: Path, source: Path) -> None:
    """They pass as far as the check goes that is not there, which is said."""
    report = kimi_k3.verify(copy)
    assert report.passed
    assert "hashes" not in looked_at(report)
    assert "note: hashes: not recorded" in report.text()

    def one(config: dict[str, Any]) -> None:
        config[RECORD]["shards"][SHARD]["sha256"] = "0" * 64

    edit_config(copy, one)
    found = faults(kimi_k3.verify(copy))
    assert f"{SHARD} does not have its recorded SHA-256" in found
    assert "no SHA-256 of model-00001-of-000007.safetensors, but one of other" in found


def test_damage_where_errors_were_weighed(
    whole: Path, copy: Path, source: Path, tmp_path: Path
) -> None:
    """No importance explains codes that are not the nearest to what they stand for."""
    weighed = "0" * 64
    edit_config(copy, lambda config: config[RECORD].update(moments=weighed))
    assert kimi_k3.verify(copy, source).passed
    patch(copy, bank_tensors(4, "bank_lo.")[1], flip(1, 2))
    found = faults(kimi_k3.verify(copy, source))
    assert "in gate_proj 1 of 64 groups with codes that are not the nearest" in found
    again = copy_folder(whole, tmp_path / "again")
    edit_config(again, lambda config: config[RECORD].update(moments=weighed))
    both(swap(0, 1), bank_tensors(2, "bank_lo."))(again)
    assert "a relative squared error of" in faults(kimi_k3.verify(again, source))


@pytest.mark.parametrize("moments", [None, "0" * 64])
def test_most_groups_of_a_low_expert_zeroed(
    copy: Path, source: Path, moments: str | None
) -> None:
    """All but the first rows of one matrix; the matrix as a whole is no excuse."""
    edit_config(copy, lambda config: config[RECORD].update(moments=moments))

    def zero(rows: np.ndarray) -> None:
        expert = rows[0].reshape(64, -1)
        expert[24:] = 0

    both(zero, bank_tensors(1, "bank_lo.")[:3])(copy)
    found = faults(kimi_k3.verify(copy, source))
    assert "layer 1: expert 5 of the low bank" in found
    assert "gate_proj" in found


def test_a_build_without_a_record_is_not_compared(copy: Path, source: Path) -> None:
    edit_config(copy, lambda config: config.pop(RECORD))
    assert kimi_k3.verify(copy).passed
    report = kimi_k3.verify(copy, source)
    assert "config.json has no record of a conversion" in faults(report)
    assert looked_at(report)["source"] == 0


def test_a_comparison_that_skips_is_a_failure(
    whole: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing found wrong, but not all of it looked at."""

    class Idle(verify_source.ExpertComparison):
        def can_compare(self, expert: Any) -> bool:
            return expert.new != 1

    monkeypatch.setattr(verify_source, "ExpertComparison", Idle)
    report = kimi_k3.verify(whole, source)
    assert not report.faults
    assert not report.passed
    assert "25 of 28 experts equal byte for byte" in report.text()
    assert "Not every check could be done." in report.text()


def test_the_command(
    whole: Path, other: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against = ["verify", str(whole), "--source"]
    assert main([*against, str(source), "--experts", "1", "--seed", "3"]) == 0
    printed = capsys.readouterr()
    assert "up to 1 of each bank in a layer, drawn with seed 3" in printed.out
    assert printed.err == ""
    assert main([*against, str(other.parent / "source"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert {check["name"] for check in report["checks"]} >= {"router", "high bank"}
    for wrong in ("0", "-1", "few"):
        with pytest.raises(SystemExit):
            main([*against, str(source), "--experts", wrong])
        assert "neither all nor a count" in capsys.readouterr().err


def test_progress_says_how_long_it_takes() -> None:
    text = progress_text("source", 30_000_000_000, 120_000_000_000, 10.0)
    assert text == "source  25% of 120 GB at 3 GB/s  0:30 left"
    assert progress_text("values", 0, 0, 0.0) == "values   0% of 0 B"
