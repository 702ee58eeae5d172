"""Whether every byte of a build's shards is the one that was written.

Header and size of a shard of another conversion may be the same, where only the numbers
differ: of the same plan with other moments, or of a source of the same shapes.
"""

from collections.abc import Callable, Iterator

from ..conversion.file_hashes import FileHashes, hashing_threads
from ..errors import CheckpointError
from .verify_record import RecordedBuild
from .verify_report import Check, Finding


def check_hashes(
    build: RecordedBuild, tell: Callable[[int, int], None]
) -> Iterator[Check | Finding]:
    """SHA-256 of every shard against the record, where that has them.

    Shards that are missing or of another size are told of elsewhere, and not read.
    """
    record = build.record.shards
    recorded = {name: shard for name, shard in record.items() if shard.sha256}
    if not recorded:
        yield Finding(
            "hashes: not recorded. The conversion noted no SHA-256 of the shards, so one "
            "of another conversion of the same plan may go unseen without the source.",
            note=True,
        )
        return
    for name in sorted(record.keys() - recorded.keys()):
        yield Finding(
            f"the record has no SHA-256 of {name}, but one of other shards. Convert again."
        )
    headers = build.folder.headers
    whole = [
        name
        for name, shard in recorded.items()
        if name in headers and headers[name].nbytes == shard.size
    ]
    looked = 0
    try:
        for name, found in _hashes(build, whole, tell).items():
            looked += 1
            if found != recorded[name].sha256:
                yield Finding(
                    f"{name} does not have its recorded SHA-256: it is of another "
                    "conversion, or was changed. Convert again, or take config.json and "
                    "shards from one build."
                )
    except CheckpointError as error:
        yield Finding(str(error))
    yield Check("hashes", looked, "shards with the recorded SHA-256", len(record))


def _hashes(
    build: RecordedBuild, names: list[str], tell: Callable[[int, int], None]
) -> dict[str, str]:
    paths = [build.folder.headers[name].path for name in names]
    with FileHashes(paths, hashing_threads()) as hashes:
        found = hashes.take(wait=lambda: tell(hashes.nbytes, hashes.nbytes_all))
        if found:
            tell(hashes.nbytes, hashes.nbytes_all)
    return found
