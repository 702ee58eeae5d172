"""Documents of files, JSONL, chats and datasets; odd files are named."""

import glob
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_mix import mix_of

from kimi_k3.build.documents import (
    MOST_CHARACTERS,
    Document,
    cut,
    document,
    find_files,
    is_held_out,
    read_documents,
)
from kimi_k3.errors import ChatError, MissingPackageError, SamplesError


def read(base: Path, source: str, left_out: list[str] | None = None) -> list[Any]:
    """All documents of a corpus called c; ``source`` is the TOML of its source."""
    (corpus,) = mix_of(base, f'[[corpus]]\nname = "c"\nshare = 1\n{source}').corpora

    def render(messages: Any, tools: Any) -> str:
        if not messages:
            raise ChatError("the conversation is empty; pass at least one message.")
        return f"{messages} {tools}"

    kept = [] if left_out is None else left_out
    return list(read_documents(corpus, base, 0, render, kept.append))


def texts(documents: list[Any]) -> list[str]:
    return sorted(one.text for one in documents if one is not None)


# Cutting and hashing


def test_cut_keeps_everything_and_ends_at_lines():
    chance = random.Random(1)
    for _ in range(200):
        lines = ["x" * chance.randrange(12) for _ in range(chance.randrange(30))]
        text = "\n".join(lines)
        marks = sorted(chance.randrange(len(text) + 1) for _ in range(3))
        blocks = [
            text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)
        ]
        pieces = list(cut(blocks, most=8))
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= 8 for piece in pieces)
        for piece in pieces[:-1]:
            line_longer_than_a_piece = "\n" not in piece and len(piece) == 8
            assert piece.endswith("\n") or line_longer_than_a_piece


def test_cut_does_not_depend_on_the_blocks():
    text = "".join(f"line {i}\n" * (i % 3) for i in range(300))
    want = list(cut([text], most=50))
    for size in (1, 7, 49, 50, 51, 1000):
        blocks = [text[i : i + size] for i in range(0, len(text), size)]
        assert list(cut(blocks, most=50)) == want


def test_copies_share_a_hash():
    first = document("a  b\n\tc")
    assert first is not None
    assert first == Document("a  b\n\tc", first.digest)
    for copy in ("a b c", " a\r\nb c\n"):
        assert getattr(document(copy), "digest", "") == first.digest
    for other in ("a b c d", "A b c", "ab c"):
        assert getattr(document(other), "digest", "") != first.digest
    composed, apart = document("caf\u00e9"), document("cafe\u0301")
    assert composed
    assert apart
    assert composed.digest == apart.digest
    assert document(" \n\t ") is None
    assert document("a \ud800 b") is not None


def test_held_out_is_a_share_that_grows():
    found = [document(f"text {i}") for i in range(4000)]
    digests = [one.digest for one in found if one]
    share = {s: {d for d in digests if is_held_out(d, s)} for s in (0, 0.1, 0.5, 1)}
    assert not share[0]
    assert len(share[1]) == 4000
    assert share[0.1] < share[0.5]
    # Four standard deviations of a draw of 4000.
    assert abs(len(share[0.1]) - 400) < 80
    assert abs(len(share[0.5]) - 2000) < 130


# Files

GOOD = {
    "plain.txt": (b"one\ntwo\n", "one\ntwo\n"),
    "bom.txt": (b"\xef\xbb\xbfone", "one"),
    "crlf.txt": (b"one\r\ntwo\r\n", "one\r\ntwo\r\n"),
    "no line end.txt": ("über".encode(), "über"),
    "[odd] name*.txt": (b"odd", "odd"),
}

