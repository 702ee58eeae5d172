"""Conditions: everything that the bits of final hidden states depend on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ..build.differences import differences

FLOAT32, STORED = "float32", "stored"

_WORDS = {
    "checkpoint": "the checkpoint's fingerprint",
    "values": "the hash of some of the checkpoint's values",
    "samples": "the samples' fingerprint",
    "tokenizer": "the tokenizer's fingerprint",
    "dtype": "the type that is computed in",
    "rows_per_step": "rows a step",
    "tool": "kimi-k3-mlx",
    "mlx": "mlx",
    "device": "the device",
}

#: What may differ between a teacher and a build, though their roundings differ then.
_ROUNDINGS = ("tool", "mlx", "device")


@dataclass(frozen=True)
class Conditions:
    """What the bits of final states depend on.

    Attributes:
        checkpoint: fingerprint of the folder: names, shapes and types.
        values: hash of some stored values of it.
        samples: fingerprint of the tokens.
        tokenizer: fingerprint of the checkpoint's vocabulary and control tokens.
        dtype: "float32", or "stored" for what the checkpoint computes in.
        rows_per_step: rows that go through a layer together.
        tool, mlx, device: what computes, and its versions.
    """

    checkpoint: str
    values: str
    samples: str
    tokenizer: str
    dtype: str
    rows_per_step: int
    tool: str
    mlx: str
    device: str

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What ``asdict`` gave; TypeError or KeyError for other keys."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})

    def differences(self, other: "Conditions") -> list[str]:
        """In words, what of ``other`` is not as here."""
        return differences(_WORDS, asdict(self), asdict(other))

    def other_roundings(self, other: "Conditions") -> list[str]:
        """In words, what makes the same model give other last bits under ``other``."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{_WORDS[name]}: {mine[name]!r} and {theirs[name]!r}"
            for name in _ROUNDINGS
            if mine[name] != theirs[name]
        ]
