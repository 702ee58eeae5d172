"""A checkpoint folder without its data: config, index and headers, read once.

Cheap on builds of any size. Whether the tensors are those of the model is the next
question, :func:`kimi_k3.folder_check.check_folder`.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelArgs
from ..errors import CheckpointError, ConfigError, ForeignCheckpointError, KimiK3Error
from .foreign import refuse_foreign_config, refuse_foreign_files
from .headers import ShardHeader, StoredTensor
from .shard_index import (
    INDEX,
    ShardIndex,
    index_faults,
    read_index,
    read_json,
    read_shards,
)

CONFIG = "config.json"
MODEL_TYPE = "kimi_k3"


@dataclass(frozen=True)
class Folder:
    """What the small files and the headers of a checkpoint folder say.

    ``notes`` are remarks on what does not hinder loading.
    """

    path: Path
    config: dict[str, Any]
    args: ModelArgs
    index: ShardIndex
    headers: dict[str, ShardHeader]
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every stored tensor by name."""
        return {
            name: tensor
            for header in self.headers.values()
            for name, tensor in header.tensors.items()
        }

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        headers = self.headers.values()
        return sum(tensor.nbytes for h in headers for tensor in h.tensors.values())

    @property
    def total_size_note(self) -> str | None:
        """What to say of an index whose ``total_size`` is not that of its tensors."""
        said, stored = self.index.total_size, self.data_bytes
        if said in (None, stored):
            return None
        return f"{INDEX} gives a total_size of {said} bytes, but its tensors have {stored}."


def read_folder(path: Path) -> tuple[Folder, list[KimiK3Error]]:
    """The folder and every fault of its shards and index.

    Raises at the first fault of what nothing can be said without: a folder that is
    another tool's or holds no weights, config.json, an index that cannot be read.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Name the folder that holds config.json and the "
            "safetensors shards."
        )
    refuse_foreign_files(path)
    config = read_config(path)
    args, notes = _read_args(config)
    index = read_index(path)
    headers, faults = read_shards(path, index)
    faults += index_faults(path, index, headers)
    notes += [
        f"{file.name} lies in the folder; it is never executed here."
        for file in sorted(path.glob("*.py"))
    ]
    return Folder(path, config, args, index, headers, tuple(notes)), [*faults]


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of the folder ``path``, which must be a Kimi K3's.

    Raises ConfigError if it is missing or unreadable, ForeignCheckpointError if it is of
    another model or tool, CheckpointError if it asks for code of the checkpoint.
    """
    file = path / CONFIG
    if not file.is_file():
        raise ConfigError(
            f"{path} holds no {CONFIG}. Download it from the checkpoint's own repository."
        )
    try:
        config = read_json(file)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    refuse_foreign_config(config)
    found = config.get("model_type")
    if found is None:
        raise ConfigError(f"{file} has no model_type; a Kimi K3's is {MODEL_TYPE!r}.")
    if found != MODEL_TYPE:
        raise ForeignCheckpointError(
            f"{path} holds a {str(found)[:60]!r} model, not a Kimi K3. Use mlx_lm (or "
            "mlx_vlm) for it directly."
        )
    if (wanted := config.get("model_file")) is not None:
        raise CheckpointError(
            f"{file} wants the model built by {str(wanted)[:60]!r}, a file of the "
            "checkpoint (key model_file). Code of checkpoints is never executed here; "
            "remove the key if the build is a plain Kimi K3."
        )
    return config


def _read_args(config: dict[str, Any]) -> tuple[ModelArgs, list[str]]:
    """The config's arguments; what it warns of becomes notes, for loading warns too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = ModelArgs.from_dict(config)
    return args, [str(warning.message) for warning in caught]
