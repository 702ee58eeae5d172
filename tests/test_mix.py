"""The TOML file of a mix: what it may say, and what is said of one that is wrong."""

import dataclasses
from pathlib import Path

import pytest
from small_mix import SMALL, mix_of, small_mix

from kimi_k3.build.mix import Chats, Corpus, Dataset, Files, JsonLines
from kimi_k3.build.mix_file import (
    copy_mix,
    find_mix,
    parse_mix,
    read_mix,
    shipped_mixes,
)
from kimi_k3.errors import MixError

ONE = '[[corpus]]\nname = "a"\nshare = 1\nfiles = "*.txt"\n'


def test_what_a_mix_says():
    mix = small_mix()
    assert mix.base == SMALL.parent
    assert mix.origin == str(SMALL)
    assert (mix.tokens, mix.length, mix.seed, mix.held_out) == (2048, 128, 7, 0.25)
    assert (mix.packing, mix.if_short, mix.end_of_document) == ("pack", "refuse", True)
    assert mix.corpora == (
        Corpus("code", 0.4, Files(("code/*.py",))),
        Corpus("english", 0.2, JsonLines(("english.jsonl",)), ("en",)),
        Corpus("chinese", 0.2, JsonLines(("chinese.jsonl",), "content"), ("zh",)),
        Corpus("traces", 0.2, Chats(("traces.jsonl",))),
    )
    assert mix.notes == ()


def test_a_dataset(tmp_path: Path):
    mix = mix_of(
        tmp_path,
        """
        [[corpus]]
        name = "web"
        share = 2
        dataset = "owner/name"
        config = "deu_Latn"
        split = "test"
        text_key = "content"
        revision = "abc"
        filter = {license = ["mit", "isc"], stars = 3}
        [[corpus]]
        name = "local"
        share = 1
        dataset = "json"
        data_files = ["a.jsonl", "b.jsonl"]
        """,
    )
    where = (("license", ("mit", "isc")), ("stars", (3,)))
    assert [corpus.source for corpus in mix.corpora] == [
        Dataset("owner/name", "deu_Latn", "test", "content", where, revision="abc"),
        Dataset("json", data_files=("a.jsonl", "b.jsonl")),
    ]


@pytest.mark.parametrize(
    "shares", [(1, 1, 1), (40, 30, 15, 15), (0.2,), (1e-3, 3, 0.5)]
)
def test_wanted_tokens_sum_up(shares: tuple[float, ...]):
    corpora = tuple(Corpus(f"c{i}", s, Files(("x",))) for i, s in enumerate(shares))
    mix = dataclasses.replace(small_mix(), corpora=corpora, tokens=128 * 79)
    assert sum(mix.wanted) == mix.tokens
    assert sum(mix.shares) == pytest.approx(1)
    for wanted, share in zip(mix.wanted, mix.shares, strict=True):
        assert abs(wanted - share * mix.tokens) < 1
    assert bool(mix.notes) == (sum(shares) != 1)


def test_shares_that_do_not_sum_to_one_are_told(tmp_path: Path):
    assert mix_of(tmp_path, ONE.replace("= 1", "= 40")).notes == (
        "the shares sum to 40 and were scaled to 1.",
    )


HEAD = "tokens = 64\nlength = 32\n"

