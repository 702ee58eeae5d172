"""The files of a K3 tokenizer: what must be in them, and what is wrong when it is not.

``tiktoken.model`` holds one byte string and its rank a line; ``tokenizer_config.json``
names some of the 256 control ids that lie directly above the ranks.
"""

import base64
import binascii
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError

VOCAB_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

#: The class a K3 checkpoint names; transformers finds registered classes by it.
CLASS_NAME = "TikTokenTokenizer"

#: Ids above the ranks that stand for structure and never for text.
CONTROL_IDS = 256

#: Control names without which no conversation can be rendered.
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

#: The other id that ends a turn, beside ``<|end_of_msg|>``.
EOS_NAME = "[EOS]"

_NAMED = "added_tokens_decoder"

_WHERE_FROM = "Take it from the checkpoint's own repository."


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte string → rank of every line of a ``tiktoken.model``.

    Raises TokenizerError naming file and line for anything but ranks 0, 1, 2, … each
    once, or if a single byte has no rank (some text could then not be encoded).
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(
            f"{path} cannot be read ({error.strerror}). K3's vocabulary is in this "
            f"file. {_WHERE_FROM}"
        ) from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            token, rank = _rank_line(path, number, line)
            if rank != len(ranks) or token in ranks:
                raise TokenizerError(
                    f"{path}, line {number}: rank {rank} of {token!r} where rank "
                    f"{len(ranks)} of a new token was expected. {_WHERE_FROM}"
                )
            ranks[token] = rank
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise TokenizerError(
            f"{path} holds {len(ranks)} ranks but none for byte {lacking[0]:#04x}; the "
            f"file is cut or not a tiktoken vocabulary. {_WHERE_FROM}"
        )
    return ranks


def _rank_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        raise TokenizerError(
            f"{path}, line {number}: {line[:40]!r} is not a base64 token and a rank. "
            f"{_WHERE_FROM}"
        ) from None


def control_names(named: Mapping[int, str], first: int) -> list[str]:
    """Names of the ids ``first`` … ``first + 255``; unnamed ones are reserved.

    ``named`` is ``added_tokens_decoder`` of the tokenizer config. Raises TokenizerError
    if it names an id outside that range, a name twice, or lacks one of MARKERS.
    """
    last = first + CONTROL_IDS - 1
    outside = [token_id for token_id in named if not first <= token_id <= last]
    if outside:
        raise TokenizerError(
            f"{CONFIG_FILE} names id {outside[0]} ({named[outside[0]]!r}), but the "
            f"control ids above the {first} ranks of {VOCAB_FILE} are {first} to {last}; "
            "the two files belong to different models. Take both from one repository."
        )
    names = [
        named.get(token_id, f"<|reserved_token_{token_id}|>")
        for token_id in range(first, last + 1)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise TokenizerError(
            f"{CONFIG_FILE} gives the name {twice[0]!r} to two control ids. {_WHERE_FROM}"
        )
    if missing := [name for name in MARKERS if name not in names]:
        raise TokenizerError(
            f"{CONFIG_FILE} does not name {missing[0]} among the control ids in "
            f"added_tokens_decoder; it is of another model than Kimi K3. {_WHERE_FROM}"
        )
    return names


def check_named_tokens(settings: Mapping[str, Any], known: Container[str]) -> None:
    """Raise TokenizerError if a setting such as ``eos_token`` names no control id."""
    for key, value in settings.items():
        if key.endswith("_special_tokens"):
            entries = value.values() if isinstance(value, Mapping) else value or ()
        elif key.endswith("_token") and value and not isinstance(value, bool):
            entries = [value]
        else:
            continue
        if odd := [name for name in map(_name, entries) if name not in known]:
            raise TokenizerError(
                f"{CONFIG_FILE}: {key} names {odd[0]!r}, which {_NAMED} does not name "
                "among the control ids. Take both from one repository."
            )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises TokenizerError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(
            f"{path} cannot be read ({error.strerror}). {_WHERE_FROM}"
        ) from error
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}. {_WHERE_FROM}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object. {_WHERE_FROM}")
    return value


def stated_end_ids(folder: Path) -> set[int]:
    """End ids that a host reads from a checkpoint's configuration.

    ``generation_config.json`` wins over ``config.json``, as in mlx-lm; files that are
    missing or damaged state nothing here, others complain about those.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            stated = read_object(folder / name).get("eos_token_id")
        except TokenizerError:
            continue
        if stated:
            values = stated if isinstance(stated, list) else [stated]
            return {value for value in values if isinstance(value, int)}
    return set()


def check_tokenizer_folder(folder: str | Path) -> None:
    """Raise TokenizerError unless ``folder`` holds a K3 tokenizer that is ours to load.

    For the doors of this package: a checkpoint whose ``tokenizer_class`` is another one
    would be handed to other code, or run a file of its own, by transformers.
    """
    folder = Path(folder)
    config = read_tokenizer_config(folder)
    found = config.get("tokenizer_class")
    if found != CLASS_NAME:
        raise TokenizerError(
            f"{folder / CONFIG_FILE}: tokenizer_class is {found!r}, Kimi K3's is "
            f"{CLASS_NAME!r}. Set it, or take the file from moonshotai/Kimi-K3."
        )
    named = {int(i): _name(entry) for i, entry in config[_NAMED].items()}
    check_named_tokens(
        config, control_names(named, len(read_ranks(folder / VOCAB_FILE)))
    )


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The tokenizer config in ``folder``, which names control ids by number.

    Raises TokenizerError naming the file otherwise.
    """
    path = folder / CONFIG_FILE
    config = read_object(path)
    named = config.get(_NAMED)
    if not isinstance(named, dict):
        raise TokenizerError(
            f"{path} has no {_NAMED}, which names the control ids. {_WHERE_FROM}"
        )
    if odd := [key for key in named if not key.isdecimal()]:
        raise TokenizerError(
            f"{path}: {_NAMED} has the key {odd[0]!r}, which is no id. {_WHERE_FROM}"
        )
    return config


def _name(entry: Any) -> str:
    return str(entry["content"]) if isinstance(entry, Mapping) else str(entry)
