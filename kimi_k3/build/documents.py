"""Where documents come from: text files, JSONL, chats, streamed datasets.

A document is a piece of text of bounded length with a hash that a copy shares. It is
cut the same way whatever a mix asks for, so that two mixes over the same files speak of
the same documents.
"""

import codecs
import glob
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ChatError, MissingPackageError, SamplesError
from .mix import Chats, Corpus, Dataset, Files, JsonLines

#: Longer texts are cut into documents of at most so many characters, at a line's end.
MOST_CHARACTERS = 8_000

_BLOCK = 1 << 20  # bytes of a text file that are read at once

#: Renders messages and tools; a string that the tokenizer knows for a conversation.
Render = Callable[[Any, Any], str]

#: Told of each thing that a corpus names by a pattern and that cannot be used.
LeftOut = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """A piece of text. ``digest`` (32 hex digits) is of its words, not its spacing."""

    text: str
    digest: str
    conversation: bool = False


def document(text: str, *, conversation: bool = False) -> Document | None:
    """The document that ``text`` makes; None if it has nothing but white space.

    Copies that differ in white space or in how accents are composed share a digest.
    """
    words = " ".join(unicodedata.normalize("NFC", text).split())
    if not words:
        return None
    digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return Document(text, digest, conversation)


def is_held_out(digest: str, share: float) -> bool:
    """Whether the document is one of the ``share`` that calibration never sees.

    Depends on the text alone: not on a seed, an order or other documents.
    """
    return int(digest[:16], 16) < share * 2**64


def read_documents(
    corpus: Corpus, base: Path, seed: int, render: Render, left_out: LeftOut
) -> Iterator[Document | None]:
    """Every document of ``corpus``, files in an order given by ``seed``.

    None stands for an empty text. Files of a glob that are no text, and conversations
    that cannot be rendered, go to ``left_out``; a file that is named outright, broken
    JSON, or an unknown key is refused with SamplesError.
    """
    where = f"corpus {corpus.name!r}"
    source = corpus.source
    if isinstance(source, Dataset):
        yield from _cut_all(_dataset_texts(source, base, where))
        return
    found = find_files(source.patterns, base, where)
    for file in sorted(found, key=lambda file: order_key(seed, file.name)):
        if isinstance(source, Files):
            yield from _file_documents(file, where, left_out)
        elif isinstance(source, JsonLines):
            yield from _cut_all(_line_texts(file.path, source.text_key, where))
        elif isinstance(source, Chats):
            yield from _conversations(file.path, where, render, left_out)


