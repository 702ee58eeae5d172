"""Answers of a build, a JSON line each, that a kill loses at most the last of.

    OUT/answers.jsonl    in the order in which they are asked for

A line is on the disk before the next answer begins. Of a killed run the last line may be
torn; it is dropped, and that answer is given again.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from ..conversion.durable_files import sync
from ..errors import EvaluationError

FILE_NAME = "answers.jsonl"

_REMEDY = "Take it from a copy, or start over with --restart."


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        corpus, prompt: the prompt's corpus, and its number there.
        setting: name of the sampling setting. number: of the answer among its prompt's.
        seed: of the random numbers.
        stop: the name of the end id that ended it, or "length".
        ids: without that end id. text: of them, with what structure they have.
        question: the beginning of what was asked, for a reader.
        digest: of the prompt.
    """

    corpus: str
    prompt: int
    setting: str
    number: int
    seed: int
    stop: str
    text: str
    ids: tuple[int, ...]
    question: str
    digest: str

    @property
    def job(self) -> tuple[Any, ...]:
        """What it is the answer to, and which of them."""
        return (
            self.corpus,
            self.prompt,
            self.digest,
            self.setting,
            self.number,
            self.seed,
        )

    def line(self) -> bytes:
        text = json.dumps({**asdict(self), "ids": [*self.ids]}, ensure_ascii=False)
        # Half a surrogate pair, which JSON can hold and UTF-8 cannot, may be in a question.
        return text.encode("utf-8", "replace") + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """What :meth:`line` gave. Raises ValueError, KeyError or TypeError otherwise."""
        content = json.loads(line)
        values = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**values, "ids": tuple(map(int, values["ids"]))})


class AnswerFile:
    """The file of answers in the folder ``out``.

    Attributes:
        answers: those that are in it.
    """

    def __init__(self, out: Path):
        """Raises EvaluationError for a line that is no answer, unless it is the last."""
        self._path = out / FILE_NAME
        self.answers: list[Answer] = []
        content = self._path.read_bytes() if self._path.is_file() else b""
        *lines, torn = content.split(b"\n")
        kept = len(content) - len(torn)
        for number, line in enumerate(lines, start=1):
            try:
                self.answers.append(Answer.of_line(line))
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines) or torn:
                    raise EvaluationError(
                        f"{self._path}, line {number} is no answer: {error}. {_REMEDY}"
                    ) from error
                kept -= len(line) + 1
        if kept < len(content):
            with self._path.open("r+b") as file:
                file.truncate(kept)
                os.fsync(file.fileno())

    def append(self, answer: Answer) -> None:
        """Add ``answer``, durably. Raises EvaluationError if the disk takes no more."""
        try:
            is_new = not self._path.exists()
            with self._path.open("ab") as file:
                file.write(answer.line())
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self._path.parent)
        except OSError as error:
            raise EvaluationError(
                f"{self._path} cannot be written: {error.strerror}. Answers that were "
                "finished are kept: make room, then start the same command again."
            ) from error
        self.answers.append(answer)

    def refuse_others(self, jobs: list[tuple[Any, ...]]) -> None:
        """Raise EvaluationError unless the answers are those of the first of ``jobs``."""
        for number, answer in enumerate(self.answers, start=1):
            if number > len(jobs) or answer.job != jobs[number - 1]:
                raise EvaluationError(
                    f"{self._path}, line {number} answers something else than was asked "
                    f"there. {_REMEDY}"
                )
