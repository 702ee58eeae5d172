"""``verify`` without a source: config, shards and tensors as the record says."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from damage import copy_folder, edit_config, edit_map, edit_tensors
from small_builds import BITS, HIGH_COUNTS, SCRAMBLED, scrambled, write_source

import kimi_k3
from kimi_k3.build.verify_report import Check, Comparison, Finding, VerifyReport
from kimi_k3.conversion.convert import convert
from kimi_k3.conversion.provenance import RECORD

PLAN = scrambled(high=HIGH_COUNTS, bits=BITS)

#: The shard of layer 2.
SHARD = "model-00003-of-000007.safetensors"

NORM = "language_model.model.layers.2.input_layernorm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("whole") / "build", PLAN)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return copy_folder(whole, tmp_path / "build")


def faults(folder: Path) -> str:
    report = kimi_k3.verify(folder)
    assert not report.passed
    assert report.faults
    return "\n".join(fault.what for fault in report.faults)


def text_config(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"].update(values)


def counts_of(layer: int, change: int, key: str = "expert_counts") -> Callable:
    def edit(config: dict[str, Any]) -> None:
        config["text_config"][key][layer] += change

    return edit


def width(module: str, **entry: Any) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        config["quantization"][f"language_model.{module}"].update(entry)

    return edit


def kept(layer: int, experts: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        config[RECORD]["kept"][str(layer)] = list(experts)

    return edit


def planned(layer: int, change: Callable[[list[int]], Any]) -> Callable:
    """Changes the plan's high bank and the kept list alike."""

    def edit(config: dict[str, Any]) -> None:
        record = config[RECORD]
        change(record["plan"]["layers"][str(layer)]["high"])
        banks = record["plan"]["layers"][str(layer)]
        record["kept"][str(layer)] = banks["high"] + banks["low"]

    return edit


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "count in one place only": (
        counts_of(1, 1),
        r"text_config.expert_counts is \[0, 13, 9, 16, 7\], which should be "
        r"\[0, 12, 9, 16, 7\]",
    ),
    "num_experts beside the counts": (
        text_config(num_experts=15),
        "text_config.num_experts is 15, which should be 16",
    ),
    "split": (
        counts_of(1, 1, "expert_bank_split"),
        r"text_config.expert_bank_split is \[0, 6, 1, 0, 6\], which should be \[0, 5,",
    ),
    "width of a class": (
        width("lm_head", bits=5),
        "quantization.language_model.lm_head.bits is 5, which should be 6",
    ),
    "width of a bank": (
        width("model.layers.1.mlp.switch_mlp.bank_lo.up_proj", bits=3),
        "bank_lo.up_proj.bits is 3, which should be 2",
    ),
    "an entry for what is not quantised": (
        lambda config: config["quantization"].update(
            {"language_model.model.embed_tokens": {"bits": 8, "group_size": 64}}
        ),
        "embed_tokens.bits is 8, which should be absent",
    ),
    "kept list": (
        kept(2, SCRAMBLED[2:11]),
        "layer 2 keeps 14, 0, 7, 11, 5, 15, …, but its plan says 2, 14, 0,",
    ),
    "kept list and plan alike": (
        planned(1, lambda high: high.append(4)),
        r"text_config.expert_counts is \[0, 12, .* should be \[0, 13,",
    ),
    "an expert twice": (
        planned(1, lambda high: high.append(9)),
        "layer 1 keeps expert 9 twice",
    ),
    "record of another tool": (
        lambda config: config.update({RECORD: {"by": "hand"}}),
        "is not that of a conversion by kimi-k3-mlx",
    ),
    "record without its shards": (
        lambda config: config[RECORD].pop("shards"),
        "is not whole: KeyError",
    ),
    "record of fewer shards": (
        lambda config: config[RECORD]["shards"].pop(SHARD),
        f"the record in config.json does not name the shard {SHARD}",
    ),
    "size of a shard": (
        lambda config: config[RECORD]["shards"][SHARD].update(size=7),
        f"{SHARD} is .* bytes, but 7 were written: it is of another conversion",
    ),
    "header of a shard": (
        lambda config: config[RECORD]["shards"][SHARD].update(header_sha256="0" * 64),
        f"the header of {SHARD} is not the one that was written",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_config_and_record_must_agree(copy: Path, fault: str) -> None:
    change, message = CONFIGS[fault]
    edit_config(copy, change)
    found = faults(copy)
    assert re.search(message, found), found


def test_the_whole_build_passes(whole: Path, tmp_path: Path) -> None:
    """Also moved elsewhere, and with nothing of the source about."""
    report = kimi_k3.verify(whole)
    assert report.passed, report.text()
    assert report.comparison is None
    assert kimi_k3.verify(copy_folder(whole, tmp_path / "moved")).passed


def test_a_conversion_without_a_plan(source: Path, tmp_path: Path) -> None:
    build = convert(source, tmp_path / "build")
    assert kimi_k3.verify(build).passed
    edit_config(build, kept(1, SCRAMBLED))
    assert "keeps other experts in layer 1 than its plan" in faults(build)


def test_a_uniform_build_states_one_number(source: Path, tmp_path: Path) -> None:
    build = convert(source, tmp_path / "build", scrambled((8, 8, 8, 8)))
    text = json.loads((build / "config.json").read_text())["text_config"]
    assert (text["num_experts"], text.get("expert_counts")) == (8, None)
    assert kimi_k3.verify(build).passed
    edit_config(build, text_config(num_experts=9))
    found = faults(build)
    assert "text_config.num_experts is 9, which should be 8" in found
    assert "num_experts says 9 experts, but the tensors hold 8" in found


def test_a_stale_shard_of_another_plan(
    copy: Path, source: Path, tmp_path: Path
) -> None:
    """Its own shapes differ, so header and size tell without the source."""
    other_counts = 12, 10, 16, 7
    other = convert(
        source, tmp_path / "other", scrambled(other_counts, HIGH_COUNTS, bits=BITS)
    )
    shutil.copyfile(other / SHARD, copy / SHARD)
    found = faults(copy)
    assert re.search(f"{SHARD} is .* bytes, but .* were written", found)
    assert f"{SHARD}: " in found
    assert re.search(r"gate.weight is BF16 \(10, 64\), .* BF16 \(9, 64\)", found)


def test_exchanged_shards(copy: Path) -> None:
    """Two layers of one kind in each other's file; the index is made to fit."""
    one, two = (f"model-0000{n}-of-000007.safetensors" for n in (2, 3))
    (copy / one).rename(copy / "x")
    (copy / two).rename(copy / one)
    (copy / "x").rename(copy / two)

    def exchange(weight_map: dict[str, str]) -> None:
        for name, shard in weight_map.items():
            weight_map[name] = {one: two, two: one}.get(shard, shard)

    edit_map(copy, exchange)
    found = faults(copy)
    assert f"{one} is" in found
    assert f"{two} is" in found
    assert f"{two}: language_model.model.layers.2." in found


def test_a_truncated_shard(copy: Path) -> None:
    with (copy / SHARD).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    found = faults(copy)
    assert f"{SHARD} is" in found
    assert "incomplete download" in found
    assert found.count("\n") == 0  # one fault, told once
    checks = {check.name: check.done for check in kimi_k3.verify(copy).checks}
    assert not any(checks[name] for name in ("tensors", "values", "shards", "layout"))


def test_the_index_names_another_shard(copy: Path) -> None:
    edit_map(
        copy, lambda names: names.update({NORM: "model-00001-of-000007.safetensors"})
    )
    found = faults(copy)
    assert (
        f"places {NORM} in model-00001-of-000007.safetensors, which does not" in found
    )


def test_an_extra_shard(copy: Path) -> None:
    shutil.copyfile(copy / SHARD, copy / "model-00008-of-000008.safetensors")
    assert "model-00008-of-000008.safetensors is not named by" in faults(copy)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "language_model.model.layers.1.self_attn.o_norm.weight",
            lambda tensor: tensor.astype(mx.bfloat16),
            r"o_norm.weight is BF16 \(32,\), which should be F32 \(32,\)",
        ),
        (
            "language_model.lm_head.scales",
            lambda tensor: tensor.astype(mx.float32),
            r"lm_head.scales is F32 .* which should be BF16",
        ),
        (
            "language_model.model.layers.2.mlp.gate.weight",
            lambda tensor: tensor[:-1],
            r"gate.weight is BF16 \(8, 64\), which should be BF16 \(9, 64\)",
        ),
    ],
    ids=["a rounded type", "another type of scales", "a router row short"],
)
def test_another_type_or_shape(
    copy: Path, name: str, change: Callable[[mx.array], mx.array], message: str
) -> None:
    def replace(tensors: dict[str, mx.array]) -> None:
        if name in tensors:
            tensors[name] = change(tensors[name])

    edit_tensors(copy, replace)
    assert re.search(message, faults(copy))


