"""Samples as a value: what contradicts itself is refused, also when read from a file."""

import dataclasses
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_mix import SMALL, other_names
from tokenizer_folders import write_tk

from kimi_k3.build.samples import Samples, make_samples, open_samples
from kimi_k3.errors import SamplesError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tk(tmp_path_factory.mktemp("tk"))[0]


@pytest.fixture(scope="module")
def small(folder: Path) -> Samples:
    return make_samples(SMALL, folder)


def parts_of(samples: Samples) -> dict[str, Any]:
    return {
        f.name: np.array(value) if isinstance(value, np.ndarray) else value
        for f in dataclasses.fields(samples)
        for value in [getattr(samples, f.name)]
    }


def test_what_is_saved_is_loaded(tmp_path: Path, folder: Path, small: Samples):
    small.save(tmp_path / "s.npz")
    loaded = Samples.load(tmp_path / "s.npz")
    assert loaded.fingerprint == small.fingerprint
    for name, value in parts_of(small).items():
        assert np.array_equal(getattr(loaded, name), value)
    assert open_samples(tmp_path / "s.npz", folder).fingerprint == small.fingerprint
    assert open_samples(SMALL, folder).fingerprint == small.fingerprint


def test_arrays_cannot_be_written_to(small: Samples):
    with pytest.raises(ValueError, match="read-only"):
        small.tokens[0, 0] = 1


def test_what_they_are_made_of_may_change(small: Samples):
    base = small.tokens.copy()
    mine = dataclasses.replace(small, tokens=base[:])
    assert mine.fingerprint == small.fingerprint
    base[0, 0] += 1
    assert np.array_equal(mine.tokens, small.tokens)


def pad(parts: dict[str, Any], place: Any) -> None:
    parts["labels"][place] = parts["documents"][place] = -1


BROKEN: dict[str, tuple[Any, str]] = {
    "all padding": (lambda p: pad(p, ...), "hold no token, only padding"),
    "no rows": (
        lambda p: p.update({n: p[n][:0] for n in ("tokens", "labels", "documents")}),
        "samples of 0 rows hold no token",
    ),
    "padded row": (lambda p: pad(p, 3), "row 3 begins with padding"),
    "padded left": (lambda p: pad(p, (2, 0)), "row 2 begins with padding"),
    "padded inside": (lambda p: pad(p, (2, 5)), "a token follows padding"),
    "label only": (
        lambda p: p["labels"].__setitem__((2, -1), -1),
        "disagree about what is padding",
    ),
    "negative id": (lambda p: p["tokens"].__setitem__((0, 0), -3), "id -3 is negative"),
    "label of nothing": (
        lambda p: p["labels"].__setitem__((0, 0), 4),
        "4 corpora, and tokens of 5",
    ),
    "corpus of nothing": (
        lambda p: p.update(corpora=(*p["corpora"], "more")),
        "5 corpora, and tokens of 4",
    ),
    "document of nothing": (
        lambda p: p.update(document_hashes=(*p["document_hashes"], "f")),
        "each must have a token",
    ),
    "same name": (
        lambda p: p.update(corpora=("code", "code", "a", "b")),
        "corpora name 'code' twice",
    ),
    "part": (lambda p: p.update(part="test"), "part is 'test'"),
    "type": (
        lambda p: p.update(labels=p["labels"].astype(np.int64)),
        "labels are int64 of shape",
    ),
    "shape": (lambda p: p.update(labels=p["labels"][:-1]), "they must be equal"),
    "flat": (lambda p: p.update(tokens=p["tokens"][0]), r"of shape \(rows, length\)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_samples_that_contradict_themselves(small: Samples, name: str):
    parts = parts_of(small)
    Samples(**parts)
    edit, message = BROKEN[name]
    parts = parts_of(small)
    edit(parts)
    with pytest.raises(SamplesError, match=message):
        Samples(**parts)


def test_a_damaged_file_is_refused(tmp_path: Path, small: Samples):
    path = tmp_path / "s.npz"
    small.save(path)
    data = path.read_bytes()
    chance = random.Random(5)
    refused = 0
    for _ in range(40):
        place = chance.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        # What is not refused are bytes of the archive that stand for nothing.
        with suppress(SamplesError):
            assert Samples.load(path).fingerprint == small.fingerprint
            continue
        refused += 1
    assert refused > 30
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SamplesError, match="is damaged, or not kimi-k3 samples"):
        Samples.load(path)
    with pytest.raises(SamplesError, match="is not there"):
        Samples.load(tmp_path / "other.npz")


def test_a_file_of_another_part_or_tokenizer(
    tmp_path: Path, folder: Path, small: Samples
):
    small.save(tmp_path / "s.npz")
    with pytest.raises(
        SamplesError, match="holds the part 'calibration', wanted 'held_out'"
    ):
        open_samples(tmp_path / "s.npz", folder, "held_out")
    other_names(tmp_path / "tk")
    with pytest.raises(SamplesError, match="made with another tokenizer than that of"):
        open_samples(tmp_path / "s.npz", tmp_path / "tk")
