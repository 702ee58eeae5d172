"""A finished build met again with ``resume``: shards stay, the rest is completed."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_cases import THREE_LAYERS
from tiny_k3 import write_t1

from kimi_k3 import convert
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.conversion import conversion_run
from kimi_k3.conversion.conversion_journal import ConversionJournal
from kimi_k3.conversion.conversion_run import ConversionRun, Progress
from kimi_k3.conversion.file_hashes import FileHashes, hashing_threads
from kimi_k3.conversion.provenance import Provenance
from kimi_k3.errors import CheckpointError, ConversionError
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "t1"
    return write_t1(folder, tokenizer=True, **THREE_LAYERS)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "finished"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record_of(finished: Path) -> Provenance:
    record = Provenance.of_config(read_config(finished))
    assert record is not None
    return record


SMALL = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tiktoken.model",
    "tokenizer_config.json",
)


@pytest.mark.parametrize("name", SMALL)
def test_what_was_changed_is_written_again(
    source: Path, whole: Path, finished: Path, name: str
):
    path = finished / name
    if name == "config.json":
        path.write_text(path.read_text().replace('"hidden_size"', '"hidden_sizes"', 1))
    else:
        path.write_bytes(path.read_bytes()[:-3])
    assert files_of(finished) != files_of(whole)
    said: list[str] = []
    convert(source, finished, resume=True, tell=said.append)
    assert said[-1].endswith(f"changed were, and are written again: {name}.")
    assert files_of(finished) == files_of(whole)
    convert(source, finished, resume=True, tell=said.append)
    assert said[-1].endswith("there is nothing to do.")


def test_what_is_missing_is_written_again(source: Path, whole: Path, finished: Path):
    for name in SMALL[1:]:
        (finished / name).unlink()
    said: list[str] = []
    convert(source, finished, resume=True, tell=said.append)
    assert all(name in said[-1] for name in SMALL[1:])
    assert files_of(finished) == files_of(whole)


def test_a_folder_where_a_file_should_be(source: Path, finished: Path):
    (finished / SMALL[1]).unlink()
    (finished / SMALL[1]).mkdir()
    with pytest.raises(ConversionError, match=f"{SMALL[1]} is a folder where a file"):
        convert(source, finished, resume=True)


def test_a_tokenizer_that_comes_later(source: Path, whole: Path, tmp_path: Path):
    mine = Path(shutil.copytree(source, tmp_path / "source"))
    names = ("tiktoken.model", "tokenizer_config.json")
    for name in names:
        (mine / name).unlink()
    said: list[str] = []
    out = convert(mine, tmp_path / "out", tell=said.append)
    assert any(text.startswith(f"WARNING: {mine} holds no tokenizer") for text in said)
    for name in names:
        shutil.copy(source / name, mine)
    convert(mine, out, resume=True)
    assert files_of(out) == files_of(whole)


def test_hashes_of_the_source_afterwards(
    source: Path, whole: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
):
    assert {shard.sha256 for shard in record_of(finished).source.values()} == {None}
    seen: list[Progress] = []
    take = FileHashes.take

    def show_at_least_once(hashes: FileHashes, *, wait: Any = None) -> dict[str, str]:
        if wait is not None:
            wait()
        return take(hashes, wait=wait)

    monkeypatch.setattr(FileHashes, "take", show_at_least_once)
    convert(source, finished, resume=True, hash_source=True, progress=seen.append)
    record = record_of(finished)
    for name, shard in record.source.items():
        assert shard.sha256 == hash_of(source / name)
    assert record == replace(record_of(whole), source=record.source)
    assert {progress.hashing for progress in seen} == {"the source"}
    before = files_of(finished)
    convert(source, finished, resume=True, hash_source=True)
    assert files_of(finished) == before
    said: list[str] = []
    convert(source, finished, resume=True, tell=said.append)
    assert files_of(finished) == before, "hashes that are known are kept"
    assert said[-1].endswith("there is nothing to do.")


def test_hashes_that_the_hub_contradicts(source: Path, finished: Path, tmp_path: Path):
    mine = Path(shutil.copytree(source, tmp_path / "source"))
    noted = mine / ".cache/huggingface/download"
    noted.mkdir(parents=True)
    name = sorted(path.name for path in mine.glob("*.safetensors"))[0]
    (noted / f"{name}.metadata").write_text(f"c\n{'0' * 64}\n1\n")
    before = files_of(finished)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: its SHA-256"):
        convert(mine, finished, resume=True, hash_source=True)
    assert files_of(finished) == before


def test_without_its_config_nothing_is_known(source: Path, finished: Path):
    (finished / "config.json").unlink()
    with pytest.raises(
        ConversionError, match=r"holds shards, but neither config\.json"
    ):
        convert(source, finished, resume=True)
    with pytest.raises(ConversionError, match="is not empty"):
        convert(source, finished)


def test_another_finished_conversion_is_told_apart(source: Path, finished: Path):
    text = read_config(source)["text_config"]
    plan = ExpertPlan(
        text["num_experts"],
        text["num_experts_per_token"],
        dict.fromkeys((1, 2), LayerPlan(tuple(range(text["num_experts"])))),
    )
    told = r"finished: the plan \(--plan\) was none and is '[0-9a-f]{12}' now"
    with pytest.raises(ConversionError, match=told):
        convert(source, finished, plan, resume=True)


def test_every_shard_has_its_hash(whole: Path):
    shards = record_of(whole).shards
    assert sorted(shards) == sorted(p.name for p in whole.glob("*.safetensors"))
    for name, shard in shards.items():
        assert shard.sha256 == hash_of(whole / name)


class Stop(Exception):
    """Raised in the middle of a conversion."""


def test_hashes_that_a_stop_cut_short_are_computed_later(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed when shards were finished and their hashes were not known."""
    monkeypatch.setattr(ConversionRun, "_take_written", lambda run, hashes: None)

    def stop(progress: Progress) -> None:
        if progress.finished and progress.shard == 2:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, progress=stop)
    monkeypatch.undo()
    journal = ConversionJournal.read(out)
    assert journal is not None
    assert [s.record.sha256 for s in journal.finished.values()] == [None] * 3
    convert(source, out, resume=True)
    assert files_of(out) == files_of(whole)


def test_threads_that_hash(monkeypatch: pytest.MonkeyPatch):
    assert conversion_run.hashing_threads is hashing_threads
    for cores, threads in ((None, 1), (1, 1), (2, 1), (6, 3), (128, 4)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert hashing_threads() == threads


def test_files_are_for_others_as_the_umask_says(source: Path, tmp_path: Path):
    before = os.umask(0o027)
    try:
        out = convert(source, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert set(modes.values()) == {0o640}, json.dumps(modes)
