"""How far a pass through the layers is, as it is shown to whoever waits for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .layer_stream import LayerStream
from .sample_rows import Samples


@dataclass(frozen=True)
class Progress:
    """How far a pass is, after a step of a layer or at a layer's end.

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


class ShownPass:
    """Tells ``progress``, if there is one, how far a pass of ``samples`` is."""

    def __init__(self, stream: LayerStream, samples: Samples, progress: Watch | None):
        self._progress = progress
        self._sizes = [stream.nbytes(i) for i in range(stream.num_layers)]
        self._rows = samples.rows
        self._tokens = int(samples.tokens_per_corpus.sum())
        self._started = time.monotonic()
        self._done = 0

    def at_rows(self, layer: int, rows: range) -> None:
        """``rows`` go through ``layer`` next."""
        self._show(layer, rows.start)

    def finished(self, layer: int) -> None:
        """``layer`` is done, and safe on disk."""
        self._done += self._sizes[layer]
        self._show(layer, self._rows, finished=True)

    def _show(self, layer: int, rows_done: int, *, finished: bool = False) -> None:
        if self._progress is None:
            return
        size = self._sizes[layer]
        here = 0 if finished else size * rows_done / self._rows
        left = sum(self._sizes[layer + 1 :]) + (0 if finished else size - here)
        self._progress(
            Progress(
                layer=layer,
                layers=len(self._sizes),
                rows_done=rows_done,
                rows=self._rows,
                tokens=self._tokens,
                bytes_done=self._done + here,
                bytes_left=left,
                seconds=time.monotonic() - self._started,
                finished=finished,
            )
        )
