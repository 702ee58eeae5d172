"""The file of answers: durable lines, a torn last one, and nobody else's."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_k3.answers.answers import FILE_NAME, Answer, AnswerFile
from kimi_k3.errors import EvaluationError

ONE = Answer(
    corpus="chat",
    prompt=3,
    setting="sampled",
    number=1,
    seed=2**53 - 1,
    stop="<|end_of_msg|>",
    text="Zeile\u2028zwei\n水",
    ids=(5, 6, 7),
    question="warum?",
    digest="d" * 32,
)
TWO = replace(ONE, number=2, ids=())


def filled(folder: Path) -> Path:
    file = AnswerFile(folder)
    file.append(ONE)
    file.append(TWO)
    return folder / FILE_NAME


def test_a_line_an_answer(tmp_path: Path):
    path = filled(tmp_path)
    assert path.read_bytes() == ONE.line() + TWO.line()
    assert AnswerFile(tmp_path).answers == [ONE, TWO]
    assert "水" in path.read_text("utf-8")


def test_a_torn_last_line_is_dropped(tmp_path: Path):
    path = filled(tmp_path)
    whole, first = path.read_bytes(), len(ONE.line())
    for size in (*range(0, len(whole), 17), first - 1, first, len(whole) - 1):
        path.write_bytes(whole[:size])
        found = AnswerFile(tmp_path)
        assert found.answers == ([ONE] if size >= first else [])
        assert path.stat().st_size == (first if size >= first else 0)
    AnswerFile(tmp_path).append(TWO)
    assert path.read_bytes() == whole


def test_a_last_line_of_zeros_is_dropped(tmp_path: Path):
    path = filled(tmp_path)
    path.write_bytes(ONE.line() + b"\0\0\0\0\n")
    assert AnswerFile(tmp_path).answers == [ONE]
    assert path.read_bytes() == ONE.line()


@pytest.mark.parametrize("line", [b"{}\n", b"[1]\n", b"\0\0\n", b"\n", b"\xff\n"])
def test_a_damaged_line_before_others_is_refused(tmp_path: Path, line: bytes):
    path = filled(tmp_path)
    path.write_bytes(line + ONE.line())
    with pytest.raises(EvaluationError, match=r"line 1 is no answer.*--restart"):
        AnswerFile(tmp_path)


def test_answers_to_something_else_are_refused(tmp_path: Path):
    filled(tmp_path)
    file = AnswerFile(tmp_path)
    file.refuse_others([ONE.job, TWO.job, replace(ONE, number=3).job])
    for jobs in (
        [ONE.job],
        [TWO.job, ONE.job],
        [ONE.job, replace(TWO, seed=1).job],
        [ONE.job, replace(TWO, digest="e" * 32).job],
    ):
        with pytest.raises(EvaluationError, match=r"answers something else"):
            file.refuse_others(jobs)


def test_half_a_surrogate_pair_in_a_question(tmp_path: Path):
    odd = replace(ONE, question="\ud83d?")
    assert Answer.of_line(odd.line()).question == "??"


def test_a_full_disk_is_told(tmp_path: Path):
    file = AnswerFile(tmp_path)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(EvaluationError, match=r"cannot be written.*are kept"):
        file.append(ONE)
