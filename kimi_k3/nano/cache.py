"""The demo's two small checkpoints, kept in a cache folder and made again when stale.

CACHE/nano-demo/nano            the small K3 in the source format, with tokenizer
CACHE/nano-demo/nano-two-bank   a pruned copy with two banks of experts
CACHE/nano-demo/stamp.json      what made them, and a checksum of every file
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from .. import __version__
from ..config import ModelArgs
from ..errors import KimiK3Error
from ..tokenizer.files import VOCAB_FILE, read_ranks
from .config import CONTROL_TOKENS, NANO_CONFIG
from .random_checkpoint import write_json, write_random_checkpoint
from .tokenizer_files import write_tokenizer
from .two_bank_copy import uneven_banks, write_two_bank_copy

SEED = 0

_FOLDER, _PLAIN, _TWO_BANK, _STAMP = "nano-demo", "nano", "nano-two-bank", "stamp.json"


@dataclass(frozen=True)
class DemoFolders:
    """Where the checkpoints lie; ``made`` says that this call wrote them."""

    plain: Path
    two_bank: Path
    made: bool


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """``kimi-k3-mlx`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` if unset."""
    base = environment.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "kimi-k3-mlx"


def write_nano(folder: str | Path) -> Path:
    """Write the small K3 with random weights and its tokenizer into ``folder``.

    Greedy decoding picks neither control ids nor tokens that are no printable text:
    random weights give an end id no meaning, and half a character shows nothing.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab_size=NANO_CONFIG["text_config"]["vocab_size"])
    ranks = read_ranks(folder / VOCAB_FILE)
    silent = [rank for token, rank in ranks.items() if not _is_printable(token)]
    silent.extend(CONTROL_TOKENS)
    return write_random_checkpoint(folder, NANO_CONFIG, seed=SEED, silent=silent)


def _is_printable(token: bytes) -> bool:
    try:
        return token.decode().isprintable()
    except UnicodeDecodeError:
        return False


def demo_folders(cache_dir: str | Path) -> DemoFolders:
    """The demo's checkpoints in ``cache_dir``, written unless they are there and whole.

    Both appear at once, by a rename. Raises KimiK3Error if something else has the name
    or the folder cannot be written.
    """
    cache_dir = Path(cache_dir)
    target = cache_dir / _FOLDER
    recipe = _recipe()
    fresh = _is_fresh(target, recipe)
    if not fresh:
        _refuse_foreign(target)
        building = _temporary_folder(cache_dir)
        try:
            _build(building, recipe)
            shutil.rmtree(target, ignore_errors=True)
            building.replace(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return DemoFolders(target / _PLAIN, target / _TWO_BANK, made=not fresh)


def _build(folder: Path, recipe: str) -> None:
    plain = write_nano(folder / _PLAIN)
    keep, high = uneven_banks(ModelArgs.from_dict(NANO_CONFIG).text_config)
    write_two_bank_copy(plain, folder / _TWO_BANK, keep=keep, high=high)
    write_json(folder / _STAMP, {"recipe": recipe, "files": _checksums(folder)})


def _temporary_folder(cache_dir: Path) -> Path:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f".{_FOLDER}-", dir=cache_dir))
    except OSError as error:
        raise KimiK3Error(
            f"{cache_dir} cannot hold the demo's checkpoints ({error.strerror}); name a "
            "folder that can be written with --cache-dir."
        ) from error


def _is_fresh(folder: Path, recipe: str) -> bool:
    try:
        stamp: dict[str, Any] = json.loads((folder / _STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return stamp == {"recipe": recipe, "files": _checksums(folder)}


def _checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _STAMP
    }


def _recipe() -> str:
    """Changes with the version and with the code that writes the checkpoints."""
    package = Path(__file__).parent.parent
    code = hashlib.sha256(__version__.encode())
    for path in sorted([*package.glob("nano/*.py"), *package.glob("checkpoint/*.py")]):
        code.update(path.read_bytes())
    code.update(json.dumps(NANO_CONFIG, sort_keys=True).encode())
    return code.hexdigest()


def _refuse_foreign(target: Path) -> None:
    ours = {_PLAIN, _TWO_BANK, _STAMP}
    if target.exists() and not {path.name for path in target.iterdir()} <= ours:
        raise KimiK3Error(
            f"{target} holds files that the demo did not make; move it away, or name "
            "another cache folder."
        )