BAD = {
    "nul.txt": (b"a\0b", "is not text: byte 1 is NUL"),
    "utf16.txt": ("one".encode("utf-16-le"), "is not text: byte 1 is NUL"),
    "latin.txt": ("caf\xe9 ole".encode("latin-1"), "is not UTF-8: byte 3 is 0xe9"),
    "bom latin.txt": (b"\xef\xbb\xbfcaf\xe9 ole", "is not UTF-8: byte 6 is 0xe9"),
    "cut.txt": ("ab中".encode()[:-1], "is not UTF-8: it ends within a character"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file(tmp_path: Path, name: str):
    data, text = GOOD[name]
    (tmp_path / name).write_bytes(data)
    assert texts(read(tmp_path, f'files = "{name}"')) == [text]
    assert texts(read(tmp_path, 'files = "*.txt"')) == [text]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str):
    data, message = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SamplesError, match=f"corpus 'c': .*{name} {message}"):
        read(tmp_path, f'files = "{name}"')


def test_bad_files_of_a_glob_are_left_out_and_named(tmp_path: Path):
    for name, (data, _) in {**GOOD, **BAD}.items():
        (tmp_path / name).write_bytes(data)
    left_out: list[str] = []
    found = read(tmp_path, 'files = "*.txt"', left_out)
    assert texts(found) == sorted(text for _, text in GOOD.values())
    assert len(left_out) == len(BAD)
    for name, (_, message) in BAD.items():
        assert sum(f"{name} {message}" in reason for reason in left_out) == 1


def test_a_fault_far_into_a_file_is_found(tmp_path: Path):
    data = "äö\n".encode() * 500_000
    (tmp_path / "long.txt").write_bytes(data + b"\xff")
    with pytest.raises(SamplesError, match=f"byte {len(data)} is 0xff"):
        read(tmp_path, 'files = "long.txt"')


def test_empty_files_count_and_huge_lines_are_cut(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "white.txt").write_text(" \n\n")
    (tmp_path / "huge.txt").write_text("语" * (2 * MOST_CHARACTERS + 5))
    found = read(tmp_path, 'files = "*.txt"')
    assert found.count(None) == 2
    assert sorted(map(len, texts(found))) == [5, MOST_CHARACTERS, MOST_CHARACTERS]


def test_files_are_found_once_and_hidden_folders_are_passed_over(tmp_path: Path):
    for name in ("a.py", "sub/b.py", "sub/deep/c.py", ".git/d.py", "sub/.hidden/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = ["sub/b.py", "**/*.py", str(tmp_path / "*.py")]
    found = find_files(patterns, tmp_path, "c")
    assert [file.name for file in found] == ["a.py", "sub/b.py", "sub/deep/c.py"]
    assert [file.by_glob for file in found] == [True, False, True]


def test_the_order_of_the_file_system_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    want = read(tmp_path, 'files = "*.txt"')
    real = glob.iglob

    def backwards(*args: Any, **kwargs: Any) -> Iterator[str]:
        return iter(sorted(real(*args, **kwargs), reverse=True))

    monkeypatch.setattr(glob, "iglob", backwards)
    assert read(tmp_path, 'files = "*.txt"') == want


def test_patterns_that_lead_nowhere(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(SamplesError, match=r"\*\.txt matches no file \(looked for"):
        read(tmp_path, 'files = "*.txt"')
    with pytest.raises(
        SamplesError, match=r"sub is a folder; .* such as sub/\*\*/\*\.py"
    ):
        read(tmp_path, 'files = "sub"')


# JSONL and chats


def write_lines(path: Path, *lines: Any) -> None:
    written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(written) + "\n")


