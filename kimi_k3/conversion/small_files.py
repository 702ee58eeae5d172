"""The small files of a build: index and side files, then ``config.json``, the last."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..checkpoint.folder import CONFIG
from ..checkpoint.shard_index import INDEX
from ..errors import CheckpointError, ConversionError
from .build_layout import BuildLayout
from .durable_files import write_durably
from .provenance import RECORD, Provenance, config_text
from .side_files import read_side_files, without_code


@dataclass(frozen=True)
class SmallFiles:
    """What lies beside the shards of a build, made before the first of them.

    Attributes:
        beside: name → content of index and side files.
        config: ``config.json`` without the record of the conversion.
    """

    beside: Mapping[str, bytes]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, source: Path, layout: BuildLayout) -> Self:
        """Raises the KimiK3Error that names a file of ``source`` that is damaged."""
        index = {INDEX: index_text(layout).encode()}
        try:
            beside = index | read_side_files(source)
        except OSError as error:
            raise CheckpointError(
                f"{source} cannot be read: {error.strerror}."
            ) from error
        return cls(beside, without_code(dict(layout.config)))

    def write(self, out: Path, record: Provenance) -> list[str]:
        """Write into ``out`` what is not there as it should be; names of that.

        Raises OSError where the disk takes no more.
        """
        config = dict(self.config) | {RECORD: record.to_dict()}
        written = []
        for name, content in (
            *self.beside.items(),
            (CONFIG, config_text(config).encode()),
        ):
            path = out / name
            if path.is_dir():
                raise ConversionError(
                    f"{path} is a folder where a file should be. Delete or move it, then "
                    "go on with --resume."
                )
            if not path.is_file() or path.read_bytes() != content:
                write_durably(path, content)
                written.append(name)
        return written


def index_text(layout: BuildLayout) -> str:
    """``model.safetensors.index.json`` of a build."""
    index = {
        "metadata": {"total_size": layout.nbytes},
        "weight_map": dict(sorted(layout.weight_map.items())),
    }
    return json.dumps(index, indent=1) + "\n"
