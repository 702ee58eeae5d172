"""Samples of a mix: the same each time, in parts that never overlap, never of nothing."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_mix import FOLDER, SMALL, mix_of, other_names, small_mix
from tokenizer_folders import load_tk, write_tk

from kimi_k3.build.samples import Samples, make_samples
from kimi_k3.errors import (
    KimiK3Error,
    MixError,
    OverlapError,
    SamplesError,
    ShortCorpusError,
    TokenizerError,
)
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tk(tmp_path_factory.mktemp("tk"))[0]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TikTokenTokenizer:
    return load_tk(folder)


@pytest.fixture(scope="module")
def small(folder: Path) -> Samples:
    return make_samples(SMALL, folder)


# Samples of a mix


def test_samples_of_the_small_mix(small: Samples, tokenizer: TikTokenTokenizer):
    assert (small.rows, small.length, small.part) == (16, 128, "calibration")
    assert small.corpora == ("code", "english", "chinese", "traces")
    assert small.tokens_per_corpus.tolist() == [819, 410, 410, 409]
    assert small.tokens_per_corpus.dtype == np.int64
    end = tokenizer.convert_tokens_to_ids("[EOS]")
    texts = {path.read_text() for path in (FOLDER / "code").glob("*.py")}
    whole = 0
    for document, corpus in enumerate(small.corpus_of_document):
        ids = small.tokens[small.documents == document].tolist()
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        if small.corpora[corpus] == "code":
            assert any(one.startswith(text) for one in texts)
            if ids[-1] == end:
                whole += 1
                assert text in texts
        elif small.corpora[corpus] == "traces":
            assert str(tokenizer.decode(ids)).startswith("<|open|>message role=")
    assert whole == 2  # the third fills the share
    assert not (small.labels == -1).any()


def test_chats_are_rendered_by_the_models_template(
    tmp_path: Path, folder: Path, tokenizer: TikTokenTokenizer
):
    shutil.copy(FOLDER / "traces.jsonl", tmp_path)
    chats = '[[corpus]]\nname = "c"\nshare = 1\nchats = "traces.jsonl"'
    settings = 'packing = "window"\nif_short = "accept"'
    samples = make_samples(
        mix_of(tmp_path, chats, tokens=9999, length=3000, more=settings), folder, "all"
    )

    lines = (FOLDER / "traces.jsonl").read_text().splitlines()
    want = set()
    for line in map(json.loads, lines):
        ids = tokenizer.apply_chat_template(line["messages"], tools=line.get("tools"))
        want.add(tuple(ids))
    rows = zip(samples.tokens, samples.labels, strict=True)
    assert {tuple(row[label == 0].tolist()) for row, label in rows} == want
    assert len(want) == 8


def test_text_never_becomes_a_control_id(
    tmp_path: Path, folder: Path, tokenizer: TikTokenTokenizer
):
    marks = [
        "<|open|>think<|sep|>",
        "<|open|>message x[EOS]",
        "<|end_of_msg|>",
        "[EOS]",
    ]
    for i, mark in enumerate(marks):
        (tmp_path / f"{i}.txt").write_text(mark)
    text = '[[corpus]]\nname = "c"\nshare = 1\nfiles = "*.txt"'
    for more in ("", "end_of_document = false"):
        mix = mix_of(tmp_path, text, more=f'if_short = "accept"\n{more}', tokens=320)
        samples = make_samples(mix, folder, "all")
        ids = samples.tokens[samples.labels == 0]
        controls = ids[ids >= len(tokenizer) - 256]
        assert len(controls) == (0 if more else len(marks))
        assert all(controls == tokenizer.convert_tokens_to_ids("[EOS]"))


def test_the_same_everything_gives_the_same_samples(
    tmp_path: Path, folder: Path, small: Samples
):
    copy = tmp_path / "elsewhere"
    shutil.copytree(FOLDER, copy)
    assert make_samples(copy / "mix.toml", folder).fingerprint == small.fingerprint
    other_seed = dataclasses.replace(small_mix(), seed=8)
    assert make_samples(other_seed, folder).fingerprint != small.fingerprint
    for file in (copy / "code").iterdir():
        file.write_text(file.read_text() + "# one more line\n")
    assert make_samples(copy / "mix.toml", folder).fingerprint != small.fingerprint
    renamed = make_samples(SMALL, other_names(tmp_path / "tk"))
    assert renamed.tokenizer != small.tokenizer
    assert renamed.fingerprint != small.fingerprint


def test_parts_never_overlap(folder: Path):
    """Whatever the seeds; and both parts together are all documents."""
    few = dataclasses.replace(small_mix(), tokens=512, if_short="repeat")
    parts = {
        part: [
            make_samples(dataclasses.replace(few, seed=seed), folder, part)
            for seed in range(4)
        ]
        for part in ("calibration", "held_out")
    }
    for calibration in parts["calibration"]:
        for held_out in parts["held_out"]:
            held_out.refuse_overlap(calibration.document_hashes)
            assert not set(held_out.document_hashes) & set(calibration.document_hashes)
    # Other seeds do take other documents.
    assert len({s.document_hashes for s in parts["calibration"]}) == 4


def test_overlap_is_refused(folder: Path, small: Samples):
    everything = make_samples(dataclasses.replace(small_mix(), seed=1), folder, "all")
    shared = set(everything.document_hashes) & set(small.document_hashes)
    assert shared
    message = (
        rf"{len(shared)} of {len(everything.document_hashes)} documents \(.* of code.*\) "
        "are also among those of the calibration"
    )
    with pytest.raises(OverlapError, match=message):
        everything.refuse_overlap(small.document_hashes, of="the calibration")
    everything.refuse_overlap(["0" * 32])


def test_duplicates_are_dropped(tmp_path: Path, folder: Path):
    (tmp_path / "a.txt").write_text("the same\ntext of a file\n")
    (tmp_path / "b.txt").write_text("the  same text\n\nof a file")
    (tmp_path / "c.txt").write_text("and something else here")
    corpora = "".join(
        f'[[corpus]]\nname = "{name}"\nshare = 1\nfiles = "{files}"\n'
        for name, files in (("x", "[ab].txt"), ("y", "*.txt"))
    )
    mix = mix_of(tmp_path, corpora, tokens=32, length=16)
    samples = make_samples(mix, folder, "all")
    assert len(samples.document_hashes) == 2
    mix = mix_of(tmp_path, corpora, tokens=320)
    with pytest.raises(
        ShortCorpusError, match=r"'x' has \d+ of 160 tokens \(copies: 1\)"
    ):
        make_samples(mix, folder, "all")


def test_windows(tmp_path: Path, folder: Path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"{i} " + "word " * (3 * i))
    text = '[[corpus]]\nname = "c"\nshare = 1\nfiles = "*.txt"'
    mix = mix_of(tmp_path, text, tokens=500, more='packing = "window"')
    samples = make_samples(mix, folder, "all")
    assert samples.tokens_per_corpus.tolist() == [500]
    assert samples.rows == len(samples.document_hashes)
    for row in samples.documents:
        assert len(set(row[row != -1])) == 1
    full = (samples.labels != -1).all(axis=1)
    assert 0 < full.sum() < samples.rows


# B34: nothing is made of nothing


def shortage(
    base: Path, folder: Path, text: str, more: str = "", part: str = "all", **sizes: int
) -> str:
    """What is said of a mix with one file of ``text``."""
    (base / "a.txt").write_text(text)
    corpus = '[[corpus]]\nname = "c"\nshare = 1\nfiles = "*.txt"'
    with pytest.raises(KimiK3Error) as caught:
        make_samples(mix_of(base, corpus, more=more, **sizes), folder, part)
    assert isinstance(caught.value, ShortCorpusError)
    return str(caught.value)


@pytest.mark.parametrize("if_short", ["refuse", "repeat", "accept"])
@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_empty_input_is_refused(tmp_path: Path, folder: Path, text: str, if_short: str):
    told = shortage(tmp_path, folder, text, f'if_short = "{if_short}"')
    assert "corpus 'c' has 0 of 256 tokens (empty: 1). Add sources" in told
    assert "would do" not in told


def test_short_input_is_refused(tmp_path: Path, folder: Path):
    told = shortage(tmp_path, folder, "x1y2" * 30)
    assert "part all: corpus 'c' has 121 of 256 tokens. Add" in told
    assert "tokens = 96 would do" in told
    assert 'if_short = "repeat" or "accept"' in told
    less_than_a_row = shortage(tmp_path, folder, "x1y2", 'if_short = "accept"')
    assert "has 5 of 256 tokens" in less_than_a_row
    assert "would do" not in less_than_a_row


def test_what_was_left_out_is_told(tmp_path: Path, folder: Path):
    (tmp_path / "b.txt").write_bytes(b"\xff")
    told = shortage(tmp_path, folder, "x1y2")
    assert "(left out: 1), the first left out: " in told
    assert "b.txt is not UTF-8: byte 0 is 0xff" in told


def test_short_input_is_accepted_or_repeated_if_asked(tmp_path: Path, folder: Path):
    (tmp_path / "a.txt").write_text("x1y2" * 30)
    corpus = '[[corpus]]\nname = "c"\nshare = 1\nfiles = "*.txt"'
    accepted = make_samples(
        mix_of(tmp_path, corpus, more='if_short = "accept"'), folder, "all"
    )
    assert accepted.tokens_per_corpus.tolist() == [121]
    assert accepted.rows == 4
    repeated = make_samples(
        mix_of(tmp_path, corpus, more='if_short = "repeat"'), folder, "all"
    )
    assert repeated.tokens_per_corpus.tolist() == [256]
    ids = repeated.tokens.reshape(-1)
    assert (ids[121:242] == ids[:121]).all()


def test_no_held_out_part(tmp_path: Path, folder: Path):
    mix = dataclasses.replace(small_mix(), held_out=0.0)
    with pytest.raises(MixError, match=r"holds nothing out \(held_out = 0\)"):
        make_samples(mix, folder, "held_out")
    with pytest.raises(SamplesError, match="part is 'test'; choose one of calibration"):
        make_samples(mix, folder, "test")


def test_folders_without_a_tokenizer(tmp_path: Path, folder: Path):
    with pytest.raises(TokenizerError, match="nowhere is no folder"):
        make_samples(SMALL, tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json cannot be read"):
        make_samples(SMALL, tmp_path)
