"""Where the golden cases and the builds of the wild lie, and how they are read."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

DATA = Path(__file__).parent / "data"


def case_folders(kind: str, extra: str | None) -> list[Path]:
    """Folders of ``golden`` or ``formats``; names found here hide those of extra."""
    found: dict[str, Path] = {}
    roots = [Path(extra) / kind] if extra else []
    for root in [*roots, DATA / kind]:
        assert root.is_dir(), f"no test data: {root} is not a folder"
        for folder in sorted(root.iterdir()):
            if (folder / "config.json").exists():
                found[folder.name] = folder
    assert found, f"no test data of kind {kind}"
    return [found[name] for name in sorted(found)]


def read_stored(folder: Path) -> dict[str, mx.array]:
    """Every tensor that the index of ``folder`` names, as it is stored."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, mx.array] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors |= mx.load(str(folder / shard))  # type: ignore[arg-type]
    return tensors


@dataclass(frozen=True)
class Case:
    """A checkpoint folder together with what is expected of it."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def text_config(self) -> dict[str, Any]:
        return self.config["text_config"]

    @cached_property
    def stored(self) -> dict[str, mx.array]:
        return read_stored(self.folder)

    def expected(self, name: str) -> dict[str, mx.array]:
        """The tensors of ``name.safetensors``, such as ``golden_text``."""
        return mx.load(str(self.folder / f"{name}.safetensors"))  # type: ignore

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").exists()
