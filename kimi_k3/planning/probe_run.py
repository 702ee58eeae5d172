"""Runs probes: the source and its changed copies go through the layers side by side.

Weights are read once for all probes of a pass. A probe shares the source's hidden states
up to the first layer that it changes, and has its own from there on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..build.input_moments import LayerMoments
from ..build.layer_stream import LayerStream
from ..build.streamed_pass import mask_for
from ..errors import NotFiniteError
from ..models.attention_residuals import ResidualStack, mix
from ..models.text import DecoderLayer, TextModel
from .probes import EMBEDDING_CLASS, HEAD_CLASS, ClassProbe, LowProbe, Probe, rounded

#: Told layer and layers, after each.
Progress = Callable[[int, int], None]

#: Tokens whose logits are in memory at once.
_LOGITS = 512


@dataclass
class _States:
    """Residual sum and stored blocks of each step of rows; arrays are never changed."""

    prefix: list[mx.array]
    blocks: list[mx.array | None]


def run_probes(
    stream: LayerStream,
    tokens: np.ndarray,
    labels: np.ndarray,
    probes: Sequence[Probe],
    *,
    corpora: int,
    rows_per_step: int,
    moments: Callable[[int], LayerMoments | None],
    progress: Progress | None = None,
) -> dict[Probe, np.ndarray]:
    """KL(source ‖ probe) of the next token, nats, mean over each corpus: (corpora,).

    Args:
        tokens: (rows, length) ids. labels: the same shape, corpus or −1 for padding.
        moments: of a layer, to weigh what a low bank rounds; or None.

    Raises NotFiniteError where a layer gives NaN.
    """
    steps = [
        tokens[start : start + rows_per_step]
        for start in range(0, len(tokens), rows_per_step)
    ]
    states: dict[Probe | None, _States] = {}
    with stream.embed() as embed:
        module = stream.model.model.embed_tokens
        states[None] = _embedded(embed, steps)
        for probe in probes:
            if isinstance(probe, ClassProbe) and probe.name == EMBEDDING_CLASS:
                with _weight(module, rounded(module["weight"], probe.bits)):
                    states[probe] = _embedded(embed, steps)
    total = stream.num_layers
    for index, layer, _ in stream.layers():
        # Only what a low bank rounds is weighed.
        lowers = any(isinstance(p, LowProbe) and p.first == index for p in probes)
        found = moments(index) if lowers else None
        for probe in probes:
            if probe.first == index:
                states[probe] = states[None]
        for key, before in list(states.items()):
            with ExitStack() as stack:
                if key is not None and key.touches(index, stream.args, layer):
                    stack.enter_context(key.made(index, stream.args, layer, found))
                states[key] = _through(layer, index, before)
        if progress is not None:
            progress(index + 1, total)
    with stream.output() as text:
        final = {key: _finished(text, state) for key, state in states.items()}
    return _divergences(stream, final, labels, probes, corpora, rows_per_step)


def _embedded(
    embed: Callable[[mx.array], mx.array], steps: Sequence[np.ndarray]
) -> _States:
    prefix = [embed(mx.array(step)) for step in steps]
    mx.eval(prefix)
    return _States(prefix, [None] * len(prefix))


def _through(layer: DecoderLayer, index: int, before: _States) -> _States:
    after = _States([], [])
    for prefix, blocks in zip(before.prefix, before.blocks, strict=True):
        stack = ResidualStack(layer.input_layernorm.eps)
        if blocks is not None:
            stack.extend(blocks)
        out = layer(prefix, stack, mask_for(layer, prefix), None)
        # The stored blocks of two probes are the same array as long as none is added.
        grown = stack.blocks
        if blocks is not None and grown is not None and len(grown) == len(blocks):
            grown = blocks
        finite = mx.isfinite(out).all()
        mx.eval(out, grown, finite)
        if not finite.item():
            raise NotFiniteError(
                f"layer {index} gives NaN or infinity under a probe. Run `kimi-k3 verify` "
                "on the source."
            )
        after.prefix.append(out)
        after.blocks.append(grown)
    return after


def _finished(text: TextModel, state: _States) -> list[mx.array]:
    """What the head reads, by step."""
    found = []
    for prefix, blocks in zip(state.prefix, state.blocks, strict=True):
        if text.use_attn_res and blocks is not None:
            stack = ResidualStack(text.args.rms_norm_eps)
            stack.extend(blocks)
            norm, projection = text.output_attn_res_norm, text.output_attn_res_proj
            prefix = mix(stack, prefix, norm, projection)
        final = text.norm(prefix)
        mx.eval(final)
        found.append(final)
    return found


def _divergences(
    stream: LayerStream,
    final: Mapping[Probe | None, list[mx.array]],
    labels: np.ndarray,
    probes: Sequence[Probe],
    corpora: int,
    rows_per_step: int,
) -> dict[Probe, np.ndarray]:
    sums = {probe: np.zeros(corpora) for probe in probes}
    counts = np.zeros(corpora)
    with stream.head() as head:
        module, weights = _heads(stream, probes)
        for step, rows in enumerate(final[None]):
            start = step * rows_per_step
            of_rows = labels[start : start + rows.shape[0]].reshape(-1)
            flat = {key: _tokens(states[step]) for key, states in final.items()}
            for at in range(0, len(of_rows), _LOGITS):
                part = slice(at, at + _LOGITS)
                label = of_rows[part]
                valid = label >= 0
                counts += np.bincount(label[valid], minlength=corpora)
                wanted = _log_probabilities(head(flat[None][part]))
                for probe in probes:
                    hidden = flat.get(probe, flat[None])[part]
                    with _weight(module, weights.get(probe)):
                        got = _log_probabilities(head(hidden))
                        found = np.array(_divergence(wanted, got), np.float64)[valid]
                    sums[probe] += np.bincount(label[valid], found, minlength=corpora)
    return {probe: total / np.maximum(counts, 1) for probe, total in sums.items()}


def _heads(
    stream: LayerStream, probes: Sequence[Probe]
) -> tuple[nn.Module, dict[Probe, mx.array]]:
    """The head's matrix, and what it becomes under the probes that change it."""
    tied = stream.args.tie_word_embeddings
    model = stream.model
    module: nn.Module = model.model.embed_tokens
    if not tied:
        module = model.language_model.lm_head
    name = EMBEDDING_CLASS if tied else HEAD_CLASS
    weights: dict[Probe, mx.array] = {
        probe: rounded(module["weight"], probe.bits)
        for probe in probes
        if isinstance(probe, ClassProbe) and probe.name == name
    }
    mx.eval(weights)
    return module, weights


@contextmanager
def _weight(module: nn.Module, weight: mx.array | None) -> Iterator[None]:
    """``module`` has ``weight``, if one is given, while the block runs."""
    kept = module["weight"]
    module["weight"] = kept if weight is None else weight
    try:
        yield
    finally:
        module["weight"] = kept


def _tokens(hidden: mx.array) -> mx.array:
    return hidden.reshape(-1, hidden.shape[-1])


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _divergence(wanted: mx.array, got: mx.array) -> mx.array:
    """(T, V) log-probabilities, twice → (T,) KL(wanted ‖ got).

    Σ p·(d + e⁻ᵈ − 1) with d = log p − log q, which is Σ p·d because both sum to 1. No
    term is negative, so small divergences do not drown in rounding.
    """
    d = wanted - got
    return (mx.exp(wanted) * (d + mx.expm1(-d))).sum(axis=-1)
