"""The quantisation block of a ``config.json``: how it says that tensors are stored."""

import warnings
from typing import Any

from ..errors import ConfigError, UnknownKeyWarning
from .checks import SOURCE, require_object, shown

#: Bits and group sizes that MLX has in each mode.
MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}

#: What the block may hold beside one entry a module.
_KNOWN = ("bits", "group_size", "mode", "quant_method")

#: ``quant_method`` and ``format`` of the source's block.
_SOURCE_METHODS = ("compressed-tensors", "mxfp4")
_SOURCE_FORMAT = "mxfp4-pack-quantized"


def stored_quantization(params: dict[str, Any]) -> dict[str, Any] | None:
    """The MLX quantisation block of a whole config, or None.

    ``quantization`` wins over ``quantization_config`` (top level, then
    ``text_config``), as in mlx-lm. A compressed-tensors block is translated; formats
    other than ``mxfp4-pack-quantized`` are refused, since their bytes mean something
    else. None also for a block that only ``text_config.quantization`` holds: no host
    reads it there, and the tensors tell as much.
    """
    if (block := params.get("quantization")) is not None:
        return _checked(block)
    block = params.get("quantization_config")
    if block is None:
        text = params.get("text_config")
        block = text.get("quantization_config") if isinstance(text, dict) else None
    if block is None:
        return None
    block = require_object(block, "quantization_config")
    found = block.get("format")
    if found is None and "bits" in block and "quant_method" not in block:
        raise ConfigError(
            "config.json has MLX's widths only under quantization_config, which mlx-lm "
            "does not read as such. Copy that block to the top level as 'quantization'."
        )
    method = block.get("quant_method")
    if method not in _SOURCE_METHODS or found not in (
        (_SOURCE_FORMAT,) if method == "compressed-tensors" else (_SOURCE_FORMAT, None)
    ):
        raise ConfigError(
            f"quantization_config.format is {shown(found)} (quant_method "
            f"{shown(method)}); Kimi K3 checkpoints store experts as "
            f"'{_SOURCE_FORMAT}' (quant_method 'compressed-tensors'). Convert from the "
            "original release instead."
        )
    return {"group_size": 32, "bits": 4, "mode": "mxfp4"}


def _checked(block: Any) -> dict[str, Any]:
    """``block`` if its width and those of its entries are ones; else ConfigError."""
    where = "config.json's quantization"
    block = require_object(block, where)
    _check_width(block, where)
    unknown = []
    for path, entry in block.items():
        if isinstance(entry, dict):
            _check_width(entry, f"{where} entry {path}")
        elif path not in _KNOWN and not isinstance(entry, bool):
            unknown.append(path)
    if unknown:
        warnings.warn(
            f"config.json sets quantization.{', quantization.'.join(sorted(unknown))}, "
            "which kimi-k3-mlx does not know and ignores.",
            UnknownKeyWarning,
            stacklevel=4,
        )
    return block


def _check_width(entry: dict[str, Any], where: str) -> None:
    for key in ("bits", "group_size"):
        value = entry.get(key)
        if value is None:
            raise ConfigError(f"{where} lacks {key}. {SOURCE}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{where}: {key} is {shown(value)}; wanted a whole number. {SOURCE}"
            )
    mode = entry.get("mode", "affine")
    if mode not in MODES:
        raise ConfigError(
            f"{where}: mode is {shown(mode)}; MLX has {', '.join(MODES)}. {SOURCE}"
        )
    for key, allowed in zip(("bits", "group_size"), MODES[mode], strict=True):
        if entry[key] not in allowed:
            raise ConfigError(
                f"{where}: {key} is {entry[key]}, which mode {mode} does not have; it "
                f"has {', '.join(map(str, allowed))}. {SOURCE}"
            )
