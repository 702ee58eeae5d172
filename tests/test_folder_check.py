"""The folder check passes every good checkpoint; broken and foreign ones are named."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import damage
import mlx.core as mx
import pytest
from damage import GRADED, copy_folder, edit_config, edit_map, edit_text_config, refuse
from golden_data import DATA, Case
from tiny_k3 import write_t2

from kimi_k3.checkpoint import sanitize
from kimi_k3.checkpoint.source_layout import (
    full_size_config,
    shard_name,
    source_tensors,
)
from kimi_k3.config import ModelArgs
from kimi_k3.errors import (
    CheckpointError,
    ConfigError,
    ForeignCheckpointError,
    KimiK3Error,
    MissingShardError,
    TokenizerError,
    TruncatedShardError,
)
from kimi_k3.folder_check import check_folder
from kimi_k3.nano.tokenizer_files import write_tokenizer

SOURCE_MOE = "language_model.model.layers.2.block_sparse_moe."


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    return copy_folder(GRADED, tmp_path / "build")


def test_builds_of_the_wild_pass(build: Case) -> None:
    report = check_folder(build.folder)
    assert report.tensors == len(build.stored) > 200
    assert report.data_bytes == sum(t.nbytes for t in build.stored.values())
    assert any("tokenizer_config.json is not there" in note for note in report.notes)


def test_source_checkpoints_pass(golden: Case) -> None:
    assert check_folder(golden.folder).tensors == len(golden.stored) > 200


def test_two_bank_copy_with_tokenizer_passes_without_notes(tmp_path: Path) -> None:
    folder = write_t2(tmp_path)
    write_tokenizer(folder)
    assert check_folder(folder).notes == ()


def test_notes_tell_what_does_not_hinder(graded: Path) -> None:
    (graded / "modeling_kimi.py").write_text("raise SystemExit('executed')")
    edit_text_config(graded, brand_new_key=1)
    damage.edit_json(
        graded / damage.INDEX, lambda index: index["metadata"].update(total_size=7)
    )
    notes = "\n".join(check_folder(graded).notes)
    for said in (
        r"modeling_kimi.py lies in the folder; it is never executed",
        r"text_config.brand_new_key",
        r"router of 7 layers",
        r"total_size of 7 bytes",
    ):
        assert said in notes


def test_no_value_is_looked_at(graded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("a stand-in was evaluated")

    monkeypatch.setattr(sanitize, "check_scale_bytes", never)
    monkeypatch.setattr(sanitize, "_warn_of_padding", never)
    for name in ("eval", "any"):
        monkeypatch.setattr(mx, name, never)
    check_folder(graded)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    folder = copy_folder(DATA / "formats" / "D-lm-q8", tmp_path / "build")
    (folder / damage.INDEX).unlink()
    assert check_folder(folder).tensors == 398


def write_sparse_source(folder: Path, layers: int) -> ModelArgs:
    """The release's first ``layers`` layers at full size, headers only: files of holes."""
    config = full_size_config()
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    for name in ("kda_layers", "full_attn_layers"):
        kept = [n for n in text["linear_attn_config"][name] if n <= layers]
        text["linear_attn_config"][name] = kept
    args = ModelArgs.from_dict(config)
    shards: dict[str, list] = {}
    for spec in source_tensors(args):
        number = layers + 1 if spec.layer is None else spec.layer + 1
        shards.setdefault(shard_name(number, layers + 1), []).append(spec)
    weight_map: dict[str, str] = {}
    total = 0
    for shard, specs in shards.items():
        header, end = {}, 0
        for spec in specs:
            start, end = end, end + spec.nbytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
        raw = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + end)
        weight_map |= dict.fromkeys(header, shard)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / damage.INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return args


def test_full_size_layers_take_seconds_and_no_memory(tmp_path: Path) -> None:
    args = write_sparse_source(tmp_path, layers=4)
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.process_time()
    report = check_folder(tmp_path)
    seconds = time.process_time() - start
    assert report.tensors == len(list(source_tensors(args))) > 16_000
    assert report.data_bytes > 50e9
    assert mx.get_peak_memory() - before < 2**24, "tensors were evaluated"
    assert seconds < 10
    name = f"{SOURCE_MOE}experts.895.w2.weight_scale"
    edit_map(tmp_path, lambda names: names.pop(name))
    with pytest.raises(CheckpointError, match=rf"holds {name}, .* does not name it"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (
            damage.missing_shard,
            MissingShardError,
            r"shard model-00005-of-00010\.safetensors named by model\.safetensors"
            r"\.index\.json is not there \(56 tensors, layer 3\); download it again",
        ),
        (
            damage.truncated_shard,
            TruncatedShardError,
            r"model-00007-of-00010\.safetensors is 158418 bytes but its header "
            r"describes 159442: incomplete download",
        ),
        (
            damage.expert_counts,
            CheckpointError,
            r"layer 2: config\.json's expert_counts says 15 experts, 1 of them in "
            r"bank_hi, but the tensors hold 14 \(bank_hi 1, bank_lo 13, bias 14, router",
        ),
        (
            damage.bank_lo_missing,
            CheckpointError,
            r"layer 3: expert_bank_split is 6 of 7 experts, but there is no "
            r"switch_mlp\.bank_lo\.\*: 1 experts are missing",
        ),
    ],
    ids=["missing-shard", "truncated-shard", "expert-counts", "bank-lo-missing"],
)
def test_broken_builds_of_the_wild(
    graded: Path, spoil: Callable, kind: type[KimiK3Error], message: str
) -> None:
    spoil(graded)
    refuse(graded, kind, message)


