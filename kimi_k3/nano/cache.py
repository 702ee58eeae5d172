"""A pruned copy of the nano for the demo, kept in a cache and made again when stale.

CACHE/nano-demo/nano-two-bank   the nano with fewer experts, in two banks
CACHE/nano-demo/stamp.json      what made it, and a checksum of every file
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
from ..conversion.convert import convert
from ..errors import KimiK3Error
from . import NANO_FOLDER
from .random_checkpoint import write_json

_FOLDER, _TWO_BANK, _STAMP = "nano-demo", "nano-two-bank", "stamp.json"

#: Made from what the nano does with text of its five domains, in the repository's root:
#: kimi-k3 calibrate kimi_k3/nano/checkpoint --samples benchmarks/nano/mix.toml --out CAL
#: kimi-k3 plan CAL --source kimi_k3/nano/checkpoint --memory 0.0022 --bits 8 --out PLAN
DEMO_PLAN = Path(__file__).parent / "demo-plan.json"

#: What earlier demos kept there as well.
_FORMER = ("nano",)


@dataclass(frozen=True)
class DemoFolders:
    """Where the nano and its copy lie; ``made`` says that this call wrote the copy."""

    plain: Path
    two_bank: Path
    made: bool


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """``kimi-k3-mlx`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` if unset."""
    base = environment.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "kimi-k3-mlx"


def demo_folders(cache_dir: str | Path) -> DemoFolders:
    """The shipped nano and its copy in ``cache_dir``, written unless it is whole.

    The copy appears by a rename. Raises KimiK3Error if something else has the name or
    the folder cannot be written.
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
    return DemoFolders(NANO_FOLDER, target / _TWO_BANK, made=not fresh)


def _build(folder: Path, recipe: str) -> None:
    convert(NANO_FOLDER, folder / _TWO_BANK, DEMO_PLAN)
    write_json(folder / _STAMP, {"recipe": recipe, "files": _checksums(folder)})


def _temporary_folder(cache_dir: Path) -> Path:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f".{_FOLDER}-", dir=cache_dir))
    except OSError as error:
        raise KimiK3Error(
            f"{cache_dir} cannot hold the demo's checkpoint ({error.strerror}); name a "
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
    """Changes with the version, the nano, the plan and the code that writes the copy."""
    package = Path(__file__).parent.parent
    code = hashlib.sha256(__version__.encode())
    rooms = ("nano", "checkpoint", "planning", "conversion")
    for path in sorted(
        path for room in rooms for path in (package / room).glob("*.py")
    ):
        code.update(path.read_bytes())
    code.update(DEMO_PLAN.read_bytes())
    for path in sorted(NANO_FOLDER.iterdir()):
        code.update(path.read_bytes())
    return code.hexdigest()


def _refuse_foreign(target: Path) -> None:
    ours = {_TWO_BANK, _STAMP, *_FORMER}
    if target.exists() and not {path.name for path in target.iterdir()} <= ours:
        raise KimiK3Error(
            f"{target} holds files that the demo did not make; move it away, or name "
            "another cache folder with --cache-dir."
        )