def order_key(seed: int, name: str) -> str:
    """Sorts names into an order that looks random and depends on ``seed`` alone."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogatepass")).hexdigest()


# Files


@dataclass(frozen=True)
class FoundFile:
    """A file; ``name`` is its path as seen from the mix, ``by_glob`` how it was found."""

    path: Path
    name: str
    by_glob: bool


def find_files(patterns: Sequence[str], base: Path, where: str) -> list[FoundFile]:
    """The files that ``patterns`` name, each once, sorted by name.

    Raises SamplesError if a pattern matches nothing.
    """
    found: dict[Path, FoundFile] = {}
    for pattern in patterns:
        expanded = Path(pattern).expanduser()
        full = base / expanded
        if full.is_dir():
            raise SamplesError(
                f"{where}: {pattern} is a folder; say which of its files, such as "
                f"{pattern.rstrip('/')}/**/*.py"
            )
        by_glob = not full.is_file()
        paths = _matches(str(expanded), base) if by_glob else [full]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise SamplesError(
                f"{where}: {pattern} matches no file (looked for {full}). Paths are "
                "relative to the file of the mix; mend the pattern or take it out."
            )
        for path in files:
            found.setdefault(path, FoundFile(path, _name(path, base), by_glob))
    return sorted(found.values(), key=lambda file: file.name)


def _matches(pattern: str, base: Path) -> list[Path]:
    # Path.glob would go through hidden folders too, such as .git.
    found = glob.iglob(pattern, root_dir=base, recursive=True)  # noqa: PTH207
    return [base / name for name in found]


def _name(path: Path, base: Path) -> str:
    inside = path.is_relative_to(base)
    return (path.relative_to(base) if inside else path).as_posix()


def _file_documents(
    file: FoundFile, where: str, left_out: LeftOut
) -> Iterator[Document | None]:
    try:
        if not file.path.stat().st_size:
            yield None
        yield from map(document, cut(_decoded(file.path)))
    except (_NoTextError, OSError) as error:
        if not file.by_glob:
            raise SamplesError(f"{where}: {error}") from error
        left_out(str(error))


class _NoTextError(Exception):
    """A file is not UTF-8 text; says where."""


def _decoded(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in blocks, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                if (nul := block.find(b"\0")) >= 0:
                    raise _NoTextError(
                        f"{path} is not text: byte {done + nul} is NUL (a binary file, "
                        "or text that is not UTF-8). Leave it out or convert it."
                    )
                # The decoder holds back a character that the block before cut.
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block)
                except UnicodeDecodeError as error:
                    at = done - held + error.start
                    raise _NoTextError(
                        f"{path} is not UTF-8: byte {at} is "
                        f"{error.object[error.start]:#04x}. Leave it out or convert it."
                    ) from error
                yield text if done else text.removeprefix("\ufeff")
                done += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _NoTextError(
            f"{path} is not UTF-8: it ends within a character. Leave it out or mend it."
        ) from error
    except OSError as error:
        raise _NoTextError(f"{path} cannot be read ({error.strerror}).") from error


def cut(blocks: Iterable[str], most: int = MOST_CHARACTERS) -> Iterator[str]:
    """The text of ``blocks`` in pieces of at most ``most`` characters.

    A piece ends at a line's end, unless a line alone is longer.
    """
    rest = ""
    for block in blocks:
        text = rest + block
        start = 0
        while len(text) - start > most:
            line_end = text.rfind("\n", start, start + most) + 1
            end = line_end or start + most
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _cut_all(texts: Iterable[str]) -> Iterator[Document | None]:
    for text in texts:
        if not text:
            yield None
        for piece in cut([text]):
            yield document(piece)


# JSONL


def _objects(path: Path, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``file, line N`` and the object of every line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{where}: {path}, line {number}"
                if not line.strip():
                    continue
                try:
                    value = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise SamplesError(
                        f"{place} is not JSON ({error}); mend or remove it."
                    ) from error
                if not isinstance(value, dict):
                    raise SamplesError(
                        f"{place} is {type(value).__name__}, not an object; mend or "
                        "remove it."
                    )
                yield place, value
    except OSError as error:
        raise SamplesError(
            f"{where}: {path} cannot be read ({error.strerror})."
        ) from error


def _line_texts(path: Path, text_key: str, where: str) -> Iterator[str]:
    for place, value in _objects(path, where):
        yield _text(value, text_key, place)


def _text(value: dict[str, Any], text_key: str, place: str) -> str:
    if text_key not in value:
        raise SamplesError(
            f"{place} has no {text_key!r} but {_keys(value)}; name the right one as "
            "text_key."
        )
    text = value[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise SamplesError(
            f"{place}: {text_key!r} is {type(text).__name__}, not text; name another "
            "text_key."
        )
    return text


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "nothing"


def _conversations(
    path: Path, where: str, render: Render, left_out: LeftOut
) -> Iterator[Document | None]:
    for place, value in _objects(path, where):
        if "messages" not in value:
            raise SamplesError(
                f"{place} has no 'messages' but {_keys(value)}; a chat is "
                "{'messages': [{'role': …, 'content': …}, …]}."
            )
        try:
            text = render(value["messages"], value.get("tools"))
        except ChatError as error:
            left_out(f"{place}: {error}")
            continue
        yield document(text, conversation=True)


# Datasets


def _dataset_texts(source: Dataset, base: Path, where: str) -> Iterator[str]:
    """Texts of a streamed dataset, of the rows that its filter lets through."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise MissingPackageError(
            f"{where} streams the dataset {source.path}, which needs the datasets "
            "package: pip install datasets"
        ) from error
    options = {
        "name": source.config,
        "data_dir": source.data_dir,
        "data_files": [_data_file(name, base) for name in source.data_files] or None,
        "revision": source.revision,
    }
    options = {key: value for key, value in options.items() if value is not None}
    place = f"{where}: dataset {source.path}"
    try:
        rows = iter(
            datasets.load_dataset(
                source.path, split=source.split, streaming=True, **options
            )
        )
        while (row := next(rows, None)) is not None:
            if _passes(row, source, place):
                yield _text(row, source.text_key, f"{place}, a row")
    except SamplesError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise SamplesError(
            f"{place} cannot be streamed: {type(error).__name__}: {reason}. Check its "
            "name, config and split, the connection, and whether it asks for a login "
            "(hf auth login)."
        ) from error


def _data_file(name: str, base: Path) -> str:
    return name if "://" in name else str(base / Path(name).expanduser())


def _passes(row: dict[str, Any], source: Dataset, place: str) -> bool:
    for column, allowed in source.where:
        if column not in row:
            raise SamplesError(
                f"{place} has no column {column!r} to filter by but {_keys(row)}."
            )
        if row[column] not in allowed:
            return False
    return True