def test_another_stored_width(copy: Path) -> None:
    """Quantised at 4 bits where plan and config say 6."""

    def requantise(tensors: dict[str, mx.array]) -> None:
        if (name := "language_model.lm_head") + ".weight" in tensors:
            parts = [
                tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")
            ]
            dense = mx.dequantize(*parts, group_size=64, bits=6)
            narrow = mx.quantize(dense, group_size=64, bits=4)
            for part, tensor in zip(
                ("weight", "scales", "biases"), narrow, strict=True
            ):
                tensors[f"{name}.{part}"] = tensor

    edit_tensors(copy, requantise)
    found = faults(copy)
    assert "lm_head.weight is U32 (576, 8), which should be U32 (576, 12)" in found
    assert "says affine 6-bit group 64, but the stored tensor is affine 4-bit" in found


def test_sampling_and_side_files(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"temperature": 1.0}')
    found = faults(copy)
    assert "generation_config.json gives no top_p" in found
    assert "gives no temperature" not in found
    (copy / "generation_config.json").unlink()
    (copy / "tiktoken.model").unlink()
    found = faults(copy)
    assert "generation_config.json cannot be read" in found
    assert "tiktoken.model cannot be read" in found


GENERATIONS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "a plain token": (
        {"eos_token_id": [5]},
        "eos_token_id is 5, a token of plain",
        True,
    ),
    "also a plain token": ({"eos_token_id": [575, 5]}, "is 5, a token of plain", True),
    "of no turn": (
        {"eos_token_id": 570},
        r"570, but turns end with .*end_of_msg",
        True,
    ),
    "of another type": ({"eos_token_id": ["[EOS]"]}, "but turns end with", True),
    "none": ({"eos_token_id": None}, "eos_token_id = None, but turns end with", True),
    "greedy": (
        {"do_sample": False},
        "do_sample = False; the release advises True",
        False,
    ),
    "cold": ({"temperature": 0}, "temperature = 0; the release advises 1.0", False),
    "of everything": ({"top_p": 1.0}, "top_p = 1.0; the release advises 0.95", False),
}


