"""Final hidden states of all tokens of some samples, made layer by layer and kept.

FOLDER/samples.npz        the samples
FOLDER/final.bin          final hidden states (rows, length, hidden), bfloat16 or as asked
FOLDER/head.safetensors   what makes logits of them
FOLDER/final.json         what they are of, with checksums; written last
FOLDER/partial/           the lock, and states between two layers while it runs

A run that is killed at any point goes on with the layer it was at, to the same bits.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ..build.folder_lock import locked_folder
from ..build.hidden_states import HiddenStates
from ..build.layer_stream import LayerStream
from ..build.row_file import RowFile
from ..build.saliency import TOOL
from ..build.sample_rows import Samples, tokenizer_fingerprint
from ..build.samples import load_tokenizer
from ..build.streamed_pass import embed_rows, finish, run_layer
from ..errors import EvaluationError
from ..machine.hardware import Machine, read_machine
from .head import Head
from .sealed_json import read_json, write_json

MANIFEST, FINAL, HEAD, SAMPLES, PARTIAL = (
    "final.json",
    "final.bin",
    "head.safetensors",
    "samples.npz",
    "partial",
)
STATES, BEGUN = "states", "begun.json"

KIND, VERSION = "final hidden states", 1

#: Rows that go through a layer together: one, so that the roundings of a row's numbers
#: never depend on other rows.
ROWS_PER_STEP = 1

#: Share of the machine's memory in which hidden states may be held.
_HELD_SHARE = 0.25

_RESTART = "--restart discards what is there and starts over."


@dataclass(frozen=True)
class Conditions:
    """What the bits of final states depend on.

    Attributes:
        checkpoint: fingerprint of the folder.
        samples: fingerprint of the tokens.
        tokenizer: fingerprint of the checkpoint's tokenizer.
        dtype: "float32", or "stored" for what the checkpoint computes in.
        rows_per_step: rows that go through a layer together.
        tool, mlx, device: what computes, and its versions.
    """

    checkpoint: str
    samples: str
    tokenizer: str
    dtype: str
    rows_per_step: int
    tool: str
    mlx: str
    device: str

    def differences(self, other: "Conditions") -> list[str]:
        """In words, what of ``other`` is not as here."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name} was {mine[name]} and is {theirs[name]} now"
            for name in mine
            if mine[name] != theirs[name]
        ]


@dataclass(frozen=True)
class Progress:
    """How far a pass is: ``layer`` of ``layers`` done, seconds gone and left."""

    layer: int
    layers: int
    seconds: float
    seconds_left: float


Watch = Callable[[Progress], None]


