"""What a conversion keeps while it runs, so that no shard is written twice.

OUT/conversion.partial/journal.json    what the bytes of the build depend on, and the
                                       shards that are finished
OUT/conversion.partial/lock            the lock of the process that converts

A shard counts as finished when the journal says so; by then it is durable under its own
name. The folder goes when ``config.json``, the last file, is there.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..build.differences import differences
from ..build.folder_lock import LOCK, locked_folder
from ..errors import ConversionError
from .durable_files import sweep_unfinished, write_durably
from .provenance import ShardRecord

PARTIAL, JOURNAL = "conversion.partial", "journal.json"

#: Of the journal: another version does not go on from it.
FORMAT = 1

_DIGEST = re.compile("[0-9a-f]{32,}")

#: What file managers leave in folders, and nobody means to keep.
_IGNORED = (".DS_Store",)

_WORDS = {
    "source": "the source's fingerprint",
    "plan": "the plan (--plan)",
    "moments": "the moments (--moments)",
    "tool": "kimi-k3-mlx",
    "mlx": "mlx",
    "device": "the device",
    "format": "the format of the journal",
}


@dataclass(frozen=True)
class Conditions:
    """Everything that the bytes of the shards depend on.

    Attributes:
        source: fingerprint of the checkpoint.
        plan: digest of what the plan does.
        moments: digest of what weighs quantisation errors; empty if nothing does.
        tool, mlx: versions.
        device: what quantises; empty if nothing is.
        format: of the journal.
    """

    source: str
    plan: str
    moments: str
    tool: str
    mlx: str
    device: str
    format: int = FORMAT

    def differences(self, now: "Conditions") -> list[str]:
        """In words, what of ``now`` is not as here."""
        return differences(_WORDS, asdict(self), asdict(now), _short)


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is written: what it is, and its source files' times of change (ns)."""

    record: ShardRecord
    stamps: Mapping[str, int]


@dataclass
class ConversionJournal:
    """The journal of one conversion in the folder ``out``, which is locked.

    Attributes:
        finished: file of the build → what is safe on disk.
        hashes: file of the source → SHA-256 of all of it, as far as computed, and the
            file's time of change.
    """

    out: Path
    conditions: Conditions
    finished: dict[str, FinishedShard] = field(default_factory=dict)
    hashes: dict[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, out: Path) -> "ConversionJournal | None":
        """What was begun in ``out``; None if nothing was.

        Raises ConversionError for a damaged journal.
        """
        path = _path(out)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if content.pop("digest") != _digest(content):
                raise ValueError("its digest is not that of its content")
            found = content["conditions"]
            blank = dict.fromkeys(_WORDS, "") | {"format": 0}
            known = {name: found.get(name, blank[name]) for name in _WORDS}
            return cls(
                out,
                Conditions(**known),
                {
                    file: FinishedShard(
                        ShardRecord.from_dict(shard["record"]), shard["stamps"]
                    )
                    for file, shard in content["finished"].items()
                },
                {file: tuple(found) for file, found in content["hashes"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(
                f"{path} is damaged: {error or type(error).__name__}. Take it from a copy, "
                f"or delete {out} and convert again."
            ) from error

    def write(self) -> None:
        """Make the journal durable as it is now."""
        content = {
            "conditions": asdict(self.conditions),
            "finished": {
                file: {"record": shard.record.to_dict(), "stamps": dict(shard.stamps)}
                for file, shard in self.finished.items()
            },
            "hashes": {file: list(found) for file, found in self.hashes.items()},
        }
        document = content | {"digest": _digest(content)}
        write_durably(_path(self.out), (json.dumps(document, indent=1) + "\n").encode())

    def check(self, now: Conditions) -> None:
        """Raise ConversionError if the conversion was begun otherwise than ``now``."""
        differences = self.conditions.differences(now)
        if not differences:
            return
        remedy = "Go on as it was begun, or name another folder."
        if self.conditions.source != now.source:
            remedy = (
                "This is another source, or its config or shards were exchanged since: "
                "nothing of it can be kept. Delete the folder, or name another, and "
                "convert from the beginning."
            )
        raise ConversionError(
            f"{self.out} holds a conversion that was begun otherwise: "
            f"{'; '.join(differences)}. {remedy}"
        )

    def is_finished(self, file: str, stamps: Mapping[str, int]) -> bool:
        """Whether ``file`` is written, from what its source files are now.

        Raises ConversionError if what lies there is not what was written.
        """
        shard = self.finished.get(file)
        if shard is None or dict(shard.stamps) != dict(stamps):
            return False
        path = self.out / file
        if not path.is_file():
            raise ConversionError(
                f"{path} was finished and is not there any more. Put it back, or delete "
                f"{self.out} and convert again."
            )
        found = ShardRecord.of(path)
        if not found.is_like(shard.record):
            raise ConversionError(
                f"{path} is not as it was written: {found.size} bytes, header "
                f"{found.header_sha256[:12]}; written were {shard.record.size} bytes, "
                f"header {shard.record.header_sha256[:12]}. Delete {self.out} and convert "
                "again."
            )
        return True

    def close(self) -> None:
        """Delete what only an unfinished conversion needs."""
        _path(self.out).unlink(missing_ok=True)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """``out`` is this process's alone until the block ends, or the process does.

    Raises ConversionError if another process has it, or it cannot be written. Where
    nothing was begun by the end, nothing is left.
    """
    try:
        _make(out)
        with locked_folder(out, PARTIAL, "converted", ConversionError):
            if _path(out).exists():
                sweep_unfinished(out)
            sweep_unfinished(out / PARTIAL)
            yield
    finally:
        with suppress(OSError):  # unless it holds something
            out.rmdir()


def other_files(out: Path) -> list[str]:
    """What lies in the locked folder ``out`` besides the lock and the journal."""
    found = {path.name for path in out.iterdir()} - {PARTIAL, *_IGNORED}
    inside = {path.name for path in (out / PARTIAL).iterdir()} - {LOCK, JOURNAL}
    return sorted(found | {f"{PARTIAL}/{name}" for name in inside})


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(
            f"{out} cannot be written: {error.strerror}. Name a folder that can be."
        ) from error


def _short(value: object) -> str:
    """``value`` to read: of a digest what tells it from another."""
    text = str(value)
    return repr(text[:12] if _DIGEST.fullmatch(text) else text) if value else "none"


def _path(out: Path) -> Path:
    return out / PARTIAL / JOURNAL


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
