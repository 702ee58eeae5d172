"""Whether tensors are quantised as the entries of ``config.json`` say."""

from typing import Any

import mlx.core as mx

from ..config import ModelArgs
from ..errors import CheckpointError
from .names import Placement, place, scales_name
from .stored_format import PACKED, StoredFormat
from .stored_shapes import dense_shape

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]

#: An entry: what a config calls the module, and how it is quantised (None: not at all).
Entry = tuple[str, StoredFormat | None]


def check_widths(
    weights: Weights,
    placements: dict[str, Placement],
    args: ModelArgs,
    shapes: Shapes,
) -> None:
    """Raise CheckpointError where an entry names another format than is stored.

    Tensors without an entry may have any format: hosts read it off the shapes.
    """
    entries = width_entries(args)
    if not entries:
        return
    for name, placement in placements.items():
        if not name.endswith((".weight", ".weight_packed")):
            continue
        said = entries.get((placement.key, placement.part), [])
        if placement.part is not None:
            said = said + entries.get((placement.key, None), [])
        if not said:
            continue
        wanted = dense_shape(placement, args.text_config, shapes)
        scales = weights.get(scales_name(name))
        if wanted is None or (scales is None and weights[name].dtype in PACKED):
            continue  # its scales may come with other shards
        stored = None
        if scales is not None:
            stored = StoredFormat.of_tensors(name, weights[name], scales, wanted[-1])
        for path, entry in said:
            _check(name, path, entry, stored, weights[name])


def width_entries(args: ModelArgs) -> dict[tuple[str, int | None], list[Entry]]:
    """Entries by the parameter, and part of it, that they speak of.

    They are found whatever format's names they are written in, prefixed or not.
    """
    block = args.quantization or {}
    entries: dict[tuple[str, int | None], list[Entry]] = {}
    for path, entry in block.items():
        if not isinstance(entry, dict | bool):
            continue
        try:
            placement = place(f"{path}.weight", args.text_config)
        except CheckpointError:
            continue  # an entry for a layer that the model does not have
        if placement is None:
            continue
        stored = None
        if entry is not False:
            stored = StoredFormat.of_entry(_with_defaults(entry, block))
        key = placement.key, placement.part
        entries.setdefault(key, []).append((path, stored))
    return entries


def _with_defaults(entry: Any, block: dict[str, Any]) -> dict[str, Any]:
    """``true`` stands for the block's own width."""
    return block if entry is True else entry


def _check(
    name: str,
    path: str,
    entry: StoredFormat | None,
    stored: StoredFormat | None,
    tensor: mx.array,
) -> None:
    # Routers are never quantised; hosts leave their entries alone.
    if entry == stored or (stored is None and path.endswith(".gate")):
        return
    found = f"{tensor.dtype} without scales" if stored is None else str(stored)
    raise CheckpointError(
        f"{name}: config.json's quantization.{path} says "
        f"{'not quantised' if entry is None else entry}, but the stored tensor is {found}. "
        "Correct the entry or download the shard again."
    )
