"""Formats that carry a Kimi K3 but belong to another tool: refused by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ForeignCheckpointError

#: Top-level ``model_type`` of other tools' K3 folders, and what reads them.
FOREIGN_MODEL_TYPES = {
    "kimi_k3_mlx": "the port it was written by (its own kimi_k3_mlx loader)",
    "kimi_k3_uvmax": "the uvmax staging tools (finish the build with them first)",
    "kimi_k3_offload": "the expert-offload runtime that wrote the store",
}

#: Folders beside the shards in which expert-offload runtimes keep experts.
EXPERT_STORES = ("experts", "expert_store", "offload")


def refuse_foreign_files(folder: Path) -> None:
    """Raise ForeignCheckpointError for a folder whose weights are GGUF."""
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not any(folder.glob("*.safetensors")):
        raise ForeignCheckpointError(
            f"{folder} holds {gguf[0].name}: GGUF is the format of llama.cpp; run it "
            "there, or start from the original release or an MLX build."
        )


def expert_store(folder: Path) -> Path | None:
    """The subfolder in which another runtime may keep the experts, if there is one."""
    found = (folder / name for name in EXPERT_STORES)
    return next((path for path in found if path.is_dir() and any(path.iterdir())), None)


def refuse_foreign_config(config: dict[str, Any]) -> None:
    """Raise ForeignCheckpointError if ``config`` belongs to another tool."""
    model_type = str(config.get("model_type", ""))
    if model_type in FOREIGN_MODEL_TYPES:
        raise ForeignCheckpointError(
            f"model_type is {model_type!r}: this folder is for "
            f"{FOREIGN_MODEL_TYPES[model_type]}. Start from the original release or from "
            "an MLX build with model_type 'kimi_k3'."
        )
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        quantization = {}
    for key in ("rotation", "codebook", "fuse_rotations"):
        if quantization.get(key):
            raise ForeignCheckpointError(
                f"this is a turboquant build (quantization.{key} is set); its weights are "
                "rotated codebook indices, not an affine or mxfp4 format. Run it with "
                "turboquant-mlx, or convert again from the original release."
            )
    if config.get("offload") or config.get("expert_store"):
        raise ForeignCheckpointError(
            "this folder keeps its experts in an offload store (config.json sets "
            "offload/expert_store). Use the runtime that wrote it; experts streamed from "
            "disk are not offered here."
        )


def refuse_foreign_tensors(names: Iterable[str]) -> None:
    """Raise ForeignCheckpointError if a tensor name is of a rotated-codebook build."""
    for name in names:
        if name.endswith((".codebook", ".signs")):
            raise ForeignCheckpointError(
                f"{name}: this is a turboquant build; its weights are rotated codebook "
                "indices, not an affine or mxfp4 format. Run it with turboquant-mlx, or "
                "convert again from the original release."
            )