def test_jsonl(tmp_path: Path):
    long = "line\n" * MOST_CHARACTERS
    rows = [{"text": "a", "other": 1}, {"text": ""}, {"text": None}, {"text": long}]
    write_lines(tmp_path / "a.jsonl", *rows[:2], "", *rows[2:])
    found = read(tmp_path, 'jsonl = "a.jsonl"')
    assert found.count(None) == 2
    assert "".join(texts(found)[1:]) == long
    assert all(len(text) <= MOST_CHARACTERS for text in texts(found))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"line 2 is not JSON \(.*mend or remove it"),
        ("\xff\xfe", "line 2 is not JSON"),
        ("[1]", "line 2 is list, not an object"),
        ({"body": "x"}, "line 2 has no 'text' but 'body'; name the right one"),
        ({}, "line 2 has no 'text' but nothing"),
        ({"text": ["x"]}, "line 2: 'text' is list, not text"),
    ],
)
def test_damaged_jsonl_is_refused_by_line(tmp_path: Path, line: Any, message: str):
    write_lines(tmp_path / "a.jsonl", {"text": "good"}, line)
    with pytest.raises(SamplesError, match=f"corpus 'c': .*a.jsonl, {message}"):
        read(tmp_path, 'jsonl = "a.jsonl"')


def test_chats(tmp_path: Path):
    hello = [{"role": "user", "content": "hello"}]
    lines = [{"messages": hello}, {"messages": hello, "tools": [1]}, {"messages": []}]
    write_lines(tmp_path / "a.jsonl", *lines)
    left_out: list[str] = []
    found = read(tmp_path, 'chats = "a.jsonl"', left_out)
    assert texts(found) == [f"{hello} None", f"{hello} [1]"]
    assert all(one.conversation for one in found)
    assert len(left_out) == 1
    assert "line 3: the conversation is empty" in left_out[0]
    write_lines(tmp_path / "a.jsonl", {"conversation": hello})
    with pytest.raises(
        SamplesError, match="line 1 has no 'messages' but 'conversation'"
    ):
        read(tmp_path, 'chats = "a.jsonl"')


# Datasets: the network is out of reach here, so a module stands in for `datasets`


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``datasets.load_dataset`` is asked for; it gives six rows in two languages."""
    calls: list[Any] = []

    def load_dataset(path: str, **options: Any) -> Iterator[dict[str, Any]]:
        calls.append((path, options))
        if path == "gone":
            raise ConnectionError("cannot reach the hub\nmore words")
        for i in range(6):
            yield {"content": f"row {i}", "lang": "de" if i % 2 else "en", "stars": i}
        if path == "breaks":
            raise OSError("connection lost")

    stand_in = ModuleType("datasets")
    stand_in.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    return calls


def test_a_dataset_is_streamed(tmp_path: Path, asked: list[Any]):
    source = (
        'dataset = "o/n"\nconfig = "de"\nsplit = "test"\ntext_key = "content"\n'
        'revision = "r"\ndata_files = ["a.json", "hf://b"]\n'
        'filter = {lang = "de", stars = [1, 2, 5]}'
    )
    assert texts(read(tmp_path, source)) == ["row 1", "row 5"]
    files = [str(tmp_path / "a.json"), "hf://b"]
    more = {"name": "de", "revision": "r", "data_files": files}
    assert asked == [("o/n", {"split": "test", "streaming": True, **more})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'dataset = "gone"',
            "dataset gone cannot be streamed: ConnectionError: cannot ",
        ),
        (
            'dataset = "breaks"\ntext_key = "content"',
            "dataset breaks cannot be streamed: OSError: connection lost. Check",
        ),
        ('dataset = "o/n"', "a row has no 'text' but 'content', 'lang', 'stars'"),
        (
            'dataset = "o/n"\ntext_key = "content"\nfilter = {size = 1}',
            "has no column 'size' to filter by but 'content'",
        ),
        ('dataset = "o/n"\ntext_key = "stars"', "'stars' is int, not text"),
    ],
)
def test_what_a_dataset_lacks(
    tmp_path: Path, asked: list[Any], source: str, message: str
):
    with pytest.raises(SamplesError, match=f"corpus 'c': .*{message}"):
        read(tmp_path, source)
    assert len(asked) == 1


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingPackageError, match="o/n, which needs .* pip install datasets"
    ):
        read(tmp_path, 'dataset = "o/n"')
