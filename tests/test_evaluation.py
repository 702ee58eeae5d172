"""Evaluations and sealed JSON as files: what is refused, and that any change is seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_evaluations import made_evaluation

from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation.evaluation import Evaluation, is_evaluation
from kimi_k3.evaluation.sealed_json import read_json, write_json
from kimi_k3.evaluation.spans import SPANS

MADE = made_evaluation(documents=6)


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    MADE.save(tmp_path)
    for path in (tmp_path, tmp_path / "predictions.npz"):
        found = Evaluation.load(path)
        assert found.digest == MADE.digest
        assert found.about == MADE.about
        assert found.corpora == MADE.corpora
        assert found.kl.tolist() == MADE.kl.tolist()


def test_arrays_stay_as_they_are():
    kl = MADE.kl.copy()
    found = replace(MADE, kl=kl)
    kl[0] = 5
    assert found.kl[0] == MADE.kl[0]
    with pytest.raises(ValueError, match="read-only"):
        found.kl[0] = 5


def test_digest_tells_every_part_apart():
    digests = {MADE.digest}
    for name in ("kl", "teacher_nll", "build_nll", "position", "document"):
        array = getattr(MADE, name).copy()
        array[2] += 1
        digests.add(replace(MADE, **{name: array}).digest)
    digests.add(replace(MADE, agrees=~MADE.agrees).digest)
    digests.add(replace(MADE, corpora=("a", "b", "c")).digest)
    digests.add(replace(MADE, about={**MADE.about, "overlap": "none"}).digest)
    assert len(digests) == 9


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other-type": ({"kl": MADE.kl.astype(np.float32)}, "kl is float32 of shape"),
    "other-length": ({"agrees": MADE.agrees[1:]}, "agrees is bool of shape"),
    "nan": ({"kl": np.where(MADE.kl == MADE.kl[3], np.nan, MADE.kl)}, "kl holds NaN"),
    "infinite": (
        {"build_nll": np.full_like(MADE.kl, np.inf)},
        "build_nll holds NaN",
    ),
    "corpus": ({"corpora": ("a",)}, "corpus points beyond"),
    "language": ({"languages": ()}, "language points beyond"),
    "span": ({"span": np.full_like(MADE.span, -1)}, "span points beyond"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions(name: str):
    changes, said = REFUSED[name]
    with pytest.raises(EvaluationError, match=said):
        replace(MADE, **changes)


def test_no_predictions():
    arrays = {
        name: value[:0]
        for name, value in vars(MADE).items()
        if isinstance(value, np.ndarray)
    }
    with pytest.raises(EvaluationError, match="of no predictions"):
        replace(MADE, **arrays)


def test_groups_are_those_of_loops():
    for grouping, names in (
        ("corpus", MADE.corpora),
        ("span", SPANS),
        ("language", MADE.languages),
    ):
        array = getattr(MADE, grouping)
        want = {
            name: [i for i, value in enumerate(array.tolist()) if value == number]
            for number, name in enumerate(names)
        }
        got = {
            name: np.flatnonzero(which).tolist()
            for name, which in MADE.groups(grouping).items()
        }
        assert got == {name: places for name, places in want.items() if places}
        assert list(got) == [name for name in names if want[name]]


def test_groups_of_positions():
    position = np.array([1, 15, 16, 63, 64, 255, 256, 300_000, 262_143], np.int32)
    arrays = {
        name: value[:9]
        for name, value in vars(MADE).items()
        if isinstance(value, np.ndarray)
    }
    found = replace(MADE, **{**arrays, "position": position}).groups("position")
    assert {name: np.flatnonzero(which).tolist() for name, which in found.items()} == {
        "1 to 15": [0, 1],
        "16 to 63": [2, 3],
        "64 to 255": [4, 5],
        "256 to 1023": [6],
        "65536 to 262143": [8],
        "262144 on": [7],
    }


def digest_of(path: Path) -> str:
    """Of what is read, or what is said of it."""
    try:
        return Evaluation.load(path).digest
    except EvaluationError as error:
        return str(error)


def test_every_flipped_byte_is_seen(tmp_path: Path):
    MADE.save(tmp_path)
    path = tmp_path / "predictions.npz"
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 97):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        said = digest_of(path)
        # A byte that says nothing, such as a date of the archive, may change.
        assert said == MADE.digest or str(path) in said, place
        refused += said != MADE.digest
    assert refused > len(whole) / 97 * 0.8
    path.write_bytes(whole[:-1])
    assert str(path) in digest_of(path)
    assert is_evaluation(path)
    path.write_bytes(b"mine")
    assert not is_evaluation(path)
    assert "is not there" in digest_of(tmp_path / "absent")


class TestSealedJson:
    REMEDY = "Make it again."

    def read(self, path: Path, version: int = 1) -> dict[str, Any]:
        return read_json(path, "a note", version, self.REMEDY)

    def test_it_comes_back(self, tmp_path: Path):
        content = {"numbers": [1, 2.5, None], "text": "日本"}
        write_json(tmp_path / "a.json", "a note", 1, content)
        assert self.read(tmp_path / "a.json") == content
        assert json.loads((tmp_path / "a.json").read_text())["kind"] == "a note"
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"]

    def test_every_change_is_seen(self, tmp_path: Path):
        path = tmp_path / "a.json"
        write_json(path, "a note", 1, {"numbers": [10, 21.5], "text": "abc"})
        whole = path.read_text()
        for old, new in (("21.5", "21.6"), ("abc", "abd"), ('"text"', '"test"')):
            path.write_text(whole.replace(old, new))
            with pytest.raises(EvaluationError, match="was changed .* Make it again"):
                self.read(path)
        path.write_text(whole.replace("\n", "\n\n"))
        assert self.read(path)["numbers"] == [10, 21.5]

    @pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", "null", '"digest"'])
    def test_what_is_none(self, content: str, tmp_path: Path):
        path = tmp_path / "a.json"
        path.write_text(content)
        with pytest.raises(EvaluationError, match=r"a\.json is damaged, or not a note"):
            self.read(path)

    def test_another_kind_or_version(self, tmp_path: Path):
        path = tmp_path / "a.json"
        write_json(path, "a note", 2, {})
        with pytest.raises(EvaluationError, match="a note of version 2, wanted a note"):
            self.read(path)
        write_json(path, "a letter", 1, {})
        with pytest.raises(EvaluationError, match="is a letter of version 1"):
            self.read(path)
        with pytest.raises(EvaluationError, match="is not there; a note was expected"):
            self.read(tmp_path / "absent.json")
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(EvaluationError, match="is damaged"):
            self.read(path)
