"""The files beside a build's shards: all of the source's, the same, and the sampling."""

from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.folder import CONFIG
from ..checkpoint.shard_index import INDEX, read_json
from ..errors import CheckpointError
from ..tokenizer.files import CONFIG_FILE, VOCAB_FILE
from .verify_report import Check, Finding

GENERATION = "generation_config.json"

#: What a host needs to sample as the release asks for.
_SAMPLING = ("temperature", "top_p")

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
    for key in _SAMPLING if stated is not None else ():
        looked += 1
        value = stated.get(key) if stated else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield Finding(
                f"{GENERATION} gives no {key}: hosts will sample in ways of their own. "
                "Convert again, or add the release's (temperature 1.0, top_p 0.95)."
            )
    yield Check("sampling", looked, "values of the generation config", len(_SAMPLING))


def check_copied(folder: Path, source: Path) -> Iterator[Check | Finding]:
    """Whether the files beside the source's shards are in the build, unchanged.

    Only the tokenizer's must be equal: others may be made anew.
    """
    wanted = [
        path.name
        for path in sorted(source.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in (".safetensors", ".py")
        and path.name not in (INDEX, CONFIG)
    ]
    looked = 0
    for name in wanted:
        looked += 1
        if not (folder / name).is_file():
            yield Finding(
                f"{name} lies beside the source's shards but not here. Copy it."
            )
        elif name in _SAME and not _equal(folder / name, source / name):
            yield Finding(
                f"{name} is not the source's: text becomes other tokens than the model "
                "was trained on. Copy it from the source."
            )
    yield Check("copied files", looked, "files of the source looked for", len(wanted))


def _equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()
