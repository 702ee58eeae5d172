"""The files beside a build's shards: all of the source's, the same, and the sampling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.shard_index import read_json
from ..conversion.side_files import (
    GENERATION,
    SAMPLING,
    generation_config,
    side_files,
    without_code,
)
from ..errors import CheckpointError, ConversionError, TokenizerError
from ..tokenizer.files import (
    CONFIG_FILE,
    EOS_NAME,
    VOCAB_FILE,
    read_tokenizer_config,
)
from .verify_report import Check, Finding

#: Ends a message, and so a turn; the other id that does is EOS_NAME.
END_OF_MESSAGE = "<|end_of_msg|>"

#: Files that must be the source's, byte for byte.
_SAME = (VOCAB_FILE, CONFIG_FILE)


def check_sampling(folder: Path) -> Iterator[Check | Finding]:
    """Whether ``generation_config.json`` of a converted build says how to sample.

    Sampling that is not the release's advice is for whoever wrote it to decide; ids that
    end no turn make generation run on, or stop in mid-sentence.
    """
    looked = 0
    try:
        stated = read_json(folder / GENERATION)
    except CheckpointError as error:
        yield Finding(str(error))
        stated = None
    for key, wanted in SAMPLING.items() if stated is not None else ():
        looked += 1
        value = (stated or {}).get(key)
        if type(value) not in (bool, int, float):
            yield Finding(
                f"{GENERATION} gives no {key}: hosts will sample in ways of their own. "
                "Convert again, or add the release's (temperature 1.0, top_p 0.95)."
            )
        elif value != wanted:
            yield Finding(
                f"{GENERATION} has {key} = {value!r}; the release advises {wanted!r}.",
                note=True,
            )
    if stated is not None:
        looked += 1
        yield from _end_findings(folder, stated.get("eos_token_id"))
    yield Check(
        "sampling", looked, "values of the generation config", len(SAMPLING) + 1
    )


def _end_findings(folder: Path, stated: Any) -> Iterator[Finding]:
    """The end ids ``stated`` must hold one that ends a turn by its name."""
    try:
        ends = turn_ends(folder)
    except (CheckpointError, TokenizerError):
        return  # told where the tokenizer is looked at
    ids = stated if isinstance(stated, list) else [stated]
    odd = [found for found in ids if type(found) is not int]
    if odd or not set(ids) & set(ends):
        wanted = " and ".join(f"{number} ({name})" for number, name in ends.items())
        yield Finding(
            f"{GENERATION} has eos_token_id = {stated!r:.60}, but turns end with {wanted}: "
            "generation would not stop where it should. Convert again, or set these."
        )


def turn_ends(folder: Path) -> dict[int, str]:
    """Id → name of the control ids that end a turn, as the tokenizer config names them."""
    named = read_tokenizer_config(folder)["added_tokens_decoder"]
    names = {
        int(number): entry.get("content") if isinstance(entry, dict) else entry
        for number, entry in named.items()
    }
    return {
        number: name
        for number, name in names.items()
        if name in (END_OF_MESSAGE, EOS_NAME)
    }


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
    yield from _generation_findings(folder, source)
    yield Check("copied files", looked, "files of the source looked for", len(wanted))


def _generation_findings(folder: Path, source: Path) -> Iterator[Finding]:
    """``generation_config.json`` against what a conversion of ``source`` writes."""
    try:
        found = read_json(folder / GENERATION)
        wanted = json.loads(generation_config(source))
    except (CheckpointError, ConversionError) as error:
        if (folder / GENERATION).is_file():
            yield Finding(str(error))
        return
    odd = [
        f"{key} is {json.dumps(found[key]) if key in found else 'absent':.60}, which "
        f"should be {json.dumps(wanted[key]) if key in wanted else 'absent':.60}"
        for key in sorted(found.keys() | wanted.keys())
        if (key in found, json.dumps(found.get(key), sort_keys=True))
        != (key in wanted, json.dumps(wanted.get(key), sort_keys=True))
    ]
    if odd:
        yield Finding(
            f"{GENERATION} is not what a conversion makes of the source's: "
            f"{'; '.join(odd)}. Convert again, or set that."
        )


def _content(path: Path) -> Any:
    if path.suffix != ".json":
        return path.read_bytes()
    try:
        return without_code(read_json(path))
    except CheckpointError as error:
        return str(error)
