"""A shard that is not what it was at opening is named and never handed out."""

import os
from pathlib import Path
from typing import Any

import pytest
from damage import copy_folder
from golden_data import DATA
from streaming import reader_threads
from tiny_k3 import write_t1

from kimi_k3.build.layer_reader import LayerReader
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.errors import ChangedShardError, CheckpointError, TruncatedShardError


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("t1"))


@pytest.fixture
def copy(t1: Path, tmp_path: Path) -> Path:
    """A T1 that may be damaged."""
    return copy_folder(t1, tmp_path / "copy")


def last_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def test_a_short_shard_is_refused_at_opening(copy: Path):
    os.truncate(last_shard(copy), last_shard(copy).stat().st_size - 1)
    with pytest.raises(TruncatedShardError, match=r"model-00003-of-000003.*incomplete"):
        LayerStream(copy)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            shorten,
            TruncatedShardError,
            r"model-00003-.* ends at byte \d+ but its header",
        ),
        (touch, ChangedShardError, r"model-00003-.* changed after it was opened"),
        (lengthen, ChangedShardError, r"model-00003-.* changed after it was opened"),
        (Path.unlink, CheckpointError, r"model-00003-.* cannot be read: No such file"),
    ],
)
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_shard_that_changes_is_named(copy, change, error, text, when):
    stream = LayerStream(copy)
    if when == "before":
        change(last_shard(copy))
    seen: list[int] = []

    def run() -> None:
        for index, *_ in stream.layers():
            seen.append(index)
            if when == "between" and index == 0:
                change(last_shard(copy))

    with pytest.raises(error, match=text):
        run()
    assert seen == [0, 1, 2, 3]  # the last layer is in the last shard
    assert reader_threads() == []


def test_a_shard_that_changes_while_it_is_read_is_named(copy, monkeypatch):
    """Neither the bytes before the change nor those after it are handed out."""
    fill, stream = LayerReader._fill, LayerStream(copy)
    changed = []

    def during(reader: Any, file: Any, piece: Any, *rest: Any) -> None:
        fill(reader, file, piece, *rest)
        if not changed and ".layers.4." in piece.name:
            changed.append(touch(last_shard(copy)))

    monkeypatch.setattr(LayerReader, "_fill", during)
    with pytest.raises(ChangedShardError, match="changed after it was opened"):
        list(stream.layers(4))
    assert changed


def test_a_shard_that_ends_while_it_is_read_is_named(copy, monkeypatch):
    fill, stream = LayerReader._fill, LayerStream(copy)

    def during(reader: Any, file: Any, piece: Any, *rest: Any) -> None:
        shorten(last_shard(copy))
        fill(reader, file, piece, *rest)

    monkeypatch.setattr(LayerReader, "_fill", during)
    with pytest.raises(TruncatedShardError, match=r"model-00003-.* ends at byte"):
        list(stream.layers(4))


def test_a_scale_that_is_no_number_is_named(copy: Path):
    header = LayerStream(copy).folder.headers[last_shard(copy).name]
    name = next(n for n in header.tensors if n.endswith("3.w2.weight_scale"))
    with last_shard(copy).open("r+b") as file:
        file.seek(header.tensors[name].start + 5)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=rf"{name} holds the scale byte 255"):
        list(LayerStream(copy).layers())


def test_the_folder_of_broken_builds_is_refused():
    with pytest.raises(CheckpointError, match="missing-shard|is not there"):
        LayerStream(DATA / "formats" / "broken" / "missing-shard")
