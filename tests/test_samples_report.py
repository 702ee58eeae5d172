"""What `kimi-k3 samples` tells: scripts, shares, and what looks wrong."""

import io
import json
import sys
from pathlib import Path

import pytest
from small_mix import SMALL, mix_of, small_mix
from tokenizer_folders import write_tk

from kimi_k3.build.mix_file import shipped_mixes
from kimi_k3.build.samples import Samples, make_samples_and_report
from kimi_k3.build.scripts import (
    LANGUAGES,
    SCRIPTS,
    script_counts,
    script_flags,
    script_shares,
)
from kimi_k3.cli import main
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.verbs import samples as verb

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tk(tmp_path_factory.mktemp("tk"))[0]


def test_letters_are_counted_by_script():
    text = "naïve 12 + x! Привет, 世界 カタかな 한국 שלום سلام ༀ ᚠ e\u0301"
    assert script_counts(text) == {
        "Latin": 7,
        "Cyrillic": 6,
        "Han": 2,
        "Katakana": 2,
        "Hiragana": 2,
        "Hangul": 2,
        "Hebrew": 4,
        "Arabic": 4,
        "Tibetan": 1,
        "other": 1,
    }
    assert not script_counts("1 + 2 = 3 \U0001f600 \n")


def test_shares_are_in_order():
    assert script_shares({"Han": 1, "Latin": 3, "Greek": 0}) == {
        "Latin": 0.75,
        "Han": 0.25,
    }
    assert script_shares({}) == {}


def test_every_language_has_a_script_that_is_counted():
    assert set(LANGUAGES.values()) <= set(SCRIPTS)
    assert LANGUAGES["ja"] == "Hiragana"


LATIN, MIXED = {"Latin": 0.97, "Han": 0.03}, {"Latin": 0.96, "Han": 0.04}


@pytest.mark.parametrize(
    ("name", "languages", "shares", "messages"),
    [
        (
            "multilingual web",
            (),
            LATIN,
            ["97.0% of its letters are Latin, while its name"],
        ),
        ("multilingual web", (), MIXED, []),
        ("Languages", (), LATIN, ["its name says more scripts"]),
        ("web", (), LATIN, []),
        ("web", ("de", "en"), LATIN, []),
        ("web", ("de", "zh"), LATIN, ["its languages (de, zh) say more scripts"]),
        ("web", ("de", "zh"), MIXED, []),
        ("web", ("zh", "ru"), MIXED, ["Cyrillic (ru) is expected and is 0.0% of"]),
        ("web", ("ru", "bg"), {"Han": 1.0}, ["Cyrillic (ru, bg) is expected"]),
        ("web", ("zh",), {}, ["Han (zh) is expected and is 0.0%"]),
        ("web", ("ja",), {"Han": 1.0}, ["Hiragana (ja) is expected"]),
        (
            "web",
            ("ru",),
            {"Latin": 1.0},
            ["its languages (ru) say", "Cyrillic (ru) is expected"],
        ),
    ],
)
def test_flags_of_scripts(
    name: str, languages: tuple[str, ...], shares: dict[str, float], messages: list[str]
):
    flags = script_flags(name, languages, shares)
    assert len(flags) == len(messages)
    for flag, message in zip(flags, messages, strict=True):
        assert flag.startswith(f"{name}: ")
        assert message in flag


def test_the_report_of_the_small_mix(folder: Path):
    samples, report = make_samples_and_report(SMALL, folder)
    assert report.fingerprint == samples.fingerprint
    assert (report.rows, report.length, report.tokens) == (16, 128, 2048)
    by_name = {corpus.name: corpus for corpus in report.corpora}
    assert [corpus.tokens for corpus in report.corpora] == [819, 410, 410, 409]
    assert [corpus.share_wanted for corpus in report.corpora] == [0.4, 0.2, 0.2, 0.2]
    assert by_name["chinese"].scripts[0][0] == "Han"
    assert by_name["code"].scripts == (("Latin", 1.0),)
    assert sum(corpus.documents for corpus in report.corpora) == len(
        samples.document_hashes
    )
    # The small vocabulary has merges for some English and hardly any Chinese.
    assert (
        1 < by_name["chinese"].bytes_per_token < by_name["traces"].bytes_per_token < 4
    )
    assert report.flags == (
        "traces: all of it comes from 2 documents; more tokens would bring more.",
    )


