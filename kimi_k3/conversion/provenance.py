"""Where a build came from: the record that a conversion leaves in ``config.json``.

It says what was done (the plan, which source experts were kept), with which versions,
from which files, and what was written: enough to prove the build against its source, and
to see that a shard is not the one that was written.
"""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..checkpoint.headers import LONGEST_HEADER
from ..errors import ConversionError, PlanError
from ..planning.expert_plan import ExpertPlan, layer_number

#: The key of ``config.json``.
RECORD = "conversion"

KIND, VERSION = "a conversion by kimi-k3-mlx", 1

_HASHES = ("header_sha256", "hub_sha256", "sha256")
_SHA256 = re.compile(r"[0-9a-f]{64}")

#: A list of numbers over several lines; no JSON string holds a line break.
_NUMBERS = re.compile(r"\[\n\s+((?:-?[\d.]+,\n\s+)*-?[\d.]+)\n\s+\]")

_LENGTH = struct.Struct("<Q")
_BEGINS = "the record of the conversion in config.json"
_REMEDY = "Convert again from the source."


@dataclass(frozen=True)
class ShardRecord:
    """One safetensors file, as it was seen.

    Attributes:
        size: in bytes.
        header_sha256: SHA-256, as hex, of all that lies before the data: the header's
            length and the header.
        hub_sha256: of the whole file, as the Hugging Face hub recorded it when it was
            downloaded; None where no record lies beside the file.
        sha256: of the whole file, computed from its bytes: of what a conversion wrote,
            always; of its source, if that was asked for; else None.

    Raises ConversionError for values that can be none of a file.
    """

    size: int
    header_sha256: str
    hub_sha256: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size <= 0:
            raise ConversionError(f"a shard's size is {self.size!r} bytes. {_REMEDY}")
        for name in _HASHES:
            value = getattr(self, name)
            absent = value is None and name != "header_sha256"
            if not absent and not (isinstance(value, str) and _SHA256.fullmatch(value)):
                raise ConversionError(
                    f"a shard's {name} is {value!r}; wanted 64 hexadecimal digits. "
                    f"{_REMEDY}"
                )

    @classmethod
    def of(cls, path: Path) -> Self:
        """The record of the file ``path``, and what the hub says of it."""
        try:
            return cls(
                path.stat().st_size, header_sha256(path), hub_sha256=hub_sha256(path)
            )
        except OSError as error:
            raise ConversionError(
                f"{path} cannot be read: {error.strerror}."
            ) from error

    def is_like(self, other: "ShardRecord") -> bool:
        """Whether size and header are the same; of the data nothing is said."""
        mine, theirs = self.header_sha256, other.header_sha256
        return (self.size, mine) == (other.size, theirs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; hashes that are not known are left out."""
        hashes = {name: getattr(self, name) for name in _HASHES}
        return {"size": self.size} | {k: v for k, v in hashes.items() if v is not None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gives; raises TypeError for other keys."""
        return cls(**content)


@dataclass(frozen=True)
class Provenance:
    """The record of one conversion.

    Attributes:
        tool: versions by name: ``kimi-k3-mlx``, ``mlx``.
        plan: what was kept and how; None for a conversion without one, which keeps
            everything as it is.
        kept: MoE layer → source expert of each expert of the build.
        fingerprint: of the source
            (:attr:`~kimi_k3.build.layer_stream.LayerStream.fingerprint`).
        source: file of the source → what it was.
        shards: file of the build → what was written.
        moments: digest of the recorded input moments that weighed quantisation errors;
            None if errors were not weighed.

    Raises ConversionError for values that no conversion writes, and where plan, kept
    experts and source contradict each other.
    """

    tool: Mapping[str, str]
    plan: ExpertPlan | None
    kept: Mapping[int, tuple[int, ...]]
    fingerprint: str
    source: Mapping[str, ShardRecord]
    shards: Mapping[str, ShardRecord]
    moments: str | None = None

    def __post_init__(self) -> None:
        for name in ("kept", "source", "shards"):
            if not getattr(self, name):
                raise ConversionError(f"{_BEGINS} names no {name}. {_REMEDY}")
        if not self.tool or not all(map(_is_text, [*self.tool, *self.tool.values()])):
            raise ConversionError(
                f"{_BEGINS} has tool = {self.tool!r:.80}; wanted versions by name. "
                f"{_REMEDY}"
            )
        if not _is_text(self.fingerprint):
            raise ConversionError(
                f"{_BEGINS} has {self.fingerprint!r:.80} for the source's fingerprint; "
                f"wanted text. {_REMEDY}"
            )
        if self.moments is not None and not (
            _is_text(self.moments) and _SHA256.fullmatch(self.moments)
        ):
            raise ConversionError(
                f"{_BEGINS} has moments = {self.moments!r:.80}; wanted 64 hexadecimal "
                f"digits, or null where errors were not weighed. {_REMEDY}"
            )
        if self.plan is None:
            return
        planned_for = self.plan.source.get("fingerprint")
        if planned_for not in (None, self.fingerprint):
            raise ConversionError(
                f"{_BEGINS}: its plan is for the source {planned_for!r:.80}, but it is of "
                f"{self.fingerprint!r:.80}. {_REMEDY}"
            )
        for layer in sorted(self.plan.layers.keys() | self.kept.keys()):
            planned, kept = self.plan.order(layer), self.kept.get(layer, ())
            if planned != kept:
                raise ConversionError(
                    f"{_BEGINS}: layer {layer} keeps {_few(kept)}, but its plan says "
                    f"{_few(planned)}. {_REMEDY}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": KIND,
            "version": VERSION,
            "tool": dict(self.tool),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "kept": {str(layer): list(kept) for layer, kept in self.kept.items()},
            "moments": self.moments,
            "source": {
                "fingerprint": self.fingerprint,
                "shards": {n: shard.to_dict() for n, shard in self.source.items()},
            },
            "shards": {n: shard.to_dict() for n, shard in self.shards.items()},
        }

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """Read what :meth:`to_dict` gives; raises ConversionError naming what is wrong."""
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ConversionError(f"{_BEGINS} is not that of {KIND}. {_REMEDY}")
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            raise ConversionError(
                f"{_BEGINS} is of format version {version!r:.60}; this version "
                f"of kimi-k3-mlx reads version {VERSION}. {_REMEDY}"
            )
        try:
            plan, source = content["plan"], content["source"]
            return cls(
                tool=dict(content["tool"].items()),
                plan=None if plan is None else ExpertPlan.from_dict(plan),
                kept={
                    layer_number(layer): tuple(_number(expert) for expert in kept)
                    for layer, kept in content["kept"].items()
                },
                fingerprint=source["fingerprint"],
                source=_shards(source["shards"]),
                shards=_shards(content["shards"]),
                moments=content["moments"],
            )
        except ConversionError:
            raise
        except PlanError as error:
            raise ConversionError(f"{_BEGINS}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConversionError(
                f"{_BEGINS} is not whole: {type(error).__name__}: {error}. {_REMEDY}"
            ) from error

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self | None:
        """The record in a build's ``config``; None if there is none."""
        return cls.from_dict(config[RECORD]) if RECORD in config else None


def header_sha256(path: Path) -> str:
    """SHA-256, as hex, of the safetensors file ``path`` up to its data.

    Raises OSError if it cannot be read, ConversionError if it is no safetensors file.
    """
    with path.open("rb") as file:
        first = file.read(_LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if not 0 < length <= LONGEST_HEADER:
            raise ConversionError(f"{path} is not a safetensors file. {_REMEDY}")
        return hashlib.sha256(first + file.read(length)).hexdigest()


def hub_sha256(path: Path) -> str | None:
    """The SHA-256 that the hub recorded for the downloaded file ``path``, if any.

    ``hf download --local-dir`` notes it under ``.cache/huggingface/download`` beside the
    file, on the second line; in the hub's cache a file is a link to a blob of that name.
    Source: huggingface_hub's local folder and cache layouts.
    """
    if path.is_symlink() and (found := path.resolve()).parent.name == "blobs":
        return found.name if _SHA256.fullmatch(found.name) else None
    noted = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
    try:
        lines = noted.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return None
    etag = lines[1].strip().strip('"') if len(lines) > 1 else ""
    return etag if _SHA256.fullmatch(etag) else None


def config_text(config: Mapping[str, Any]) -> str:
    """``config.json`` for people too: an entry a line, numbers of a list on one."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    return _NUMBERS.sub(lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def _shards(content: Mapping[str, Any]) -> dict[str, ShardRecord]:
    return {str(n): ShardRecord.from_dict(shard) for n, shard in content.items()}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _few(experts: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, experts[:6])) or "no experts"
    return f"{shown}, …" if len(experts) > 6 else shown
