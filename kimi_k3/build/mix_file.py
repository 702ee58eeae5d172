"""The TOML file of a mix, and the mixes that come with the package.

    tokens = 131072        # in all, without padding
    length = 2048          # tokens a row

    [[corpus]]
    name = "python"
    share = 0.7
    files = ["src/**/*.py"]

A corpus has one of ``files``, ``jsonl``, ``chats`` and ``dataset``. Paths are relative
to the TOML file. A key that is not known is refused by name.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MixError
from .mix import Chats, Corpus, Dataset, Files, JsonLines, Mix, Scalar, Source

#: Mixes that come with the package, to be copied and edited.
SHIPPED = Path(__file__).parent / "mixes"

#: Mixes whose texts come with them.
WITH_TEXTS = Path(__file__).parents[1] / "evaluation" / "traces"


def read_mix(path: str | Path) -> Mix:
    """The mix in the TOML file ``path``. Raises MixError naming what is wrong."""
    path = Path(path).expanduser()
    return parse_mix(_read(path), base=path.parent, origin=str(path))


def parse_mix(text: str, *, base: Path, origin: str = "the mix") -> Mix:
    """The mix that ``text`` (TOML) describes; relative paths start from ``base``."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MixError(f"{origin} is not TOML: {error}.") from error
    corpora = table.pop("corpus", [])
    if not isinstance(corpora, list) or not all(isinstance(c, dict) for c in corpora):
        raise MixError(f"{origin}: write corpora as [[corpus]], with two brackets.")
    settings = _checked(table, _MIX_KEYS, origin)
    for key in ("tokens", "length"):
        if key not in settings:
            raise MixError(f"{origin} has no {key!r}; add {key} = …")
    read = tuple(_corpus(entry, i, origin) for i, entry in enumerate(corpora, 1))
    return Mix(corpora=read, base=base, origin=origin, **settings)