@pytest.mark.parametrize("case", GENERATIONS)
def test_what_hosts_are_told_of_generation(copy: Path, source: Path, case: str) -> None:
    """A fault where generation cannot end; with the source any difference is one."""
    change, message, is_fault = GENERATIONS[case]
    path = copy / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    report = kimi_k3.verify(copy)
    assert report.passed is not is_fault
    found = [finding for finding in report.findings if finding.note is not is_fault]
    assert re.search(message, "\n".join(finding.what for finding in found))
    report = kimi_k3.verify(copy, source)
    told = "\n".join(fault.what for fault in report.faults)
    key = next(iter(change))
    assert f"is not what a conversion makes of the source's: {key} is" in told


def test_values_of_another_type(copy: Path, source: Path) -> None:
    """0 is not false and null is not absent; the build's own config shows no difference."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = 0
        config["foo"] = None

    edit_config(copy, change)
    told = kimi_k3.verify(copy, source).text()
    assert "tie_word_embeddings is 0, which should be " in told
    assert "foo is null, which should be absent" in told


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_key_that_is_named_twice(copy: Path, name: str) -> None:
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace("{", '{"eos_token_id": 3,', 1))
    assert f"{name}: the key 'eos_token_id' is named twice" in faults(copy)


def test_what_is_left_over_is_noted(copy: Path) -> None:
    (copy / "conversion.partial").mkdir()
    (copy / f".{SHARD}.unfinished").write_bytes(b"x")
    report = kimi_k3.verify(copy)
    assert report.passed
    notes = [finding.what for finding in report.findings]
    assert notes == [
        f"{name} is left over from an interrupted conversion; delete it."
        for name in (f".{SHARD}.unfinished", "conversion.partial")
    ]


def test_less_than_all_is_not_done() -> None:
    assert Check("x", 3, "", 3).done
    assert not Check("x", 2, "things", 3).done
    assert Check("x", 2, "things", 3).text() == "2 of 3 things"
    assert not Check("x", 0, "", 0).done
    report = VerifyReport("x", (Check("x", 2, "things", 3),), (), 0.0)
    assert not report.passed
    assert "Not every check could be done." in report.text()
    compared = Comparison("s", 4, 1, {1: [0, 2]})
    report = VerifyReport("x", (Check("x", 1, ""),), (Finding("f"),), 0.0, compared)
    assert (
        "experts: 2, up to 4 of each bank in a layer, drawn with seed 1"
        in report.text()
    )
    assert "This build has 1 fault." in report.text()
