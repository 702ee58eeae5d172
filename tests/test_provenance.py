"""The record that a conversion leaves: what it holds, and what it refuses."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_k3 import t1_config

from kimi_k3.config import ModelArgs
from kimi_k3.conversion.provenance import (
    RECORD,
    Provenance,
    ShardRecord,
    config_text,
    header_sha256,
    hub_sha256,
)
from kimi_k3.errors import ConversionError
from kimi_k3.planning.expert_plan import ExpertPlan

HASH = "0123456789abcdef" * 4
PLAN = ExpertPlan.identity(ModelArgs.from_dict(t1_config()).text_config)
SHARD = ShardRecord(1000, HASH)


def record(**changes: Any) -> Provenance:
    kept = {layer: PLAN.order(layer) for layer in PLAN.layers}
    values: dict[str, Any] = {
        "tool": {"kimi-k3-mlx": "1.0", "mlx": "0.32"},
        "plan": PLAN,
        "kept": kept,
        "fingerprint": "abc",
        "source": {"a.safetensors": replace(SHARD, hub_sha256=HASH, sha256=HASH)},
        "shards": {"b.safetensors": SHARD},
    }
    return Provenance(**values | changes)


@pytest.mark.parametrize("plan", [PLAN, None], ids=["plan", "no-plan"])
@pytest.mark.parametrize("moments", [HASH, None], ids=["weighed", "not-weighed"])
def test_a_record_survives_json(plan: ExpertPlan | None, moments: str | None):
    written = record(plan=plan, moments=moments)
    content = json.loads(config_text({"other": 1, RECORD: written.to_dict()}))
    assert Provenance.of_config(content) == written
    assert Provenance.of_config({"other": 1}) is None


def test_hashes_that_are_not_known_are_left_out():
    content = record().to_dict()
    assert content["shards"]["b.safetensors"] == {"size": 1000, "header_sha256": HASH}
    assert set(content["source"]["shards"]["a.safetensors"]) == {
        "size",
        "header_sha256",
        "hub_sha256",
        "sha256",
    }


def damaged(content: Any, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(content))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


DAMAGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "kind": (("kind",), "a cake", "not that of a conversion by kimi-k3-mlx"),
    "version": (("version",), 9, "format version 9"),
    "version-true": (("version",), True, "format version True"),
    "tool": (("tool",), {}, "has tool = {}; wanted versions by name"),
    "tool-list": (("tool",), ["mlx"], "not whole: AttributeError"),
    "tool-number": (("tool", "mlx"), 0.32, "wanted versions by name"),
    "moments-digest": (("moments",), "f" * 63, "moments = 'f+'; wanted 64 hexadecimal"),
    "moments-true": (("moments",), True, "has moments = True; wanted 64"),
    "moments-number": (("moments",), 5, "has moments = 5; wanted 64"),
    "moments-list": (("moments",), [], r"has moments = \[\]; wanted 64"),
    "moments-object": (("moments",), {}, "has moments = {}; wanted 64"),
    "fingerprint": (("source", "fingerprint"), 5, "5 for the source's fingerprint"),
    "plan-of-another": (
        ("plan", "source"),
        {"fingerprint": "abd"},
        "its plan is for the source 'abd', but it is of 'abc'",
    ),
    "layer": (("kept", "02"), [0, 1, 2, 3], "not whole: ValueError: '02' is no layer"),
    "kept": (("kept", "2"), [1, 0, 2, 3], r"layer 2 keeps 1, 0, 2, 3, but its plan"),
    "no-kept": (("kept",), {}, "names no kept"),
    "no-shards": (("shards",), {}, "names no shards"),
    "expert": (("kept", "2", 0), "0", "TypeError: '0' is no whole number"),
    "plan": (("plan", "top_k"), 99, "the router picks 99"),
    "size": (("shards", "b.safetensors", "size"), 0, "size is 0 bytes"),
    "hash": (("shards", "b.safetensors", "header_sha256"), "f" * 63, "wanted 64 hex"),
    "null-hash": (("shards", "b.safetensors", "header_sha256"), None, "None; wanted"),
    "key": (("shards", "b.safetensors", "colour"), "blue", "not whole: TypeError"),
    "source": (("source",), None, "not whole: TypeError"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_is_refused(kind: str):
    path, value, message = DAMAGES[kind]
    content = record().to_dict()
    assert Provenance.from_dict(damaged(content, ("tool", "mlx"), "0.33"))
    with pytest.raises(ConversionError, match=message):
        Provenance.from_dict(damaged(content, path, value))


def test_a_record_that_is_none():
    for content in (None, [], "x", {}):
        with pytest.raises(ConversionError, match="is not that of"):
            Provenance.from_dict(content)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.arange(12), "b": mx.zeros(3)})
    return path


def test_the_header_hash_covers_the_header_only(shard: Path):
    data = shard.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    before = ShardRecord.of(shard)
    assert before == ShardRecord(
        len(data), hashlib.sha256(data[:length]).hexdigest(), None, None
    )
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert header_sha256(shard) == before.header_sha256
    shard.write_bytes(data.replace(b'"I32"', b'"U32"'))
    assert header_sha256(shard) != before.header_sha256


def test_files_that_are_no_shards(shard: Path, tmp_path: Path):
    shard.write_bytes(b"short")
    with pytest.raises(ConversionError, match="is not a safetensors file"):
        header_sha256(shard)
    with pytest.raises(ConversionError, match=r"gone\.safetensors cannot be read"):
        ShardRecord.of(tmp_path / "gone.safetensors")


def test_the_hub_notes_a_hash_beside_the_file(shard: Path):
    noted = shard.parent / ".cache/huggingface/download/model.safetensors.metadata"
    noted.parent.mkdir(parents=True)
    assert hub_sha256(shard) is None
    noted.write_text(f"{'c' * 40}\n{HASH}\n1764500000.0\n")
    assert ShardRecord.of(shard).hub_sha256 == HASH
    # Files that git stores itself have the hash of a git blob there.
    noted.write_text(f"{'c' * 40}\n{'d' * 40}\n1764500000.0\n")
    assert hub_sha256(shard) is None
    noted.write_bytes(b"\xff")
    assert hub_sha256(shard) is None


def test_the_hub_cache_names_blobs_by_hash(shard: Path, tmp_path: Path):
    blob = tmp_path / "blobs" / HASH
    blob.parent.mkdir()
    shard.rename(blob)
    link = tmp_path / "snapshots" / "main" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("../../blobs") / HASH)
    found = ShardRecord.of(link)
    assert found.hub_sha256 == HASH
    assert found.size == blob.stat().st_size


def test_huggingface_hub_writes_what_is_read_here(shard: Path):
    from huggingface_hub import _local_folder as local

    local.write_download_metadata(shard.parent, shard.name, "c" * 40, HASH)
    assert hub_sha256(shard) == HASH


def test_config_text_is_json_that_people_can_read():
    content = {"a": [1, 2, 3], "b": [], "c": ["x [\n 1, 2 ]"], "d": [[-1.5], [2, 3]]}
    text = config_text(content)
    assert json.loads(text) == content
    assert '"a": [1, 2, 3],' in text
    assert re.search(r'"d": \[\n\s+\[-1\.5\],\n', text)
