"""Makes final hidden states layer by layer, of a model that need not fit in memory.

FOLDER/partial/lock         held while it runs
FOLDER/partial/begun.json   what is being made: conditions, and what was asked for
FOLDER/partial/states/      hidden states between two layers

A run that is killed at any point goes on with the layer it was at, to the same bits.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Self

import mlx.core as mx

from ..build.calibration_run import Progress, Tell, Watch
from ..build.folder_lock import locked_folder
from ..build.hidden_states import HiddenStates
from ..build.layer_stream import EMBEDDING, LayerStream
from ..build.layer_stream import HEAD as HEAD_PART
from ..build.row_file import RowFile
from ..build.saliency import TOOL
from ..build.sample_rows import Samples, tokenizer_fingerprint
from ..build.samples import load_tokenizer
from ..build.streamed_pass import (
    embed_rows,
    finish,
    refuse_nan_parameters,
    run_layer,
    scratch_bytes,
)
from ..conversion.durable_files import unfinished_path
from ..errors import (
    DamagedScratchError,
    EvaluationError,
    NotFiniteError,
    SamplesError,
)
from ..machine.hardware import read_machine
from .conditions import FLOAT32, STORED, Conditions
from .final_states import (
    FINAL,
    HEAD,
    KIND,
    MANIFEST,
    RESTART,
    SAMPLES,
    VERSION,
    FinalStates,
    file_sha256,
)
from .head import Head
from .sealed_json import read_json, write_json

PARTIAL, STATES, BEGUN = "partial", "states", "begun.json"

#: Rows that go through a layer together: one, so that the roundings of a row's numbers
#: never depend on other rows.
ROWS_PER_STEP = 1

#: Share of the machine's memory in which hidden states may be held.
HELD_SHARE = 0.25


@dataclass(frozen=True)
class Run:
    """One checkpoint and how it is to be run.

    Args:
        float32: compute in float32 instead of the checkpoint's own type.
        rows_per_step: rows that go through a layer together.
        memory_limit: bytes of hidden states to hold in memory; default: a quarter of
            this machine's.
        request: what the samples were asked for by, so that going on needs no corpus.

    Raises EvaluationError for settings that mean nothing, and if the samples are of
    another tokenizer than the checkpoint.
    """

    stream: LayerStream
    samples: Samples
    float32: bool = False
    rows_per_step: int = ROWS_PER_STEP
    memory_limit: int | None = None
    request: str = ""

    def __post_init__(self) -> None:
        if self.rows_per_step < 1:
            raise EvaluationError(
                f"rows_per_step is {self.rows_per_step}, wanted 1 or more."
            )
        if self.memory_limit is not None and self.memory_limit < 0:
            raise EvaluationError(
                f"memory_limit is {self.memory_limit}, wanted 0 bytes or more."
            )
        assert self.conditions

    @classmethod
    def of(
        cls,
        checkpoint: str | Path,
        samples: Samples,
        *,
        float32: bool = False,
        rows_per_step: int = ROWS_PER_STEP,
        memory_limit: int | None = None,
        request: str = "",
    ) -> Self:
        """Open ``checkpoint``, which reads headers only."""
        stream = LayerStream(checkpoint, dtype=mx.float32 if float32 else None)
        return cls(stream, samples, float32, rows_per_step, memory_limit, request)

    @cached_property
    def conditions(self) -> Conditions:
        """What the bits will depend on; raises as the class says."""
        folder = self.stream.folder.path
        tokenizer = tokenizer_fingerprint(load_tokenizer(folder))
        if self.samples.tokenizer != tokenizer:
            raise EvaluationError(
                f"the samples were made with another tokenizer than that of {folder}, so "
                "their ids mean other text there, and nothing can be compared."
            )
        highest = int(self.samples.tokens.max())
        if highest >= self.stream.args.vocab_size:
            raise EvaluationError(
                f"the samples hold token id {highest}, but {folder} has a vocab_size of "
                f"{self.stream.args.vocab_size}: its config is another model's."
            )
        return Conditions(
            checkpoint=self.stream.fingerprint,
            samples=self.samples.fingerprint,
            tokenizer=tokenizer,
            dtype=FLOAT32 if self.float32 else STORED,
            rows_per_step=self.rows_per_step,
            tool=TOOL,
            mlx=version("mlx"),
            device=read_machine().device,
        )

    def final_states(
        self,
        folder: str | Path,
        *,
        restart: bool = False,
        progress: Watch | None = None,
        tell: Tell | None = None,
    ) -> FinalStates:
        """Run, or go on where an earlier call with this ``folder`` stopped.

        Raises EvaluationError, before anything is computed, for a folder that holds
        other things or is too small.
        """
        folder = Path(folder)
        with _own_folder(folder):
            if restart:
                discard(folder)
            _refuse_other(folder, self.conditions)
            if not FinalStates.exist(folder):
                with _writing(folder):
                    self._begin(folder)
                    states = self._through_layers(folder, progress, tell)
                    self._finish(states, folder)
            _discard_partial(folder)
            return FinalStates.open(folder)

    def _begin(self, folder: Path) -> None:
        begun = folder / PARTIAL / BEGUN
        if not begun.exists():
            self._check_room(folder)
        content = {"conditions": asdict(self.conditions), "request": self.request}
        write_json(begun, KIND, VERSION, content)
        if not (folder / SAMPLES).exists():
            self.samples.save(folder / SAMPLES)

    def _check_room(self, folder: Path) -> None:
        """Refuse a disk that is too small for the states between layers and the last."""
        args, samples = self.stream.args, self.samples
        item = 4 if self.float32 else 2
        final = samples.rows * samples.length * args.hidden_size * item
        head = self.stream.nbytes(EMBEDDING if args.tie_word_embeddings else HEAD_PART)
        wanted = scratch_bytes(args, samples.rows, samples.length, item) + final + head
        free = shutil.disk_usage(folder).free
        if free < wanted:
            raise EvaluationError(
                f"{folder} has {free:,} bytes free, but hidden states and the head need "
                f"up to {wanted:,}. Make room, name a folder on a larger disk, or take "
                "fewer samples."
            )

    def _through_layers(
        self, folder: Path, progress: Watch | None, tell: Tell | None
    ) -> HiddenStates:
        """Embed, or open what was committed, and run the layers that are left."""
        try:
            states = self._states(folder / PARTIAL / STATES)
        except DamagedScratchError as error:
            raise EvaluationError(f"{error} {RESTART}") from error
        assert states.layer is not None
        first = states.layer + 1
        if first and tell is not None:
            tell(f"layers 0 to {first - 1} were done before.")
        shown = _Shown(self.stream, self.samples, progress)
        try:
            for index, layer, nbytes in self.stream.layers(first):
                refuse_nan_parameters(layer, index)
                at = shown.rows_of(index)
                run_layer(layer, index, states, self.rows_per_step, at)
                states.commit(index)
                shown.finished(index, nbytes)
        except DamagedScratchError as error:
            raise EvaluationError(f"{error} {RESTART}") from error
        return states

    def _states(self, scratch: Path) -> HiddenStates:
        limit = self.memory_limit
        if limit is None:
            limit = int(read_machine().memory * HELD_SHARE)
        if HiddenStates.exist(scratch):
            return HiddenStates.open(scratch, limit)
        return embed_rows(
            self.stream,
            self.samples.tokens,
            scratch,
            memory_limit=limit,
            rows_per_step=self.rows_per_step,
        )

    def _finish(self, states: HiddenStates, folder: Path) -> None:
        """Write final states and head, and then what makes them count."""
        file: RowFile | None = None
        for step, final in finish(self.stream, states, self.rows_per_step):
            if not mx.isfinite(final).all().item():
                raise NotFiniteError(
                    f"the final norm gives NaN or infinity in rows {step.start} to "
                    f"{step.stop - 1}. Run `kimi-k3 verify` on the checkpoint."
                )
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
            "request": self.request,
            "path": str(self.stream.folder.path),
            "shape": [states.rows, *file.row_shape],
            "final": file.entry(),
            "head_sha256": file_sha256(head),
        }
        write_json(folder / MANIFEST, KIND, VERSION, content)


class _Shown:
    """Tells how far a pass is."""

    def __init__(self, stream: LayerStream, samples: Samples, progress: Watch | None):
        self.sizes = [stream.nbytes(i) for i in range(stream.num_layers)]
        self.rows = samples.rows
        self.tokens = int(samples.tokens_per_corpus.sum())
        self.progress = progress or (lambda at: None)
        self.started = time.monotonic()
        self.done = 0

    def rows_of(self, layer: int) -> Callable[[range], None]:
        """To be told which rows go through ``layer`` next."""
        return lambda rows: self._show(layer, rows.start)

    def finished(self, layer: int, nbytes: int) -> None:
        self.done += nbytes
        self._show(layer, self.rows, finished=True)

    def _show(self, layer: int, rows_done: int, *, finished: bool = False) -> None:
        here = 0 if finished else self.sizes[layer] * rows_done / self.rows
        left = sum(self.sizes[layer + 1 :])
        if not finished:
            left += self.sizes[layer] - here
        self.progress(
            Progress(
                layer=layer,
                layers=len(self.sizes),
                rows_done=rows_done,
                rows=self.rows,
                tokens=self.tokens,
                bytes_done=self.done + here,
                bytes_left=left,
                seconds=time.monotonic() - self.started,
                finished=finished,
            )
        )


def is_begun(folder: str | Path) -> bool:
    """Whether final states are being made in ``folder``, or were and are not whole."""
    return (Path(folder) / PARTIAL / BEGUN).is_file()


def kept_samples(folder: str | Path, request: str) -> Samples | None:
    """The samples that ``folder`` was begun with, if by the same ``request``."""
    folder = Path(folder)
    for path in (folder / MANIFEST, folder / PARTIAL / BEGUN):
        if path.is_file():
            begun = read_json(path, KIND, VERSION, RESTART)
            if begun.get("request") != request or not (folder / SAMPLES).is_file():
                return None
            try:
                return Samples.load(folder / SAMPLES)
            except SamplesError as error:
                raise EvaluationError(f"{error} Or start over: {RESTART}") from error
    return None


def discard(folder: Path) -> None:
    """Delete what this module wrote to ``folder``, but the lock.

    Only where something was begun: other files of these names are left alone. What
    tells that they are ours is deleted last.
    """
    if FinalStates.exist(folder) or is_begun(folder):
        for name in (HEAD, FINAL, SAMPLES):
            (folder / name).unlink(missing_ok=True)
        _discard_states(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        (folder / PARTIAL / BEGUN).unlink(missing_ok=True)


def _discard_partial(folder: Path) -> None:
    """Delete what only an unfinished run needs."""
    _discard_states(folder)
    (folder / PARTIAL / BEGUN).unlink(missing_ok=True)


def _discard_states(folder: Path) -> None:
    states = folder / PARTIAL / STATES
    for name in ("states.json", "states.partial", "prefix-?.bin", "block-???.bin"):
        for path in states.glob(name):
            path.unlink()
    if states.is_dir():
        states.rmdir()


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder``; where nothing was begun by the end, nothing is left."""
    try:
        with locked_folder(folder, PARTIAL, "evaluated", EvaluationError):
            for path in (folder / MANIFEST, folder / SAMPLES, folder / PARTIAL / BEGUN):
                unfinished_path(path).unlink(missing_ok=True)
            yield
    finally:
        with suppress(OSError):  # unless it holds anything, or is not there
            folder.rmdir()


def _refuse_other(folder: Path, now: Conditions) -> None:
    """Raise EvaluationError if ``folder`` holds, or has begun, anything else."""
    for path in (folder / MANIFEST, folder / PARTIAL / BEGUN):
        if path.is_file():
            then = read_json(path, KIND, VERSION, RESTART)["conditions"]
            if differences := Conditions.from_dict(then).differences(now):
                raise EvaluationError(
                    f"{folder} holds final states of another run: "
                    f"{'; '.join(differences)}. Name another folder, or {RESTART}"
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
