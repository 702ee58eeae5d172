"""Safetensors files written in pieces: their bytes, and what is refused."""

import errno
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from kimi_k3.checkpoint.headers import read_header
from kimi_k3.conversion.build_layout import BuildTensor
from kimi_k3.conversion.byte_copy import ByteCopier
from kimi_k3.conversion.provenance import ShardRecord
from kimi_k3.conversion.shard_writer import ShardWriter, shard_header, shard_size
from kimi_k3.errors import ConversionError

TENSORS = (
    BuildTensor("z.weight", (3, 4), "U32"),
    BuildTensor("a.scales", (3, 5), "U8"),
    BuildTensor("m", (2, 3), "BF16"),
    BuildTensor("s", (), "F32"),
)

VALUES: dict[str, mx.array] = {
    "z.weight": mx.arange(12, dtype=mx.uint32).reshape(3, 4),
    "a.scales": mx.arange(15, dtype=mx.uint8).reshape(3, 5),
    "m": mx.arange(6).reshape(2, 3).astype(mx.bfloat16),
    "s": mx.array(1.5),
}


def write(path: Path, names: list[str]) -> ShardRecord:
    with ShardWriter(path, TENSORS) as writer:
        for name in names:
            writer.put(name, VALUES[name])
        return writer.finish()


def test_the_order_of_writing_does_not_matter(tmp_path: Path):
    one = write(tmp_path / "one", list(VALUES))
    other = write(tmp_path / "other", list(reversed(VALUES)))
    assert one == other == ShardRecord.of(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert one.size == shard_size(TENSORS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "other"]


def test_tensors_lie_in_the_order_of_the_layout(tmp_path: Path):
    write(tmp_path / "shard", list(VALUES))
    header = read_header(tmp_path / "shard")
    by_place = sorted(header.tensors, key=lambda name: header.tensors[name].start)
    assert by_place == [tensor.name for tensor in TENSORS]
    assert header.tensors["z.weight"].start == len(shard_header(TENSORS))
    assert len(shard_header(TENSORS)) % 8 == 0


def test_other_readers_agree(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    write(path, list(VALUES))
    found: dict[str, mx.array]
    found, metadata = mx.load(str(path), return_metadata=True)  # type: ignore
    assert metadata == {"format": "mlx"}
    assert set(found) == set(VALUES)
    for name, wanted in VALUES.items():
        assert found[name].dtype == wanted.dtype
        assert mx.array_equal(found[name], wanted)
    with safe_open(path, "np") as file:
        assert file.get_tensor("s") == np.float32(1.5)
        assert (file.get_tensor("a.scales") == np.arange(15).reshape(3, 5)).all()


def test_rows_and_bytes_may_come_one_by_one(tmp_path: Path):
    whole = write(tmp_path / "whole", list(VALUES))
    with ShardWriter(tmp_path / "rows", TENSORS) as writer:
        for row in (2, 0, 1):
            writer.put("z.weight", VALUES["z.weight"][row : row + 1], row)
        scales = np.array(VALUES["a.scales"]).tobytes()
        writer.put_bytes("a.scales", scales[7:], 7)
        writer.put_bytes("a.scales", scales[:7])
        writer.put("m", VALUES["m"])
        writer.put("s", VALUES["s"])
        assert writer.finish() == whole
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


WRONG: dict[str, tuple[Any, ...]] = {
    "shape": ("m", mx.zeros((3, 2), mx.bfloat16), None),
    "type": ("m", mx.zeros((2, 3), mx.float16), None),
    "name": ("n", mx.zeros((2, 3), mx.bfloat16), None),
    "row": ("m", mx.zeros((2, 3), mx.bfloat16), 1),
    "row-shape": ("m", mx.zeros((1, 2), mx.bfloat16), 0),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_the_layout_does_not_have_is_never_written(kind: str, tmp_path: Path):
    name, array, row = WRONG[kind]
    with (
        pytest.raises(ConversionError, match=r"layout.*please report"),
        ShardWriter(tmp_path / "shard", TENSORS) as writer,
    ):
        writer.put(name, array, row)
    assert not list(tmp_path.iterdir())


def test_a_tensor_too_few_or_twice(tmp_path: Path):
    with pytest.raises(ConversionError, match="12 bytes of m were not written"):
        write(tmp_path / "shard", ["z.weight", "a.scales", "s"])
    with pytest.raises(ConversionError, match="it has 48, each once"):
        write(tmp_path / "shard", ["z.weight", "z.weight"])
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(tmp_path: Path):
    path = tmp_path / "shard"
    path.write_bytes(b"before")
    with pytest.raises(ConversionError):
        write(path, ["m"])
    assert path.read_bytes() == b"before"
    write(path, list(VALUES))
    assert path.stat().st_size == shard_size(TENSORS)


@pytest.fixture
def files(tmp_path: Path) -> Any:
    data = np.random.default_rng(0).integers(0, 256, 20_000_000, np.uint8).tobytes()
    (tmp_path / "source").write_bytes(data)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    with (tmp_path / "source").open("rb", buffering=0) as source:
        yield data, source, target
    os.close(target)


KERNELS = ("as-it-is", "refused", "zero", "short", "absent")


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_are_copied_whatever_the_kernel_offers(
    files: tuple[bytes, BinaryIO, int], kernel: str, monkeypatch: pytest.MonkeyPatch
):
    data, source, target = files
    asked = []

    def answer(one: int, other: int, count: int, start: int, place: int) -> int:
        asked.append(count)
        if kernel == "refused":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        if kernel == "zero":
            return 0
        return os.pwrite(other, os.pread(one, min(count, 999_999), start), place)

    if kernel == "absent":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif kernel != "as-it-is":
        monkeypatch.setattr(os, "copy_file_range", answer, raising=False)
    copier = ByteCopier()
    assert copier.copy(source, 100, target, 8, 17_000_001) == 17_000_001
    assert os.pread(target, 17_000_001, 8) == data[100:17_000_101]
    assert copier.copy(source, 0, target, 0, 5) == 5
    assert copier.copy(source, 19_999_990, target, 0, 50) == 10
    if kernel == "refused":
        assert len(asked) == 1, "it was asked again"


def test_a_full_disk_is_not_another_way_of_copying(
    files: tuple[bytes, BinaryIO, int], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    _, source, target = files
    with pytest.raises(OSError, match="No space left"):
        ByteCopier().copy(source, 0, target, 0, 5)


def test_the_header_says_how_long_it_is():
    header = shard_header(TENSORS)
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert header.startswith(b'{"__metadata__":{"format":"mlx"},"z.weight"', 8)
