"""The hidden states of all tokens between two layers: in memory, and safe on disk.

FOLDER/states.json    the state that a restart finds: its layer, files and checksums
FOLDER/prefix-0.bin   residual sums (rows, length, hidden) after that layer, or
FOLDER/prefix-1.bin   those that the next layer is writing
FOLDER/block-NNN.bin  stored residual blocks, which never change once written

Numbers lie in row order in their own type, little-endian. ``states.json`` is replaced by
a rename when all files it names are on the disk, so a run that is killed at any point
leaves one whole state.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..conversion.durable_files import sync
from ..errors import DamagedScratchError, ScratchError
from .row_file import RowFile

FORMAT = 1

MANIFEST = "states.json"

#: The "layer" whose outputs are the embedded tokens.
EMBEDDED = -1


class HiddenStates:
    """Residual sums and stored residual blocks of ``rows`` rows of ``length`` tokens.

    What :meth:`read` gives is the state after layer :attr:`layer` (None before there is
    one), until :meth:`commit` makes that which was written since the state. Everything
    is written to files; it is held in memory too as far as it fits into
    ``memory_limit`` bytes, the residual sums first, and read from disk otherwise.

    Raises ScratchError if the folder cannot be made or holds states already.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        hidden: int,
        dtype: mx.Dtype,
        folder: str | Path,
        memory_limit: int,
    ):
        self._begin((rows, length, hidden), dtype, Path(folder), memory_limit)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScratchError(
                f"{self.folder} cannot be made: {error.strerror}. Name a folder that can "
                "be written."
            ) from error
        if self.exist(folder):
            raise ScratchError(
                f"{self.folder} holds the hidden states of a run already. Go on from "
                "them, or remove them first."
            )

    def _begin(
        self, shape: tuple[int, int, int], dtype: mx.Dtype, folder: Path, limit: int
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.folder = folder
        self.memory_limit = limit
        self.layer: int | None = None
        self._prefix: RowFile | None = None
        self._blocks: list[RowFile] = []
        self._next_prefix: RowFile | None = None
        self._next_block: RowFile | None = None

    @classmethod
    def open(cls, folder: str | Path, memory_limit: int) -> "HiddenStates":
        """The state that was committed last in ``folder``, its files read through.

        Raises DamagedScratchError naming a file that is not as it was written,
        ScratchError if there is no state, or one of another version of the package.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder / MANIFEST)
        rows, length, hidden = manifest["shape"]
        states = cls.__new__(cls)
        dtype = RowFile.dtype_of(manifest["prefix"])
        states._begin((rows, length, hidden), dtype, folder, memory_limit)
        files: list[RowFile] = []
        for entry in (manifest["prefix"], *manifest["blocks"]):
            file = RowFile.from_entry(folder, entry, states.shape)
            if _held_bytes(files) + file.nbytes <= memory_limit:
                file.hold()
            else:
                file.check()
            files.append(file)
        states._prefix, *states._blocks = files
        states.layer = manifest["layer"]
        return states

    @staticmethod
    def exist(folder: str | Path) -> bool:
        """Whether ``folder`` holds a committed state."""
        return (Path(folder) / MANIFEST).is_file()

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def blocks(self) -> int:
        """Stored residual blocks after :attr:`layer`."""
        return len(self._blocks)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is held in memory."""
        return _held_bytes([f for f in (self._prefix, *self._blocks) if f is not None])

    def read(self, start: int, stop: int) -> tuple[mx.array, mx.array | None]:
        """Residual sums (B, T, D) of some rows, and their blocks (N, B, T, D) if any.

        Raises DamagedScratchError if a file is not as it was written.
        """
        if self._prefix is None:
            raise ScratchError(f"{self.folder}: no state is committed yet.")
        prefix = self._prefix.read(start, stop)
        if not self._blocks:
            return prefix, None
        return prefix, mx.stack([block.read(start, stop) for block in self._blocks])

    def write(
        self, start: int, prefix: mx.array, pushed: mx.array | None = None
    ) -> None:
        """The next state of the rows from ``start`` on, (B, T, D).

        ``pushed`` (B, T, D) is the block that the layer stores, if it stores one. Raises
        ScratchError if the disk does not take them; the committed state stays.
        """
        if self._next_prefix is None:
            used = self._prefix is not None and self._prefix.path.name == _PREFIXES[0]
            name = _PREFIXES[1 if used else 0]
            self._next_prefix = self._new_file(name, prefix.dtype, self._blocks)
        if pushed is not None and self._next_block is None:
            others = [*self._blocks, self._next_prefix]
            name = f"block-{self.blocks:03d}.bin"
            self._next_block = self._new_file(name, pushed.dtype, others)
        self._next_prefix.write(start, prefix)
        if pushed is not None and self._next_block is not None:
            self._next_block.write(start, pushed)
        if self._prefix is not None:
            self._prefix.forget(start, start + len(prefix))

    def commit(self, layer: int) -> None:
        """Make what was written the state after ``layer``, for a restart too.

        Raises ScratchError if the disk does not take it or rows are missing; the state
        before stays.
        """
        fresh = [f for f in (self._next_prefix, self._next_block) if f is not None]
        if not fresh or not all(file.written.all() for file in fresh):
            raise ScratchError(
                f"{self.folder}: rows of the state after layer {layer} were not written."
            )
        for file in fresh:
            file.finish()
        prefix, *pushed = fresh
        blocks = [*self._blocks, *pushed]
        self._write_manifest(layer, prefix, blocks)
        self._prefix, self._blocks, self.layer = prefix, blocks, layer
        self._next_prefix = self._next_block = None

    def remove(self) -> None:
        """Delete the files; first the one without which no state is found."""
        files = [self.folder / MANIFEST]
        files += [self.folder / name for name in _PREFIXES]
        files += self.folder.glob("block-???.bin")
        for path in files:
            path.unlink(missing_ok=True)

    def _new_file(self, name: str, dtype: mx.Dtype, others: list[RowFile]) -> RowFile:
        """A file that is held in memory if it fits there beside ``others``."""
        rows, *row_shape = self.shape
        file = RowFile(self.folder / name, rows, tuple(row_shape), dtype)
        file.held = _held_bytes(others) + file.nbytes <= self.memory_limit
        return file

    def _write_manifest(
        self, layer: int, prefix: RowFile, blocks: list[RowFile]
    ) -> None:
        content: dict[str, Any] = {
            "format": FORMAT,
            "layer": layer,
            "shape": list(self.shape),
            "prefix": prefix.entry(),
            "blocks": [block.entry() for block in blocks],
        }
        content["digest"] = _digest(content)
        path = self.folder / MANIFEST
        temporary = path.with_suffix(".partial")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(self.folder)
        except OSError as error:
            raise ScratchError(
                f"{path} cannot be written: {error.strerror}. What was committed before "
                "is whole: make room, then start again to go on from there."
            ) from error


_PREFIXES = ("prefix-0.bin", "prefix-1.bin")


def _held_bytes(files: list[RowFile]) -> int:
    return sum(file.nbytes for file in files if file.held)


def _digest(content: dict[str, Any]) -> str:
    known = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScratchError(f"{path.parent} holds no hidden states of a run.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path) from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(content, dict) or content.get("digest") != _digest(content):
        raise _damaged(path)
    if content["format"] != FORMAT:
        raise ScratchError(
            f"{path} has format {content['format']}, wanted {FORMAT}: another version of "
            "this package wrote it. Use that one, or start over."
        )
    return content


def _damaged(path: Path) -> DamagedScratchError:
    return DamagedScratchError(
        f"{path} is not as it was written. Discard the partial results and start over."
    )
