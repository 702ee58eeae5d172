"""The layers of a calibration: each run, recorded and made safe before the next."""

from contextlib import ExitStack

import numpy as np

from ..errors import DamagedScratchError, PartialResultError
from ..models.latent_moe import LatentMoE
from ..models.text import DecoderLayer
from .expert_recorder import ExpertRecorder, ExpertSums, recorded_experts
from .hidden_states import HiddenStates
from .input_moments import LayerMoments, MatrixRecorder, recorded_matrices
from .journal import RESTART, Journal, writing
from .layer_stream import LayerStream
from .pass_progress import ShownPass, Tell, Watch
from .saliency import SaliencyTable
from .samples import Samples
from .step_labels import StepLabels
from .streamed_pass import embed_rows, finish, refuse_nan_parameters, run_layer


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
        self.tell = tell
        step_tokens = journal.conditions.step_tokens
        self.rows_per_step = max(1, step_tokens // samples.length)
        self.tokens = samples.tokens_per_corpus
        self.shown = ShownPass(stream, samples, progress)

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
                self.shown.at_rows(index, rows)

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
        self.shown.finished(index)
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
