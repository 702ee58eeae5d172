"""NumPy archives that know when they are damaged: a kind, a version and a digest.

A sealed archive is a plain ``.npz``, so that ``numpy.load`` reads it too. It is written
whole or not at all, the same content always gives the same bytes, and nothing in it is
ever unpickled.
"""

import hashlib
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..conversion.durable_files import rename_durably, unfinished_path
from ..errors import KimiK3Error

Arrays = dict[str, np.ndarray]

KIND, VERSION, DIGEST = "kind", "version", "digest"

#: The oldest date that a zip archive can hold: the time of writing is no content.
NO_DATE = (1980, 1, 1, 0, 0, 0)

#: What ``zipfile`` and ``numpy.lib.format`` raise on bytes that are not theirs.
_UNREADABLE = (
    zipfile.BadZipFile,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
)


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256, as hex, over names, types, shapes and values, in order of the names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def write_sealed(
    path: str | Path, kind: str, version: int, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write ``arrays`` to ``path``, durably: at no time does part of a file lie there."""
    path = Path(path)
    content = {KIND: np.array(kind), VERSION: np.array(version), **arrays}
    content[DIGEST] = np.array(digest_of(content))
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in content.items():
                    entry = zipfile.ZipInfo(f"{name}.npy", NO_DATE)
                    with archive.open(entry, "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_sealed(
    path: str | Path, kind: str, version: int, error: type[KimiK3Error], remedy: str
) -> Arrays:
    """The arrays of :func:`write_sealed`, without kind, version and digest.

    Args:
        error: class of what is raised for a file that is absent, of another kind or
            version, or damaged.
        remedy: what to do then; the last sentence of the error.
    """
    path = Path(path)
    if not path.is_file():
        raise error(f"{path} is not there; {kind} was expected. {remedy}")
    try:
        arrays = _read(path)
    except PermissionError:
        raise
    except _UNREADABLE as problem:
        raise error(
            f"{path} is damaged, or not {kind}: {problem or type(problem).__name__}. "
            f"{remedy}"
        ) from problem
    found = arrays.pop(KIND, None)
    if found is None or str(found) != kind:
        raise error(
            f"{path} holds {'something else' if found is None else found}, "
            f"wanted {kind}. {remedy}"
        )
    stated = arrays.pop(VERSION, None)
    if stated is None or str(stated) != str(version):
        raise error(
            f"{path} is {kind} of format version {stated}; this version of kimi-k3-mlx "
            f"reads version {version}. {remedy}"
        )
    seal = str(arrays.pop(DIGEST, None))
    computed = digest_of({KIND: np.array(kind), VERSION: np.array(version), **arrays})
    if seal != computed:
        raise error(
            f"{path} was changed after it was written: its digest is {seal[:12]}, that of "
            f"its content {computed[:12]}. {remedy}"
        )
    return arrays


def _read(path: Path) -> dict[str, Any]:
    # Checksums first: a damaged header could ask for any amount of memory.
    with zipfile.ZipFile(path) as archive:
        if broken := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum of {broken}")
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