def test_what_looks_wrong_is_flagged(tmp_path: Path, folder: Path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"the number {i} in words and words")
    (tmp_path / "copy.txt").write_text("the  number 1 in words and words")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    corpora = (
        '[[corpus]]\nname = "multilingual"\nshare = 1\nfiles = "*.txt"\n'
        '[[corpus]]\nname = "more"\nshare = 1\njsonl = "a.jsonl"\n'
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a line of text"}\n{"text": ""}\n')
    mix = mix_of(tmp_path, corpora, more='if_short = "accept"')
    _, report = make_samples_and_report(mix, folder, "all")
    text = report.text()
    assert "multilingual: dropped as copies: 1, left out: 1\n" in text
    assert "odd.txt is not UTF-8: byte 0 is 0xff" in text
    assert "more: empty: 1\n" in text
    assert "note: the shares sum to 2 and were scaled to 1." in text
    for flag in (
        "multilingual: 100.0% of its letters are Latin, while its name says more",
        "% of the tokens instead of 50.0%",
        "more: all of it comes from 1 document;",
    ):
        assert f"flag: {flag}" in text or flag in text
    assert len(report.flags) == 4
    mix = mix_of(tmp_path, corpora, more='if_short = "repeat"')
    _, report = make_samples_and_report(mix, folder, "all")
    assert any("for there are only 1; what they" in flag for flag in report.flags)
    assert not any("instead of" in flag for flag in report.flags)


# The verb


def test_a_mix_is_reported_and_kept(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "s.npz"
    given = [str(SMALL), "--tokenizer", str(folder)]
    assert main(["samples", *given, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "part calibration\n16 rows of 128: 2,048 tokens\nfingerprint " in shown
    assert main(["samples", *given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fingerprint"] == Samples.load(out).fingerprint
    assert main(["samples", str(out), "--tokenizer", str(folder), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for key in ("fingerprint", "rows", "part"):
        assert again[key] == report[key]
    assert again["corpora"][2]["scripts"] == report["corpora"][2]["scripts"]
    assert again["corpora"][2]["wanted"] is None


def test_a_finished_file_of_any_part_is_shown(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    out, tokenizer = tmp_path / "all.npz", ["--tokenizer", str(folder)]
    made = [str(SMALL), *tokenizer, "--part", "all", "--out", str(out)]
    assert main(["samples", *made]) == 0
    assert main(["samples", str(out), *tokenizer]) == 0
    assert capsys.readouterr().out.count("part all\n") == 2
    for option, value, said in (
        ("--part", "held_out", "holds the part 'all', wanted 'held_out'"),
        ("--out", str(tmp_path / "copy.npz"), "nothing to keep as"),
    ):
        assert main(["samples", str(out), *tokenizer, option, value]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "folder.npz").mkdir()
    given = [str(SMALL), *tokenizer, "--out", str(tmp_path / "folder.npz")]
    assert main(["samples", *given]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


def test_held_out_that_is_too_short_exits_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    given = [str(SMALL), "--tokenizer", str(folder), "--part", "held_out"]
    assert main(["samples", *given]) == 2
    error = capsys.readouterr().err
    assert "part held_out: corpus 'code' has" in error
    assert "; corpus 'english' has" in error
    assert "tokens = 512 would do" in error


def test_shipped_mixes_are_listed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["samples", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "general   40 % code, 30 % English web, 15 % Chinese" in shown
    assert len(shown.splitlines()) == len(shipped_mixes())
    target = tmp_path / "mix.toml"
    assert main(["samples", "--copy", "audit", str(target)]) == 0
    assert target.read_text() == shipped_mixes()["audit"].read_text()
    assert main(["samples", "--copy", "audit", str(target)]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a mix; --list shows those"),
        ([str(SMALL)], "name the checkpoint folder whose tokenizer"),
        (
            [str(SMALL), "--tokenizer", "T", "--out", "s"],
            "does not end in .npz; call it s",
        ),
        (
            [str(SMALL), "--tokenizer", "T", "--out", "nowhere/s.npz"],
            "--out: nowhere is no folder; create it first.",
        ),
        (["nothing", "--tokenizer", "T"], "no file here and no shipped mix"),
    ],
)
def test_what_the_verb_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["samples", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(monkeypatch: pytest.MonkeyPatch, terminal: bool):
    shown, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(verb.time, "monotonic", lambda: clock[0])
    quick = verb._Progress()
    quick.show("tokens", 1, 2)
    quick.show("tokens", 2, 2)
    assert not shown.getvalue(), "what is quick needs no progress"
    slow = verb._Progress()
    slow.show("reading a, characters", 5, 0)
    for clock[0] in (102.0, 102.1):
        slow.show("reading a, characters", 1000, 0)
    slow.show("tokens", 2000, 2000)
    lines = shown.getvalue().replace("\r", "\n").split("\n")
    assert [line.strip() for line in lines if line] == [
        "reading a, characters: 1,000",
        "tokens: 2,000 of 2,000",
    ]


def test_reports_are_plain_values(folder: Path):
    _, report = make_samples_and_report(small_mix(), folder)
    assert json.loads(json.dumps(report.to_dict()))["corpora"][0]["name"] == "code"


def test_the_page_shows_a_real_report():
    page = (ROOT / "docs" / "samples.md").read_text(encoding="utf-8")
    _, report = make_samples_and_report(SMALL, NANO_FOLDER)
    assert report.text().replace(f"{ROOT}/", "") in page
