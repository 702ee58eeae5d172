"""Files that are whole or not there: a temporary name, fsync, rename."""

import os
from pathlib import Path

#: What a file is called until it is whole: hidden, and matched by nobody's pattern.
_UNFINISHED = ".{}.unfinished"


def unfinished_path(path: Path) -> Path:
    """Where the file that becomes ``path`` is written."""
    return path.with_name(_UNFINISHED.format(path.name))


def write_durably(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; at no time does part of it lie there."""
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def rename_durably(unfinished: Path, path: Path) -> None:
    """Give a synced file its name, so that it has it after a power cut too."""
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names of the files in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_unfinished(folder: Path) -> None:
    """Delete what a killed process had begun to write in ``folder``."""
    for path in folder.glob(_UNFINISHED.format("*")):
        path.unlink()
