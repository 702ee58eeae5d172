"""A forward pass over many rows, one layer at a time: embed, run each layer, finish.

Each layer is called as the whole model calls it, on some rows after the other; between
layers the rows wait in :class:`~kimi_k3.build.hidden_states.HiddenStates`. Padding may
stand at the end of a row only: what stands before is not touched by it.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from ..config import TextArgs
from ..errors import NotFiniteError, ScratchError, TokenizerError
from ..models.attention_residuals import ResidualStack, mix
from ..models.text import DecoderLayer
from .hidden_states import EMBEDDED, HiddenStates
from .layer_stream import LayerStream

#: Told which rows go through the layer next, before they do.
Observe = Callable[[range], None]


def embed_rows(
    stream: LayerStream,
    tokens: np.ndarray,
    folder: str | Path,
    *,
    memory_limit: int,
    rows_per_step: int,
) -> HiddenStates:
    """Embed ``tokens`` (rows, length); their states, committed, are kept in ``folder``.

    Raises TokenizerError for ids that the model does not have, ScratchError if the disk
    is too small for what the whole pass will keep there.
    """
    rows, length = tokens.shape
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high >= stream.args.vocab_size:
        raise TokenizerError(
            f"the token ids run from {low} to {high}, but the model has "
            f"{stream.args.vocab_size} of them: they come from another model's "
            "tokenizer. Make the samples again with this checkpoint's."
        )
    with stream.embed() as embed:
        dtype = embed(mx.zeros((1, 1), dtype=mx.int32)).dtype
        hidden = stream.args.hidden_size
        states = HiddenStates(rows, length, hidden, dtype, folder, memory_limit)
        _check_room(states, scratch_bytes(stream.args, rows, length, dtype.size))
        for step in _steps(rows, rows_per_step):
            embedded = embed(mx.array(tokens[step.start : step.stop]))
            _refuse_infinite(embedded, "the embedding", step)
            states.write(step.start, embedded)
    states.commit(EMBEDDED)
    return states


def run_layer(
    layer: DecoderLayer,
    index: int,
    states: HiddenStates,
    rows_per_step: int,
    observe: Observe | None = None,
) -> None:
    """Run all rows through ``layer``, ``rows_per_step`` at once.

    The new states are written but not committed: whoever keeps results of the layer
    saves them first and calls ``states.commit(index)`` then. ``observe`` is told the
    rows of each step before the layer sees them. The same ``rows_per_step`` gives the
    same bits. Raises NotFiniteError as soon as a step gives NaN or infinity.
    """
    for step in _steps(states.rows, rows_per_step):
        prefix, blocks = states.read(step.start, step.stop)
        stack = ResidualStack(layer.input_layernorm.eps)
        if blocks is not None:
            stack.extend(blocks)
        stored = states.blocks
        if observe is not None:
            observe(step)
        out = layer(prefix, stack, mask_for(layer, prefix), None)
        pushed = None
        if stack.blocks is not None and len(stack.blocks) > stored:
            pushed = stack.blocks[stored]
        _refuse_infinite(out, f"layer {index}", step)
        states.write(step.start, out, pushed)


def finish(
    stream: LayerStream, states: HiddenStates, rows_per_step: int
) -> Iterator[tuple[range, mx.array]]:
    """Final hidden states (B, T, D), some rows at a time: what the head reads."""
    with stream.output() as text:
        for step in _steps(states.rows, rows_per_step):
            prefix, blocks = states.read(step.start, step.stop)
            if text.use_attn_res:
                stack = ResidualStack(text.args.rms_norm_eps)
                if blocks is not None:
                    stack.extend(blocks)
                prefix = mix(
                    stack, prefix, text.output_attn_res_norm, text.output_attn_res_proj
                )
            final = text.norm(prefix)
            mx.eval(final)
            yield step, final


def refuse_nan_parameters(layer: DecoderLayer, index: int) -> None:
    """Refuse a layer with a parameter that is no number, by its name.

    Not all of them reach the output: a router ranks an expert last whose score is NaN,
    and it would seem that no token needs it.
    """
    parameters: list[tuple[str, Any]] = tree_flatten(layer.parameters())  # type: ignore
    floating = [
        (name, array)
        for name, array in parameters
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    found = [mx.isnan(array).any() for _, array in floating]
    mx.eval(found)
    for (name, _), is_nan in zip(floating, found, strict=True):
        if is_nan.item():
            raise NotFiniteError(
                f"layer {index}: {name} holds NaN. The checkpoint is damaged: run "
                "`kimi-k3 verify` on it, or download the shard again."
            )


def mask_for(layer: DecoderLayer, prefix: mx.array) -> mx.array | None:
    """The mask that the whole model gives ``layer`` for rows without a cache."""
    if layer.is_linear:
        return create_ssm_mask(prefix, None)
    mask = create_attention_mask(prefix, None, return_array=True)
    return cast(mx.array | None, mask)


def stored_blocks(args: TextArgs) -> int:
    """Residual blocks that a pass has stored after the last layer."""
    if args.attn_res_block_size is None:
        return 0
    return -(-args.num_hidden_layers // args.attn_res_block_size)


def scratch_bytes(args: TextArgs, rows: int, length: int, item_bytes: int = 2) -> int:
    """Disk that a pass needs at most: the sums before and after a layer, all blocks."""
    arrays = 2 + stored_blocks(args)
    return arrays * rows * length * args.hidden_size * item_bytes


def _check_room(states: HiddenStates, wanted: int) -> None:
    free = shutil.disk_usage(states.folder).free
    if free < wanted:
        raise ScratchError(
            f"{states.folder} has {free:,} bytes free, but the hidden states need up to "
            f"{wanted:,}. Make room, name a folder on a larger disk, or take fewer "
            "samples."
        )


def _refuse_infinite(out: mx.array, what: str, rows: range) -> None:
    """Evaluate ``out``, what ``what`` gives for ``rows``, and refuse NaN in it."""
    finite = mx.isfinite(out).all()
    mx.eval(out, finite)
    if not finite.item():
        raise NotFiniteError(
            f"{what} gives NaN or infinity in rows {rows.start} to {rows.stop - 1}. Run "
            "`kimi-k3 verify` on the checkpoint."
        )


def _steps(rows: int, rows_per_step: int) -> Iterator[range]:
    if rows_per_step < 1:
        raise ValueError(f"rows_per_step is {rows_per_step}, wanted 1 or more.")
    for start in range(0, rows, rows_per_step):
        yield range(start, min(start + rows_per_step, rows))
