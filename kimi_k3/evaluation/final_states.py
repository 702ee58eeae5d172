"""Final hidden states of all tokens of some samples, in a folder that is complete.

FOLDER/samples.npz        the samples
FOLDER/final.bin          final hidden states (rows, length, hidden)
FOLDER/head.safetensors   what makes logits of them
FOLDER/final.json         what they are of, with checksums; written last

``states_run.py`` makes them.
"""

import hashlib
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ..build.row_file import RowFile
from ..build.sample_rows import Samples
from ..errors import DamagedScratchError, EvaluationError, SamplesError
from .conditions import Conditions
from .head import Head
from .sealed_json import read_json

MANIFEST, FINAL, HEAD, SAMPLES = (
    "final.json",
    "final.bin",
    "head.safetensors",
    "samples.npz",
)

KIND, VERSION = "final hidden states", 1

RESTART = "--restart discards what is there and starts over."


class FinalStates:
    """Final hidden states in a folder that is complete.

    Attributes:
        folder: where they lie.
        conditions: what they are of.
        samples: the tokens.
        head: makes logits of them.
        path: the checkpoint as it was named.
    """

    def __init__(self, folder: Path, content: dict[str, Any]):
        self.folder = folder
        try:
            self.conditions = Conditions.from_dict(content["conditions"])
            self.path: str = content["path"]
            shape = tuple(content["shape"])
            self._file = RowFile.from_entry(folder, content["final"], shape)
            head_sha256 = content["head_sha256"]
        except (KeyError, TypeError, ValueError) as error:
            raise EvaluationError(
                f"{folder / MANIFEST} lacks {error}. {RESTART}"
            ) from (error)
        try:
            self.samples = Samples.load(folder / SAMPLES)
        except SamplesError as error:
            raise EvaluationError(f"{error} Or start over: {RESTART}") from error
        if self.samples.fingerprint != self.conditions.samples:
            raise EvaluationError(f"{folder / SAMPLES} is not what was run. {RESTART}")
        found = file_sha256(folder / HEAD)
        if found != head_sha256:
            raise EvaluationError(f"{folder / HEAD} is {_how(found)}. {RESTART}")
        self.head = Head.load(folder / HEAD)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The states in ``folder``. Raises EvaluationError if they are not whole.

        Of the states themselves that is found by :meth:`check`, or when they are read.
        """
        folder = Path(folder)
        return cls(folder, read_json(folder / MANIFEST, KIND, VERSION, RESTART))

    @staticmethod
    def exist(folder: str | Path) -> bool:
        """Whether ``folder`` holds states that are complete."""
        return (Path(folder) / MANIFEST).is_file()

    def row(self, index: int) -> mx.array:
        """Final hidden states (length, hidden) of one row, checked against a checksum."""
        try:
            return self._file.read(index, index + 1)[0]
        except DamagedScratchError as error:
            raise EvaluationError(f"{error} {RESTART}") from error

    def check(self) -> None:
        """Read all rows; EvaluationError if one is not as it was written."""
        for row in range(self.samples.rows):
            self.row(row)


def file_sha256(path: Path) -> str:
    """SHA-256 of the file ``path`` as hex, or "absent"."""
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _how(found: str) -> str:
    return "not there any more" if found == "absent" else "not as it was written"
