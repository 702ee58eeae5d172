"""A build that is finished and met again with ``resume``: looked at, and completed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..checkpoint.folder import CONFIG, read_config
from ..errors import ConversionError
from ..planning.expert_plan import ExpertPlan
from .conversion_journal import Conditions
from .file_hashes import FileHashes, check_hub_hash
from .provenance import Provenance, ShardRecord
from .small_files import SmallFiles
from .source_files import SourceFiles


def finished_record(
    out: Path, plan: ExpertPlan | None, now: Conditions
) -> Provenance | None:
    """The record of this very conversion in ``out``; None if none is finished there.

    Raises ConversionError for another conversion, or shards that are not as written.
    """
    if not (out / CONFIG).is_file():
        return None
    record = Provenance.of_config(read_config(out))
    if record is None:
        return None
    then = replace(
        now,
        source=record.fingerprint,
        moments=record.moments or "",
        plan=record.plan.digest if record.plan else "",
    )
    now = replace(now, plan=plan.digest if plan else "")
    if differences := then.differences(now):
        raise ConversionError(
            f"{out} holds another conversion, which is finished: "
            f"{'; '.join(differences)}. Name another folder."
        )
    for file, shard in record.shards.items():
        path = out / file
        if not path.is_file() or not ShardRecord.of(path).is_like(shard):
            raise ConversionError(
                f"{path} is not as it was written. Delete {out} and convert again."
            )
    return record


def complete(
    out: Path, files: SmallFiles, record: Provenance, tell: Callable[[str], None]
) -> None:
    """Write again what is missing beside the shards of ``out``, or was changed."""
    try:
        written = files.write(out, record)
    except OSError as error:
        raise ConversionError(
            f"{error.filename or out} cannot be written: {error.strerror}. The shards are "
            "finished: make room, then go on with --resume."
        ) from error
    done = f"{out} holds this conversion, finished; "
    if written:
        tell(f"{done}missing or changed were, and are written again: {_list(written)}.")
    else:
        tell(f"{done}there is nothing to do.")


def with_source_hashes(
    record: Provenance, source: SourceFiles, show: Callable[[FileHashes, str], None]
) -> Provenance:
    """``record`` with the SHA-256 of every source file, computed where it lacks.

    Raises CheckpointError for a file of which the hub recorded another.
    """
    paths = {name: header.path for name, header in source.folder.headers.items()}
    lacking = [
        name
        for name, shard in record.source.items()
        if name in paths and not shard.sha256
    ]
    with FileHashes(paths[name] for name in lacking) as hashes:
        found = hashes.take(wait=partial(show, hashes, "the source"))
    for name, value in found.items():
        check_hub_hash(paths[name], value)
    hashed = {
        name: replace(shard, sha256=found.get(name, shard.sha256))
        for name, shard in record.source.items()
    }
    return replace(record, source=hashed)


def _list(names: list[str]) -> str:
    return ", ".join(names)
