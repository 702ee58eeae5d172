"""A forward pass over a checkpoint layer by layer, as a caller writes it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kimi_k3.build.hidden_states import HiddenStates
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.streamed_pass import embed_rows, finish, run_layer

MUCH = 1 << 40


def random_tokens(stream: LayerStream, rows: int, length: int) -> np.ndarray:
    """Token ids (rows, length) that ``stream``'s model has, always the same."""
    shape = rows, length
    ids = np.random.default_rng(5).integers(0, stream.args.vocab_size, shape)
    return ids.astype(np.int32)


def embedded(
    stream: LayerStream,
    tokens: np.ndarray,
    scratch: Path,
    *,
    step: int = 3,
    limit: int = MUCH,
) -> HiddenStates:
    return embed_rows(stream, tokens, scratch, memory_limit=limit, rows_per_step=step)


def run_layers(
    stream: LayerStream,
    states: HiddenStates,
    *,
    step: int = 3,
    stop: int | None = None,
    after: Callable[[int], Any] = lambda index: None,
) -> None:
    """Go on from where ``states`` is, up to layer ``stop``, left out."""
    assert states.layer is not None
    for index, layer, _ in stream.layers(states.layer + 1):
        if index == stop:
            break
        run_layer(layer, index, states, step)
        states.commit(index)
        after(index)


def final_states(stream: LayerStream, states: HiddenStates, step: int = 3) -> mx.array:
    """(rows, T, D)."""
    parts = list(finish(stream, states, step))
    rows = [row for part, _ in parts for row in part]
    assert rows == list(range(states.rows))
    return mx.concatenate([final for _, final in parts])


def streamed(
    folder: Path,
    tokens: np.ndarray,
    scratch: Path,
    *,
    dtype: mx.Dtype | None = None,
    step: int = 3,
    limit: int = MUCH,
) -> mx.array:
    """Logits (rows, T, vocab) of ``tokens`` without a whole model in memory."""
    stream = LayerStream(folder, dtype=dtype)
    states = embedded(stream, tokens, scratch, step=step, limit=limit)
    run_layers(stream, states, step=step)
    final = final_states(stream, states, step)
    with stream.head() as head:
        logits = head(final)
        mx.eval(logits)
    states.remove()
    return logits


def reader_threads() -> list[threading.Thread]:
    """The threads that read ahead for a stream of layers."""
    return [t for t in threading.enumerate() if "layer-reader" in t.name]
