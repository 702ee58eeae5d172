"""The files beside the shards that make a build complete without the network.

Copied are the tokenizer, the chat template, what the processors and other tools of the
release read, and the licence. Python files are not: code of checkpoints is never executed
here, and what they do is part of this package. So entries that point at them
(``auto_map``) are taken out of the copies, or loaders would look for what is not there.
The release's README describes another build and is left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.folder import CONFIG
from ..checkpoint.shard_index import INDEX, read_json
from ..errors import CheckpointError, ConversionError, TokenizerError
from ..tokenizer.files import (
    CONFIG_FILE,
    EOS_NAME,
    read_tokenizer_config,
    stated_end_ids,
)
from .durable_files import write_durably

GENERATION = "generation_config.json"

#: How Moonshot advises to sample; greedy decoding repeats itself.
SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}

_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".tiktoken")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "THIRD_PARTY", "THIRD-PARTY")
_NOT_COPIED = (CONFIG, INDEX, GENERATION)

#: Ends a message, and so a turn; the other end id is EOS_NAME.
_END_OF_MESSAGE = "<|end_of_msg|>"

_POINTS_AT_CODE = "auto_map"


def side_files(source: Path) -> list[Path]:
    """The files of the folder ``source`` that a build of it gets, by name."""
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in _NOT_COPIED
        and (path.suffix in _SUFFIXES or path.name.upper().startswith(_LICENCES))
        and not path.name.startswith("README")
    ]


def write_side_files(source: Path, out: Path) -> list[str]:
    """Write what a build of ``source`` has beside its shards into ``out``; its names.

    All but index and ``config.json``. Raises ConversionError for a file that cannot be
    read or holds no JSON where JSON should be.
    """
    for path in side_files(source):
        write_durably(out / path.name, _content(path))
    write_durably(out / GENERATION, generation_config(source))
    return [path.name for path in side_files(source)] + [GENERATION]


def generation_config(source: Path) -> bytes:
    """``generation_config.json`` of a build: the source's, completed where it is silent.

    It then says how to sample and which ids end a turn. Raises ConversionError if the
    source names no such id anywhere.
    """
    path = source / GENERATION
    content = _read_object(path) if path.is_file() else {}
    lacking = {key: value for key, value in SAMPLING.items() if key not in content}
    if not content.get("eos_token_id"):
        lacking["eos_token_id"] = end_ids(source)
    if not lacking:
        return _read(path)
    return _json(dict(sorted((content | lacking).items())))


def end_ids(source: Path) -> list[int]:
    """Ids that end a turn: by their names in the tokenizer config, or as stated."""
    stated = sorted(stated_end_ids(source), reverse=True)
    if (source / CONFIG_FILE).is_file():
        try:
            named = read_tokenizer_config(source)["added_tokens_decoder"]
        except TokenizerError as error:
            raise ConversionError(str(error)) from error
        by_name = {
            entry["content"] if isinstance(entry, dict) else entry: int(number)
            for number, entry in named.items()
        }
        wanted = (_END_OF_MESSAGE, EOS_NAME)
        found = [by_name[name] for name in wanted if name in by_name]
        stated = found + [number for number in stated if number not in found]
    if not stated:
        raise ConversionError(
            f"{source} says nowhere which ids end a turn: neither {GENERATION} nor "
            f"{CONFIG} has eos_token_id, and {CONFIG_FILE} names none. Take these files "
            "from the checkpoint's own repository."
        )
    return stated


def without_code(content: Any) -> Any:
    """A JSON value without entries that point at Python files of the checkpoint."""
    if isinstance(content, dict):
        return {
            key: without_code(value)
            for key, value in content.items()
            if key != _POINTS_AT_CODE
        }
    if isinstance(content, list):
        return [without_code(value) for value in content]
    return content


def _content(path: Path) -> bytes:
    """What is written for ``path``: its bytes, if they point at no code."""
    content = _read(path)
    if path.suffix != ".json" or _POINTS_AT_CODE.encode() not in content:
        return content
    return _json(without_code(_read_object(path)))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}.") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def _json(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, indent=2)
    return (text + "\n").encode()
