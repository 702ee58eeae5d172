"""The files beside the shards that make a build complete without the network.

Copied are the tokenizer, the chat template, what processors read, and licences: files
that releases carry, by their names, so that nobody's notes travel along. Python files are
not: code of checkpoints is never executed here, and what they do is part of this package.
So entries that point at them (``auto_map``) are taken out of the copies, or loaders would
look for what is not there. The release's README describes another build and is left out.
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
    VOCAB_FILE,
    check_tokenizer_folder,
    read_tokenizer_config,
    stated_end_ids,
)

GENERATION = "generation_config.json"

#: How Moonshot advises to sample; greedy decoding repeats itself.
SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}

#: What a release of Kimi K3, or of another model in its form, has beside its shards.
_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "image_processor_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    VOCAB_FILE,
    "tokenizer.json",
    "tokenizer.model",
    CONFIG_FILE,
    "video_preprocessor_config.json",
    "vocab.json",
)
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "THIRD_PARTY", "THIRD-PARTY")
_TEXTS = ("", ".txt", ".md", ".rst")

#: Made anew for the build.
_OF_THE_BUILD = (CONFIG, INDEX, GENERATION)

#: Ends a message, and so a turn; the other end id is EOS_NAME.
_END_OF_MESSAGE = "<|end_of_msg|>"

_POINTS_AT_CODE = "auto_map"


def side_files(source: Path) -> list[Path]:
    """The files of the folder ``source`` that a build of it gets, by name."""
    return [path for path in sorted(source.iterdir()) if _is_copied(path.name)]


def left_out(source: Path) -> list[str]:
    """Names of what lies in ``source`` and is for no build; hidden files, folders and
    shards do not count.
    """
    return [
        path.name
        for path in sorted(source.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix != ".safetensors"
        and path.name not in _OF_THE_BUILD
        and not _is_copied(path.name)
    ]


def read_side_files(source: Path) -> dict[str, bytes]:
    """Name → content of what a build of ``source`` has beside its shards.

    All but index and ``config.json``. Raises ConversionError for a file that cannot be
    read or holds no JSON where JSON should be, and TokenizerError for half a tokenizer
    or one that is not Kimi K3's; ``source`` may have none.
    """
    content = {path.name: _content(path) for path in side_files(source)}
    if has_tokenizer(source):
        _check_tokenizer(source)
    return content | {GENERATION: generation_config(source)}


def has_tokenizer(source: Path) -> bool:
    """Whether any of the two files is there, of which the tokenizer needs both."""
    return any((source / name).exists() for name in (VOCAB_FILE, CONFIG_FILE))


def _check_tokenizer(source: Path) -> None:
    try:
        check_tokenizer_folder(source)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(
            f"{source / CONFIG_FILE} does not name tokens as Kimi K3's does "
            f"({type(error).__name__}: {error}). Take it from the checkpoint's own "
            "repository."
        ) from error


def generation_config(source: Path) -> bytes:
    """``generation_config.json`` of a build: the source's, completed where it is silent.

    It then says how to sample and which ids end a turn. Raises ConversionError if the
    source names no such id anywhere, or states values that are none.
    """
    path = source / GENERATION
    content = _read_object(path) if path.exists() else {}
    lacking = {key: value for key, value in SAMPLING.items() if key not in content}
    for key in SAMPLING.keys() & content.keys():
        if type(content[key]) not in (bool, int, float):
            raise _odd(path, key, content[key], "a number")
    ends = content.get("eos_token_id")
    if ends in (None, []):
        lacking["eos_token_id"] = end_ids(source)
    elif not all(map(_is_id, ends if isinstance(ends, list) else [ends])):
        raise _odd(path, "eos_token_id", ends, "ids of tokens")
    if not lacking:
        return _read(path)
    return _json(dict(sorted((content | lacking).items())))


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _odd(path: Path, key: str, value: Any, wanted: str) -> ConversionError:
    return ConversionError(
        f"{path}: {key} is {value!r}; wanted {wanted}. Take the file from the "
        "checkpoint's own repository."
    )


def end_ids(source: Path) -> list[int]:
    """Ids that end a turn: by their names in the tokenizer config, or as stated."""
    stated = sorted(stated_end_ids(source), reverse=True)
    if (source / CONFIG_FILE).is_file():
        try:
            named = read_tokenizer_config(source)["added_tokens_decoder"]
        except TokenizerError as error:
            raise ConversionError(str(error)) from error
        by_name = {
            entry.get("content") if isinstance(entry, dict) else str(entry): int(number)
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
    if path.suffix != ".json":
        return content
    stated = _read_object(path)
    if _POINTS_AT_CODE.encode() not in content:
        return content
    return _json(without_code(stated))


def is_licence(name: str) -> bool:
    """Whether a file called ``name`` is a licence or a notice, in plain text."""
    stem, dot, suffix = name.rpartition(".")
    text = (dot + suffix if stem else "").lower() in _TEXTS
    return name.upper().startswith(_LICENCES) and text


def _is_copied(name: str) -> bool:
    return name in _COPIED or is_licence(name)


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
