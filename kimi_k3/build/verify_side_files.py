"""The files beside a build's shards: all of the source's, the same, and the sampling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.shard_index import read_json
from ..conversion.side_files import GENERATION, SAMPLING, side_files, without_code
from ..errors import CheckpointError
from ..tokenizer.files import CONFIG_FILE, VOCAB_FILE
from .verify_report import Check, Finding

#: Files that must be the source's, byte for byte.
_SAME = (VOCAB_FILE, CONFIG_FILE)


def check_sampling(folder: Path) -> Iterator[Check | Finding]:
    """Whether ``generation_config.json`` of a converted build says how to sample."""
    looked = 0
    try:
        stated = read_json(folder / GENERATION)
    except CheckpointError as error:
        yield Finding(str(error))
        stated = None
    for key in SAMPLING if stated is not None else ():
        looked += 1
        if type((stated or {}).get(key)) not in (bool, int, float):
            yield Finding(
                f"{GENERATION} gives no {key}: hosts will sample in ways of their own. "
                "Convert again, or add the release's (temperature 1.0, top_p 0.95)."
            )
    yield Check("sampling", looked, "values of the generation config", len(SAMPLING))


def check_copied(folder: Path, source: Path) -> Iterator[Check | Finding]:
    """Whether the files beside the source's shards are in the build.

    The tokenizer's must say the same; entries that point at code of the checkpoint are
    not copied, so they do not count.
    """
    wanted = [path.name for path in side_files(source)]
    looked = 0
    for name in wanted:
        looked += 1
        if not (folder / name).is_file():
            yield Finding(
                f"{name} lies beside the source's shards but not here. Copy it."
            )
        elif name in _SAME and _content(folder / name) != _content(source / name):
            yield Finding(
                f"{name} is not the source's: text becomes other tokens than the model "
                "was trained on. Copy it from the source."
            )
    yield Check("copied files", looked, "files of the source looked for", len(wanted))


def _content(path: Path) -> Any:
    if path.suffix != ".json":
        return path.read_bytes()
    try:
        return without_code(read_json(path))
    except CheckpointError as error:
        return str(error)
