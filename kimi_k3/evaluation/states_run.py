"""Makes final hidden states layer by layer, of a model that need not fit in memory.

A run that is killed at any point goes on with the layer it was at, to the same bits.
"""

import shutil
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Self

import mlx.core as mx

from ..build.hidden_states import HiddenStates
from ..build.layer_stream import EMBEDDING, LayerStream
from ..build.layer_stream import HEAD as HEAD_PART
from ..build.pass_progress import ShownPass, Tell, Watch
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
from ..checkpoint.values_digest import values_digest
from ..conversion.durable_files import sync
from ..errors import DamagedScratchError, EvaluationError, NotFiniteError
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
from .sealed_json import write_json
from .states_journal import (
    BEGUN,
    PARTIAL,
    STATES,
    discard,
    discard_partial,
    own_folder,
    refuse_other,
    writing,
    written_files,
)

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
            values=values_digest(self.stream.folder),
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
        folder, tell = Path(folder), tell or (lambda text: None)
        with own_folder(folder, written_files(folder)):
            if restart:
                discard(folder)
            refuse_other(folder, self.conditions)
            was_there = FinalStates.exist(folder)
            if not was_there:
                for note in self.stream.notes:
                    tell(note)
                with writing(folder):
                    self._begin(folder)
                    states = self._through_layers(folder, progress, tell)
                    self._finish(states, folder)
            discard_partial(folder)
            found = FinalStates.open(folder)
            if was_there:
                found.check()
            return found

    def _begin(self, folder: Path) -> None:
        begun = folder / PARTIAL / BEGUN
        if not begun.exists():
            self._check_room(folder)
        content = {"conditions": asdict(self.conditions), "request": self.request}
        write_json(begun, KIND, VERSION, content)
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
        self, folder: Path, progress: Watch | None, tell: Tell
    ) -> HiddenStates:
        """Embed, or open what was committed, and run the layers that are left."""
        try:
            states = self._states(folder / PARTIAL / STATES)
        except DamagedScratchError as error:
            raise EvaluationError(f"{error} {RESTART}") from error
        assert states.layer is not None
        first = states.layer + 1
        if first:
            tell(f"layers 0 to {first - 1} were done before.")
        shown = ShownPass(self.stream, self.samples, progress)
        try:
            for index, layer, _ in self.stream.layers(first):
                refuse_nan_parameters(layer, index)
                at = partial(shown.at_rows, index)
                run_layer(layer, index, states, self.rows_per_step, at)
                states.commit(index)
                shown.finished(index)
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
        sync(head)
        content = {
            "conditions": asdict(self.conditions),
            "request": self.request,
            "path": str(self.stream.folder.path),
            "shape": [states.rows, *file.row_shape],
            "final": file.entry(),
            "head_sha256": file_sha256(head),
        }
        write_json(folder / MANIFEST, KIND, VERSION, content)