def find_mix(name_or_path: str | Path) -> Mix:
    """A mix by its file, or by the name of one that comes with the package.

    The paths of a shipped mix start from the current folder, unless its texts come with
    it.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return read_mix(path)
    shipped = shipped_mixes()
    if str(name_or_path) not in shipped:
        raise MixError(
            f"{name_or_path} is no file here and no shipped mix; those are "
            f"{', '.join(shipped)}."
        )
    file = shipped[str(name_or_path)]
    base = file.parent if file.parent == WITH_TEXTS else Path.cwd()
    return parse_mix(_read(file), base=base, origin=str(name_or_path))


def shipped_mixes() -> dict[str, Path]:
    """Name and file of every mix that comes with the package."""
    found = [*SHIPPED.glob("*.toml"), *WITH_TEXTS.glob("*.toml")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def copy_mix(name: str, target: str | Path) -> Path:
    """Copy the shipped mix ``name`` to the new file ``target``; its path."""
    shipped = shipped_mixes()
    if name not in shipped:
        raise MixError(
            f"no mix called {name!r} comes with the package; those that do are "
            f"{', '.join(shipped)}."
        )
    if shipped[name].parent == WITH_TEXTS:
        raise MixError(
            f"the mix {name!r} comes with its texts and is used by its name; to change "
            f"it, copy the folder {WITH_TEXTS}."
        )
    target = Path(target).expanduser()
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(_read(shipped[name]))
    except FileExistsError:
        raise MixError(
            f"{target} is there already and is left as it is; name a new file."
        ) from None
    except OSError as error:
        raise MixError(f"{target} cannot be written ({error.strerror}).") from error
    return target


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MixError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise MixError(
            f"{path} is not UTF-8 (byte {error.start}); a mix is a TOML file."
        ) from error


# What TOML gives for each key. bool is an int to Python, and never meant here.
_TEXT, _TEXTS, _WHOLE, _NUMBER, _FLAG, _TABLE = (
    "a string",
    "a string or a list of strings",
    "a whole number",
    "a number",
    "true or false",
    "a table of columns",
)

_MIX_KEYS = {
    "tokens": _WHOLE,
    "length": _WHOLE,
    "seed": _WHOLE,
    "held_out": _NUMBER,
    "packing": _TEXT,
    "end_of_document": _FLAG,
    "if_short": _TEXT,
}
_CORPUS_KEYS = {"name": _TEXT, "share": _NUMBER, "languages": _TEXTS}

#: Kind of source → the key that names it and its further keys.
_SOURCE_KEYS = {
    "files": {"files": _TEXTS},
    "jsonl": {"jsonl": _TEXTS, "text_key": _TEXT},
    "chats": {"chats": _TEXTS},
    "dataset": {
        "dataset": _TEXT,
        "config": _TEXT,
        "split": _TEXT,
        "text_key": _TEXT,
        "filter": _TABLE,
        "data_dir": _TEXT,
        "data_files": _TEXTS,
        "revision": _TEXT,
    },
}


def _corpus(entry: dict[str, Any], number: int, origin: str) -> Corpus:
    name = entry.get("name")
    if not isinstance(name, str):
        raise MixError(f'{origin}: corpus {number} has no name; add name = "…"')
    where = f"{origin}, corpus {name!r}"
    kinds = [kind for kind in _SOURCE_KEYS if kind in entry]
    if len(kinds) != 1:
        raise MixError(
            f"{where} has {' and '.join(kinds) or 'no source'}; give it one of "
            f"{', '.join(_SOURCE_KEYS)}."
        )
    values = _checked(entry, _CORPUS_KEYS | _SOURCE_KEYS[kinds[0]], where)
    if "share" not in values:
        raise MixError(f"{where} has no share; add share = 0.…")
    languages = _tuple(values.pop("languages", ()))
    share = float(values.pop("share"))
    values.pop("name")
    source = _source(kinds[0], values, where)
    try:
        return Corpus(name, share, source, languages)
    except MixError as error:
        raise MixError(f"{origin}, {error}") from error


def _source(kind: str, values: dict[str, Any], where: str) -> Source:
    """The source of ``kind`` from its keys, whose types have been checked."""
    named = values.pop(kind)
    if not named:
        raise MixError(f"{where}: {kind} is empty; name something.")
    if kind == "files":
        return Files(_tuple(named))
    if kind == "jsonl":
        return JsonLines(_tuple(named), **values)
    if kind == "chats":
        return Chats(_tuple(named))
    columns = values.pop("filter", {})
    where_columns = tuple(
        (column, _allowed(column, allowed, where))
        for column, allowed in columns.items()
    )
    files = _tuple(values.pop("data_files", ()))
    return Dataset(named, where=where_columns, data_files=files, **values)


def _allowed(column: str, allowed: Any, where: str) -> tuple[Scalar, ...]:
    values = tuple(allowed) if isinstance(allowed, list) else (allowed,)
    if not values or not all(isinstance(value, Scalar) for value in values):
        raise MixError(
            f"{where}: filter for column {column!r} is {allowed!r}; give a value or a "
            "list of values."
        )
    return values


def _checked(
    table: Mapping[str, Any], keys: Mapping[str, str], where: str
) -> dict[str, Any]:
    """``table``, all of whose keys are in ``keys`` and have the kind of value there."""
    for key, value in table.items():
        if key not in keys:
            raise MixError(
                f"{where}: the key {key!r} is not known; known are {', '.join(keys)}."
            )
        if not _is(keys[key], value):
            raise MixError(f"{where}: {key} is {value!r}; make it {keys[key]}.")
    return dict(table)


def _is(kind: str, value: Any) -> bool:
    if kind == _FLAG or isinstance(value, bool):
        return kind == _FLAG and isinstance(value, bool)
    if kind == _TEXTS:
        texts = value if isinstance(value, list) else [value]
        return all(isinstance(text, str) and text for text in texts)
    wanted = {_TEXT: str, _WHOLE: int, _NUMBER: int | float, _TABLE: dict}[kind]
    return isinstance(value, wanted)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