class FinalStates:
    """Final hidden states in a folder that is complete.

    Attributes:
        conditions: what they are of.
        samples: the tokens.
        head: makes logits of them.
        path: the checkpoint as it was named.
    """

    def __init__(self, folder: Path, content: dict[str, Any]):
        self.folder = folder
        self.conditions = Conditions(**content["conditions"])
        self.path: str = content["path"]
        shape = tuple(content["shape"])
        self._file = RowFile.from_entry(folder, content["final"], shape)
        self.samples = Samples.load(folder / SAMPLES)
        if self.samples.fingerprint != self.conditions.samples:
            raise EvaluationError(f"{folder / SAMPLES} is not what was run. {_RESTART}")
        found = _file_sha256(folder / HEAD)
        if found != content["head_sha256"]:
            raise EvaluationError(
                f"{folder / HEAD} is not as it was written. {_RESTART}"
            )
        self.head = Head.load(folder / HEAD)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The states in ``folder``. Raises EvaluationError if they are not whole."""
        folder = Path(folder)
        return cls(folder, read_json(folder / MANIFEST, KIND, VERSION, _RESTART))

    @staticmethod
    def exist(folder: str | Path) -> bool:
        """Whether ``folder`` holds states that are complete."""
        return (Path(folder) / MANIFEST).is_file()

    def row(self, index: int) -> mx.array:
        """Final hidden states (length, hidden) of one row, checked against a checksum."""
        return self._file.read(index, index + 1)[0]


@dataclass(frozen=True)
class Run:
    """One checkpoint and how it is to be run.

    Args:
        float32: compute in float32 instead of the checkpoint's own type.
        rows_per_step: rows that go through a layer together.
        memory_limit: bytes of hidden states to hold in memory; default: a quarter of
            this machine's.
    """

    stream: LayerStream
    samples: Samples
    float32: bool = False
    rows_per_step: int = ROWS_PER_STEP
    memory_limit: int | None = None

    @classmethod
    def of(
        cls,
        checkpoint: str | Path,
        samples: Samples,
        *,
        float32: bool = False,
        rows_per_step: int = ROWS_PER_STEP,
        memory_limit: int | None = None,
    ) -> Self:
        """Open ``checkpoint``, which reads headers only."""
        stream = LayerStream(checkpoint, dtype=mx.float32 if float32 else None)
        return cls(stream, samples, float32, rows_per_step, memory_limit)

    @cached_property
    def conditions(self) -> Conditions:
        """Raises EvaluationError if the samples are of another tokenizer."""
        folder = self.stream.folder.path
        tokenizer = tokenizer_fingerprint(load_tokenizer(folder))
        if self.samples.tokenizer != tokenizer:
            raise EvaluationError(
                f"the samples were made with another tokenizer than that of {folder}, so "
                "their ids mean other text there, and nothing can be compared."
            )
        return Conditions(
            checkpoint=self.stream.fingerprint,
            samples=self.samples.fingerprint,
            tokenizer=tokenizer,
            dtype="float32" if self.float32 else "stored",
            rows_per_step=self.rows_per_step,
            tool=TOOL,
            mlx=version("mlx"),
            device=self._machine.device,
        )

    def final_states(
        self,
        folder: str | Path,
        *,
        restart: bool = False,
        progress: Watch | None = None,
    ) -> FinalStates:
        """Run, or go on where an earlier call with this ``folder`` stopped.

        Raises EvaluationError, before anything is computed, for a folder that holds
        other things.
        """
        folder = Path(folder)
        with locked_folder(folder, PARTIAL, "evaluated", EvaluationError):
            if restart:
                discard(folder)
            _refuse_other(folder, self.conditions)
            if not FinalStates.exist(folder):
                with _writing(folder):
                    begun = {"conditions": asdict(self.conditions)}
                    write_json(folder / PARTIAL / BEGUN, KIND, VERSION, begun)
                    self.samples.save(folder / SAMPLES)
                states = self._through_layers(folder / PARTIAL / STATES, progress)
                with _writing(folder):
                    self._finish(states, folder)
            _discard_partial(folder)
        return FinalStates.open(folder)

    @cached_property
    def _machine(self) -> Machine:
        return read_machine()

    def _through_layers(self, scratch: Path, progress: Watch | None) -> HiddenStates:
        """Embed, or open what was committed, and run the layers that are left."""
        limit = self.memory_limit
        if limit is None:
            limit = int(self._machine.memory * _HELD_SHARE)
        if HiddenStates.exist(scratch):
            states = HiddenStates.open(scratch, limit)
        else:
            states = embed_rows(
                self.stream,
                self.samples.tokens,
                scratch,
                memory_limit=limit,
                rows_per_step=self.rows_per_step,
            )
        assert states.layer is not None
        first, begin = states.layer + 1, time.monotonic()
        layers = self.stream.num_layers
        for index, layer, _ in self.stream.layers(first):
            run_layer(layer, index, states, self.rows_per_step)
            states.commit(index)
            if progress is not None:
                seconds = time.monotonic() - begin
                left = seconds / (index + 1 - first) * (layers - index - 1)
                progress(Progress(index + 1, layers, seconds, left))
        return states

    def _finish(self, states: HiddenStates, folder: Path) -> None:
        """Write final states and head, and then what makes them count."""
        file: RowFile | None = None
        for step, final in finish(self.stream, states, self.rows_per_step):
            if file is None:
                path, shape = folder / FINAL, final.shape[1:]
                file = RowFile(path, states.rows, shape, final.dtype)
            file.write(step.start, final)
        assert file is not None
        file.finish()
        head = folder / HEAD
        Head.of(self.stream).save(head)
        _sync(head)
        content = {
            "conditions": asdict(self.conditions),
            "path": str(self.stream.folder.path),
            "shape": [states.rows, *file.row_shape],
            "final": file.entry(),
            "head_sha256": _file_sha256(head),
        }
        write_json(folder / MANIFEST, KIND, VERSION, content)


def discard(folder: Path) -> None:
    """Delete what this module wrote to ``folder``, but the lock; the manifest first."""
    for name in (MANIFEST, FINAL, HEAD, SAMPLES):
        (folder / name).unlink(missing_ok=True)
    _discard_partial(folder)


def _discard_partial(folder: Path) -> None:
    """Delete what only an unfinished run needs; what tells of which run it is last."""
    states = folder / PARTIAL / STATES
    for name in ("states.json", "states.partial", "prefix-?.bin", "block-???.bin"):
        for path in states.glob(name):
            path.unlink()
    if states.is_dir():
        states.rmdir()
    (folder / PARTIAL / BEGUN).unlink(missing_ok=True)


def _refuse_other(folder: Path, now: Conditions) -> None:
    """Raise EvaluationError if ``folder`` holds, or has begun, anything else."""
    for path in (folder / MANIFEST, folder / PARTIAL / BEGUN):
        if path.is_file():
            then = Conditions(**read_json(path, KIND, VERSION, _RESTART)["conditions"])
            if differences := then.differences(now):
                raise EvaluationError(
                    f"{folder} holds final states of another run: "
                    f"{'; '.join(differences)}. Name another folder, or {_RESTART}"
                )
            return
    foreign = sorted(path.name for path in folder.iterdir() if path.name != PARTIAL)
    if foreign:
        raise EvaluationError(
            f"{folder} holds {foreign[0]} and no final states. Name an empty folder, or "
            "one that is not there yet."
        )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Layers that "
            "were finished are kept: make room, then start the same command again."
        ) from error


def _file_sha256(path: Path) -> str:
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
