"""Whether a checkpoint folder holds a whole Kimi K3, without reading its tensors.

Hosts meet a damaged folder in words of their own, or not before minutes of reading.
This looks at config, index and headers, and at what the lazily built model makes of
them: seconds for a build of any size.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .checkpoint.completeness import check_complete
from .checkpoint.folder import Folder, read_folder
from .checkpoint.foreign import expert_store
from .checkpoint.headers import ShardHeader
from .checkpoint.names import OTHER_PARTS
from .checkpoint.sanitize import module_weights, quantize_as_stored
from .checkpoint.shard_index import LOADED
from .errors import CheckpointError, ForeignCheckpointError, KimiK3Error
from .models import Model
from .tokenizer.files import CONFIG_FILE, VOCAB_FILE, check_tokenizer_folder

#: The types that a Kimi K3 is stored in, and MLX's name of each.
STORED_DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "I64": mx.int64,
    "I32": mx.int32,
    "I8": mx.int8,
    "BOOL": mx.bool_,
}


@dataclass(frozen=True)
class FolderReport:
    """A folder in which nothing hinders loading. ``notes`` are remarks for a reader."""

    folder: Folder
    tensors: int
    data_bytes: int
    notes: tuple[str, ...]


def check_folder(path: str | Path) -> FolderReport:
    """Check the checkpoint folder ``path`` and say what was seen.

    Raises the :class:`~kimi_k3.errors.KimiK3Error` that names the first fault and how
    many more there are. A folder without tokenizer files passes, with a note.
    """
    folder = open_folder(path)
    notes = [*folder.notes, *check_tensors(folder), *check_tokenizer(folder.path)]
    if total_size := folder.total_size_note:
        notes.append(total_size)
    count = sum(len(header.tensors) for header in folder.headers.values())
    return FolderReport(folder, count, folder.data_bytes, tuple(notes))


def open_folder(path: str | Path) -> Folder:
    """The folder ``path``; raises the first fault of its config, index and shards."""
    folder, faults = read_folder(Path(path))
    if faults:
        raise _first(faults)
    return folder


def check_tensors(folder: Folder) -> list[str]:
    """Names, shapes, types and widths of all tensors against the model; notes."""
    return lazy_model(folder)[1]


def lazy_model(folder: Folder) -> tuple[Model, list[str]]:
    """The model that the tensors of ``folder`` make, quantised as stored; notes.

    Nothing is read or computed: each tensor has a stand-in of its shape and type, and
    the model's own parameters are not evaluated. Raises CheckpointError where names,
    shapes, types or widths contradict the config.
    """
    args = folder.args
    model = Model(args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            stored = _stand_ins(folder.headers.values())
            weights = module_weights(stored, args, model, read_values=False)
            quantize_as_stored(model, weights)
            parameters = cast(
                list[tuple[str, mx.array]], tree_flatten(model.parameters())
            )
            check_complete(
                weights,
                {name: tensor.shape for name, tensor in parameters},
                args.text_config,
            )
        except CheckpointError as error:
            if store := expert_store(folder.path):
                raise ForeignCheckpointError(
                    f"{error} The folder keeps a store in {store.name}/: an "
                    "expert-offload runtime wrote it. Use that runtime; experts streamed "
                    "from disk are not offered here."
                ) from error
            raise
    return model, [str(warning.message) for warning in caught]


def check_tokenizer(path: Path) -> list[str]:
    """Refuse tokenizer files that are not a K3's; a note if there are none."""
    if (path / CONFIG_FILE).exists():
        check_tokenizer_folder(path)
        return []
    return [
        f"{CONFIG_FILE} is not there: the model loads, but text cannot be encoded. Take "
        f"it and {VOCAB_FILE} from the checkpoint's own repository."
    ]


def _stand_ins(headers: Iterable[ShardHeader]) -> dict[str, mx.array]:
    """For each tensor of the text model an array of its shape, never evaluated."""
    zeros: dict[tuple[str, tuple[int, ...]], mx.array] = {}
    found: dict[str, mx.array] = {}
    for header in headers:
        loaded = header.path.match(LOADED)
        for name, tensor in header.tensors.items():
            if name.startswith(OTHER_PARTS):
                continue
            if not loaded or tensor.dtype not in STORED_DTYPES:
                why = (
                    f"is stored as {tensor.dtype}, which no Kimi K3 format has"
                    if loaded
                    else f"lies in {header.path.name}, but mlx-lm reads {LOADED} only"
                )
                raise CheckpointError(
                    f"{name} {why}. Take an MLX build or the release."
                )
            look = tensor.dtype, tensor.shape
            if look not in zeros:
                zeros[look] = mx.zeros(tensor.shape, dtype=STORED_DTYPES[tensor.dtype])
            found[name] = zeros[look]
    return found


def _first(faults: list[KimiK3Error]) -> KimiK3Error:
    first: Any = faults[0]
    if len(faults) == 1:
        return first
    more = f"{len(faults) - 1} more fault{'s' if len(faults) > 2 else ''}"
    return type(first)(f"{first} ({more}: `kimi-k3 verify` lists all.)")
