"""The layers of a calibration: each run, recorded and made safe before the next."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..errors import DamagedScratchError, PartialResultError
from ..models.latent_moe import LatentMoE
from ..models.text import DecoderLayer
from .expert_recorder import ExpertRecorder, ExpertSums, recorded_experts
from .hidden_states import HiddenStates
from .input_moments import LayerMoments, MatrixRecorder, recorded_matrices
from .journal import RESTART, Journal, writing
from .layer_stream import LayerStream
from .saliency import SaliencyTable
from .samples import Samples
from .step_labels import StepLabels
from .streamed_pass import embed_rows, finish, refuse_nan_parameters, run_layer


@dataclass(frozen=True)
class Progress:
    """How far a calibration is, after a step of a layer or at a layer's end.

    Attributes:
        layer, layers: the layer in work, from 0 on, and how many there are.
        rows_done, rows: of the samples, in this layer.
        tokens: in all rows, padding left out.
        bytes_done: of this process's share of the weights, this layer's by its rows.
        bytes_left: weights still to go through.
        seconds: since this process began.
        finished: whether this layer is done and safe on disk.
    """

    layer: int
    layers: int
    rows_done: int
    rows: int
    tokens: int
    bytes_done: float
    bytes_left: float
    seconds: float
    finished: bool = False

    @property
    def bytes_per_second(self) -> float:
        """Weights gone through in a second, reading and computing together."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What is left to do, at the speed so far; None at the very beginning."""
        if not self.bytes_per_second:
            return None
        return self.bytes_left / self.bytes_per_second


Watch = Callable[[Progress], None]
Tell = Callable[[str], None]


class CalibrationRun:
    """One calibration, from the layer on that is to be done next."""

    def __init__(
        self,
        stream: LayerStream,
        samples: Samples,
        journal: Journal,
        memory_limit: int,
        progress: Watch | None,
        tell: Tell,
    ):
        self.stream = stream
        self.samples = samples
        self.journal = journal
        self.memory_limit = memory_limit
        self.progress = progress
        self.tell = tell
        step_tokens = journal.conditions.step_tokens
        self.rows_per_step = max(1, step_tokens // samples.length)
        self.tokens = samples.tokens_per_corpus
        self.started = time.monotonic()
        self.bytes_done = 0
        self.sizes = [stream.nbytes(i) for i in range(stream.num_layers)]

    def result(self) -> SaliencyTable:
        """Run what is left, and put all layers' sums together."""
        try:
            states = self._states()
            start = 0 if states.layer is None else states.layer + 1
            sums = self.journal.read(start)
            if start:
                self.tell(f"layers 0 to {start - 1} were done before.")
            for index, layer, _ in self.stream.layers(start):
                found = self._layer(index, layer, states)
                if found is not None:
                    sums[index] = found
            if self.journal.conditions.moments:
                self._head(states)
        except DamagedScratchError as error:
            raise PartialResultError(
                f"{error} Take it from a copy; {RESTART}"
            ) from error
        return self._table(sums)

    def _states(self) -> HiddenStates:
        folder = self.journal.states
        if HiddenStates.exist(folder):
            return HiddenStates.open(folder, self.memory_limit)
        if self.journal.states_are_missing():
            raise PartialResultError(
                f"{folder} holds no hidden states, but layers were finished with them. "
                f"Take it from a copy; {RESTART}"
            )
        return embed_rows(
            self.stream,
            self.samples.tokens,
            folder,
            memory_limit=self.memory_limit,
            rows_per_step=self.rows_per_step,
        )

    def _layer(
        self, index: int, layer: DecoderLayer, states: HiddenStates
    ) -> ExpertSums | None:
        """Run one layer and make it safe; its sums, if it has experts."""
        corpora = len(self.samples.corpora)
        with ExitStack() as stack:
            recorders: list[ExpertRecorder | MatrixRecorder] = []
            experts = matrices = None
            if self.journal.conditions.moments:
                matrices = stack.enter_context(recorded_matrices(layer, corpora))
                recorders.append(matrices)
            if isinstance(layer.mlp, LatentMoE):
                with_moments = self.journal.conditions.moments
                experts = stack.enter_context(
                    recorded_experts(layer.mlp, corpora, moments=with_moments)
                )
                recorders.append(experts)

            def observe(rows: range) -> None:
                if matrices is not None:
                    matrices.collect()
                labels = self._labels(rows)
                for recorder in recorders:
                    recorder.labels = labels
                self._show(index, rows.start)

            refuse_nan_parameters(layer, index)
            run_layer(layer, index, states, self.rows_per_step, observe)
            sums = None if experts is None else experts.sums
            kept = self._moments(matrices, experts)
        if sums is not None:
            # What no calibration can give is named now and not after the last layer.
            self._table({index: sums})
        with writing(self.journal.out):
            self.journal.record(index, sums, kept)
        states.commit(index)
        self.bytes_done += self.sizes[index]
        self._show(index, states.rows, finished=True)
        return sums

    def _moments(
        self, matrices: MatrixRecorder | None, experts: ExpertRecorder | None
    ) -> LayerMoments | None:
        if matrices is None:
            return None
        gate_up = down = None
        if experts is not None and experts.latent_moment is not None:
            assert experts.inner_moment is not None
            gate_up = experts.latent_moment.astype(np.float32)
            down = experts.inner_moment.astype(np.float32)
        return LayerMoments(self.tokens, matrices.moments(), gate_up, down)

    def _head(self, states: HiddenStates) -> None:
        """Moments of what the head reads."""
        recorder = MatrixRecorder(len(self.samples.corpora))
        for rows, final in finish(self.stream, states, self.rows_per_step):
            recorder.labels = self._labels(rows)
            recorder.add("lm_head", final)
            recorder.collect()
        with writing(self.journal.out):
            self.journal.head_path.parent.mkdir(exist_ok=True)
            LayerMoments(self.tokens, recorder.moments()).save(self.journal.head_path)

    def _labels(self, rows: range) -> StepLabels:
        labels = self.samples.labels[rows.start : rows.stop]
        return StepLabels(labels, len(self.samples.corpora))

    def _table(self, sums: dict[int, ExpertSums]) -> SaliencyTable:
        samples = self.samples
        return SaliencyTable.from_layers(
            {index: one.arrays() for index, one in sums.items()},
            corpora=samples.corpora,
            tokens=self.tokens,
            top_k=self.stream.args.num_experts_per_token,
            source={"fingerprint": self.stream.fingerprint},
            samples={
                "fingerprint": samples.fingerprint,
                "tokenizer": samples.tokenizer,
                "document_hashes": list(samples.document_hashes),
                "part": samples.part,
            },
        )

    def _show(self, layer: int, rows_done: int, *, finished: bool = False) -> None:
        if self.progress is None:
            return
        rows = self.samples.rows
        here = 0 if finished else self.sizes[layer] * rows_done / rows
        left = sum(self.sizes[layer + 1 :])
        if not finished:
            left += self.sizes[layer] - here
        self.progress(
            Progress(
                layer=layer,
                layers=len(self.sizes),
                rows_done=rows_done,
                rows=rows,
                tokens=int(self.tokens.sum()),
                bytes_done=self.bytes_done + here,
                bytes_left=left,
                seconds=time.monotonic() - self.started,
                finished=finished,
            )
        )
