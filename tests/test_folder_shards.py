"""Shards and index that are damaged, missing or of different builds are named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import damage
import mlx.core as mx
import pytest
from damage import GRADED, copy_folder, edit_map, edit_tensors, refuse

from kimi_k3.checkpoint.headers import read_header
from kimi_k3.errors import CheckpointError, KimiK3Error, TruncatedShardError
from kimi_k3.folder_check import check_folder

LAYER = "model.layers.1."
MOE = f"{LAYER}block_sparse_moe."


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    return copy_folder(GRADED, tmp_path / "build")


def test_every_fault_is_counted(graded: Path) -> None:
    damage.missing_shard(graded)
    damage.truncated_shard(graded)
    (graded / "model-00002-of-00010.safetensors").write_bytes(b"")
    with pytest.raises(
        TruncatedShardError, match=r"0 bytes.*\(2 more faults: `kimi-k3"
    ):
        check_folder(graded)


def swapped_entries(folder: Path) -> None:
    def swap(names: dict[str, str]) -> None:
        one, other = f"{MOE}gate.weight", "model.layers.2.block_sparse_moe.gate.weight"
        names[one], names[other] = names[other], names[one]

    edit_map(folder, swap)


def left_over_shard(folder: Path) -> None:
    shard = folder / "model-00003-of-00010.safetensors"
    (folder / "model-00011-of-00011.safetensors").write_bytes(shard.read_bytes())


def tensor_in_two_shards(folder: Path) -> None:
    name = f"{MOE}gate.weight"
    taken: damage.Tensors = {}

    def add(tensors: damage.Tensors) -> None:
        if name in tensors:
            taken[name] = tensors[name]
        elif taken:
            tensors |= taken
            taken.clear()

    edit_tensors(folder, add)


def not_in_the_index(folder: Path) -> None:
    edit_map(folder, lambda names: names.pop(f"{MOE}gate.weight"))


def no_such_tensor(folder: Path) -> None:
    shard = "model-00003-of-00010.safetensors"
    edit_map(folder, lambda names: names.update({f"{LAYER}ghost.weight": shard}))


def empty_shard(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model-00004-of-00010.safetensors"), {})


def shard_elsewhere(folder: Path) -> None:
    edit_map(folder, lambda names: names.update({f"{MOE}gate.weight": "../x"}))


def shards_of_another_name(folder: Path) -> None:
    for shard in folder.glob("model-*.safetensors"):
        shard.rename(folder / shard.name.replace("model-", "weights-"))

    def rename(names: dict[str, str]) -> None:
        for name, shard in names.items():
            names[name] = shard.replace("model-", "weights-")

    edit_map(folder, rename)


def longer_shard(folder: Path) -> None:
    with (folder / "model-00003-of-00010.safetensors").open("ab") as file:
        file.write(b"more")


def shard_text(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model-00003-of-00010.safetensors").write_bytes(content)

    return write


def index_text(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / damage.INDEX).write_text(content)

    return write


SHARD_FAULTS = {
    "swapped index entries": (
        swapped_entries,
        CheckpointError,
        r"places .*\.gate\.weight in model-0000\d-of-00010.safetensors, which does not "
        r"hold it; another shard holds it",
    ),
    "left-over shard": (
        left_over_shard,
        CheckpointError,
        r"model-00011-of-00011.safetensors is not named by .*left over from another",
    ),
    "tensor in two shards": (
        tensor_in_two_shards,
        CheckpointError,
        r"model-00003-of-00010.safetensors holds .*layers\.1.*\.gate\.weight, but "
        r".*places it in model-00004",
    ),
    "not in the index": (
        not_in_the_index,
        CheckpointError,
        r"model-00003-of-00010.safetensors holds .*\.gate\.weight, but .* not name it",
    ),
    "no such tensor": (
        no_such_tensor,
        CheckpointError,
        r"places .*ghost.weight in model-00003-of-00010.safetensors, which does not hold",
    ),
    "empty shard": (
        empty_shard,
        CheckpointError,
        r"model-00004-of-00010.safetensors, which does not hold it \(69 such tensors\)",
    ),
    "shard in another folder": (
        shard_elsewhere,
        CheckpointError,
        r"places .*gate.weight' in '\.\./x', which is not the name of a file",
    ),
    "names that mlx-lm does not read": (
        shards_of_another_name,
        CheckpointError,
        r"lies in weights-00001-of-00010.safetensors, but mlx-lm reads model\*",
    ),
    "longer shard": (
        longer_shard,
        TruncatedShardError,
        r"model-00003-of-00010.safetensors is \d+ bytes but .*: a damaged file",
    ),
    "web page": (
        shard_text(b"<!DOCTYPE html><html>404</html>"),
        CheckpointError,
        r"not a safetensors file: it begins with b'<!DOCTYP'",
    ),
    "git-lfs pointer": (
        shard_text(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        CheckpointError,
        r"is a git-lfs pointer, not the file itself\. Run `git lfs pull`",
    ),
    "few bytes": (shard_text(b"abc"), TruncatedShardError, r"is 3 bytes, less than"),
    "cut within the header": (
        shard_text(struct.pack("<Q", 5000) + b'{"a":'),
        TruncatedShardError,
        r"is 13 bytes but its header alone is 5000",
    ),
    "header that is not JSON": (
        shard_text(struct.pack("<Q", 8) + b"{nothing"),
        CheckpointError,
        r"has a damaged header \(Expecting property name",
    ),
    "header that is not UTF-8": (
        shard_text(struct.pack("<Q", 4) + b'"\xff\xfe"'),
        CheckpointError,
        r"has a damaged header \('utf-8' codec",
    ),
    "index that is not JSON": (
        index_text("{"),
        CheckpointError,
        r"index\.json is not JSON \(Expecting property name",
    ),
    "index that is a list": (index_text("[]"), CheckpointError, r"no JSON object"),
    "index without a map": (
        index_text('{"weight_map": {}}'),
        CheckpointError,
        r"index\.json has no weight_map",
    ),
    "index with a number for a shard": (
        index_text('{"weight_map": {"a": 7}}'),
        CheckpointError,
        r"places 'a' in 7, which is not the name",
    ),
    "index of another folder": (
        index_text('{"weight_map": {"a": "/etc/passwd"}}'),
        CheckpointError,
        r"which is not the name of a file in the folder",
    ),
    "no index": (
        lambda folder: (folder / damage.INDEX).unlink(),
        CheckpointError,
        r"holds 10 shards but no model\.safetensors\.index\.json",
    ),
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("model*")],
        CheckpointError,
        r"there are no weights in it",
    ),
}


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_shards_and_index(graded: Path, fault: str) -> None:
    spoil, kind, message = SHARD_FAULTS[fault]
    spoil(graded)
    refuse(graded, kind, message)


HEADER = {"a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

ENTRIES = {
    "no object": 7,
    "no dtype": {"shape": [2, 3], "data_offsets": [0, 24]},
    "unknown dtype": {"dtype": "Q4_K", "shape": [2, 3], "data_offsets": [0, 24]},
    "dtype of lists": {"dtype": [], "shape": [2, 3], "data_offsets": [0, 24]},
    "text as shape": {"dtype": "F32", "shape": "23", "data_offsets": [0, 24]},
    "negative shape": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
    "broken shape": {"dtype": "F32", "shape": [2.0, 3], "data_offsets": [0, 24]},
    "true as size": {"dtype": "F32", "shape": [True, 6], "data_offsets": [0, 24]},
    "one offset": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24]},
    "offsets reversed": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]},
    "too few bytes": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]},
    "too large to index": {"dtype": "U8", "shape": [0, 2**40], "data_offsets": [0, 0]},
    "very many numbers": {"dtype": "F32", "shape": [9] * 5000, "data_offsets": [0, 24]},
}


def write_safetensors(path: Path, header: object, data: bytes = bytes(24)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_a_header_is_read(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "good", HEADER | {"__metadata__": {"a": "b"}})
    header = read_header(path)
    assert header.tensors.keys() == HEADER.keys()
    tensor = header.tensors["a.weight"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F32", (2, 3), 24)
    assert tensor.stop == header.nbytes == path.stat().st_size


@pytest.mark.parametrize("fault", ENTRIES)
def test_an_entry_that_makes_no_sense(tmp_path: Path, fault: str) -> None:
    path = write_safetensors(tmp_path / "bad", {"a.weight": ENTRIES[fault]})
    with pytest.raises(CheckpointError, match=r"entry for 'a\.weight' makes no sense"):
        read_header(path)


def test_names_and_places_that_make_no_sense(tmp_path: Path) -> None:
    entry = HEADER["a.weight"]
    half = json.dumps({"\ud83d": entry}).encode()
    twice = b'{"a": %s, "a": %s}' % ((json.dumps(entry).encode(),) * 2)
    later = {**entry, "data_offsets": [32, 56]}
    for header, message in (
        (half, r"entry for '\\ud83d' makes no sense"),
        (twice, r"damaged header \('a' is there twice\)"),
        ({"a": entry, "b": entry}, r"places b at byte \d+, which overlaps"),
        ({"a": entry, "b": later}, r"places b at byte \d+, which leaves a gap"),
        (b"[1]", r"header that is not a JSON object"),
        (b"[" * 100_000, r"damaged header"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"damaged header"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_header(write_safetensors(tmp_path / "bad", header, bytes(56)))


def test_any_damage_to_a_header_has_a_name(tmp_path: Path) -> None:
    """Random bytes of a real header changed, cut or doubled: never another error."""
    raw = (GRADED / "model-00001-of-00010.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    random = Random(7)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        at = random.randrange(8 + length)
        for _ in range(random.choice((1, 1, 4))):
            damaged[random.randrange(at, 8 + length)] = random.randrange(256)
        if random.random() < 0.3:
            del damaged[at : at + random.randrange(1, 64)]
        path = tmp_path / "shard"
        path.write_bytes(damaged)
        try:
            read_header(path)
        except CheckpointError as error:
            str(error).encode()
            refused += 1
    assert refused > 200


def test_any_damage_to_the_json_files_has_a_name(tmp_path: Path) -> None:
    folder = copy_folder(GRADED, tmp_path / "build")
    random = Random(3)
    refused = 0
    for name in (damage.INDEX, "config.json") * 40:
        raw = (GRADED / name).read_bytes()
        damaged = bytearray(raw)
        at = random.randrange(len(raw))
        if random.random() < 0.5:
            damaged[at] = random.randrange(256)
        else:
            del damaged[at : at + random.randrange(1, 40)]
        (folder / name).write_bytes(damaged)
        try:
            check_folder(folder)
        except KimiK3Error as error:
            str(error).encode()
            refused += 1
        (folder / name).write_bytes(raw)
    check_folder(folder)
    assert refused > 40