WRONG = {
    "not toml": ("tokens = = 3", "m is not TOML"),
    "no tokens": ("length = 3\n" + ONE, "m has no 'tokens'"),
    "no length": ("tokens = 3\n" + ONE, "m has no 'length'"),
    "no corpus": (HEAD, r"there is no \[\[corpus\]\]"),
    "one bracket": (HEAD + ONE.replace("[[", "[").replace("]]", "]"), "two brackets"),
    "unknown key": (HEAD + "tokns = 3\n" + ONE, "the key 'tokns' is not known"),
    "unknown corpus key": (HEAD + ONE + "txt = 1\n", "corpus 'a': the key 'txt'"),
    "key of another source": (HEAD + ONE + 'text_key = "x"\n', "the key 'text_key'"),
    "two sources": (HEAD + ONE + 'chats = "x"\n', "has files and chats; give it one"),
    "no source": (HEAD + ONE.replace('files = "*.txt"', ""), "has no source"),
    "no name": (HEAD + ONE.replace('name = "a"', ""), "corpus 1 has no name"),
    "empty name": (HEAD + ONE.replace('"a"', '" "'), "a corpus has an empty name"),
    "escape": (HEAD + ONE.replace('"a"', '"\\u001b[2J"'), "cannot be printed"),
    "no share": (HEAD + ONE.replace("share = 1", ""), "corpus 'a' has no share"),
    "share of nothing": (HEAD + ONE.replace("= 1", "= 0"), "share is 0.0; make it pos"),
    "negative share": (HEAD + ONE.replace("= 1", "= -1"), "share is -1.0"),
    "share nan": (HEAD + ONE.replace("= 1", "= nan"), "share is nan"),
    "share inf": (HEAD + ONE.replace("= 1", "= inf"), "share is inf"),
    "share true": (HEAD + ONE.replace("= 1", "= true"), "make it a number"),
    "share too small": (
        HEAD + ONE + ONE.replace('"a"', '"b"').replace("= 1", "= 1e-3"),
        "the share of corpus 'b' is less than one of 64 tokens",
    ),
    "twice": (HEAD + ONE + ONE, "two corpora are called 'a'"),
    "no files": (HEAD + ONE.replace('"*.txt"', "[]"), "files is empty"),
    "files of numbers": (HEAD + ONE.replace('"*.txt"', "[1]"), "a list of strings"),
    "language": (
        HEAD + ONE + 'languages = ["xx"]\n',
        "language 'xx' is not known here",
    ),
    "length true": ("tokens = 64\nlength = true\n" + ONE, "make it a whole number"),
    "length 1": ("tokens = 64\nlength = 1\n" + ONE, "at least 2 tokens"),
    "half a row": ("tokens = 70\nlength = 32\n" + ONE, "take 64 or 96"),
    "less than a row": ("tokens = 31\nlength = 32\n" + ONE, "less than one row of 32"),
    "packing": (HEAD + 'packing = "x"\n' + ONE, "choose pack or window"),
    "if short": (HEAD + 'if_short = "x"\n' + ONE, "choose refuse, repeat or accept"),
    "all held out": (HEAD + "held_out = 1\n" + ONE, "from 0 to below 1"),
    "flag": (HEAD + "end_of_document = 1\n" + ONE, "make it true or false"),
    "filter": (
        HEAD + ONE.replace("files", "dataset") + "filter = {a = []}\n",
        "filter for column 'a'",
    ),
    "filter no table": (
        HEAD + ONE.replace("files", "dataset") + "filter = 3\n",
        "make it a table of columns",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_mixes_are_refused(name: str):
    text, message = WRONG[name]
    with pytest.raises(MixError, match=message):
        parse_mix(text, base=Path(), origin="m")


def test_no_more_corpora_than_labels_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "mix.toml"
    path.write_text(HEAD + ONE + ONE.replace('"a"', '"b"'))
    assert len(read_mix(path).corpora) == 2
    monkeypatch.setattr("kimi_k3.build.mix.MOST_CORPORA", 1)
    with pytest.raises(MixError, match="there are 2 corpora; at most 1 can be"):
        read_mix(path)


def test_the_pattern_of_wrong_mixes_is_right():
    parse_mix(HEAD + ONE, base=Path(), origin="m")
    window = 'tokens = 70\nlength = 32\npacking = "window"\n'
    assert parse_mix(window + ONE, base=Path()).tokens == 70


def test_shipped_mixes():
    general, audit = find_mix("general"), find_mix("audit")
    assert list(shipped_mixes()) == ["audit", "general", "traces"]
    share = {c.name: s for c, s in zip(general.corpora, general.shares, strict=True)}
    assert [
        share.pop(name) for name in ("code", "english", "chinese")
    ] == pytest.approx([0.4, 0.3, 0.15])
    assert len(share) == 7
    assert sum(share.values()) == pytest.approx(0.15)
    assert not general.notes
    assert all(isinstance(corpus.source, Dataset) for corpus in general.corpora)
    assert [type(corpus.source) for corpus in audit.corpora] == [Files, Chats]
    assert audit.base == Path.cwd()


def test_copy(tmp_path: Path):
    target = copy_mix("general", tmp_path / "mix.toml")
    assert read_mix(target).corpora == find_mix("general").corpora
    with pytest.raises(MixError, match="is there already and is left as it is"):
        copy_mix("audit", target)
    with pytest.raises(MixError, match="those that do are audit, general, traces"):
        copy_mix("other", tmp_path / "new.toml")
    with pytest.raises(MixError, match="cannot be written"):
        copy_mix("audit", tmp_path / "nowhere" / "mix.toml")
    with pytest.raises(MixError, match="comes with its texts and is used by its name"):
        copy_mix("traces", tmp_path / "traces.toml")


def test_names_that_lead_nowhere(tmp_path: Path):
    with pytest.raises(
        MixError, match="no file here and no shipped mix; those are audit"
    ):
        find_mix("genral")
    with pytest.raises(MixError, match="cannot be read"):
        read_mix(tmp_path / "mix.toml")
    (tmp_path / "mix.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(MixError, match="is not UTF-8"):
        find_mix(tmp_path / "mix.toml")