def test_turboquant_is_another_tools(tmp_path: Path) -> None:
    folder = DATA / "formats" / "broken" / "turboquant-marker"
    refuse(folder, ForeignCheckpointError, r"turboquant build \(quantization\.rotation")
    # With the marks taken out of the config, its tensors still tell.
    unmarked = copy_folder(folder, tmp_path / "unmarked")
    width = {"bits": 4, "group_size": 64, "mode": "affine"}
    edit_config(unmarked, lambda config: config.update(quantization=width))
    refuse(
        unmarked, ForeignCheckpointError, r"\.(codebook|signs): this is a turboquant"
    )


def other_type(name: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda c: c.update(model_type=name))


def gguf_only(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "Kimi-K3-Q2_K-00001-of-00020.gguf").write_bytes(b"GGUF")


def offload_store(folder: Path) -> None:
    damage.drop_tensors(folder, ".switch_mlp.")
    (folder / "experts").mkdir()
    (folder / "experts" / "layer_001.bin").write_bytes(b"1")


def config_text(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(content)

    return write


OTHERS = {
    "qwen3": (other_type("qwen3"), r"a 'qwen3' model, not a Kimi K3\. Use mlx_lm"),
    "kimi_k2": (other_type("kimi_k2"), r"a 'kimi_k2' model, not a Kimi K3"),
    "kimi_linear": (other_type("kimi_linear"), r"a 'kimi_linear' model, not"),
    "kimi_k3_mlx": (other_type("kimi_k3_mlx"), r"model_type is 'kimi_k3_mlx'.*loader"),
    "kimi_k3_uvmax": (other_type("kimi_k3_uvmax"), r"'kimi_k3_uvmax'.*uvmax staging"),
    "a number": (other_type(3), r"a '3' model"),
    "gguf": (gguf_only, r"Kimi-K3-Q2_K-00001-of-00020\.gguf: GGUF .* llama\.cpp"),
    "offload key": (
        lambda folder: edit_config(folder, lambda c: c.update(expert_store="store")),
        r"experts in an offload store",
    ),
    "offload store": (offload_store, r"missing.*keeps a store in experts/: .*offload"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_folders_of_other_tools(graded: Path, other: str) -> None:
    spoil, message = OTHERS[other]
    spoil(graded)
    refuse(graded, ForeignCheckpointError, message)


CONFIGS = {
    "no config": (lambda f: (f / "config.json").unlink(), r"holds no config\.json"),
    "not JSON": (config_text("{"), r"config\.json is not JSON"),
    "not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'),
        r"config\.json is not JSON \('utf-8' codec",
    ),
    "deep": (config_text("[" * 100_000), r"config\.json is not JSON"),
    "a list": (config_text("[1]"), r"config\.json holds no JSON object"),
    "empty": (config_text("{}"), r"has no model_type; a Kimi K3's is 'kimi_k3'"),
    "no text_config": (
        config_text('{"model_type": "kimi_k3"}'),
        r"text_config\.vocab_size is missing",
    ),
    "a folder": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        r"holds no config\.json",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_config_that_cannot_be_read(graded: Path, fault: str) -> None:
    spoil, message = CONFIGS[fault]
    spoil(graded)
    refuse(graded, ConfigError, message)


def test_folder_that_is_not_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refuse(file, CheckpointError, r"file is not a folder")
    with pytest.raises(CheckpointError, match=r"nothing is not a folder"):
        check_folder(tmp_path / "nothing")


def test_code_of_the_checkpoint_is_refused(graded: Path) -> None:
    edit_config(graded, lambda config: config.update(model_file="modeling.py"))
    (graded / "modeling.py").write_text("raise SystemExit('executed')")
    refuse(graded, CheckpointError, r"built by 'modeling\.py'.*never executed here")


def test_another_tokenizer_class_is_refused(tmp_path: Path) -> None:
    folder = write_t2(tmp_path)
    write_tokenizer(folder)
    damage.edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(tokenizer_class="PreTrainedTokenizerFast"),
    )
    refuse(folder, TokenizerError, r"tokenizer_class is 'PreTrainedTokenizerFast'")
