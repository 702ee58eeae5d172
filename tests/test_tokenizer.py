"""Ids and text of the tokenizer, against mlx-vlm's on the same files."""

import base64
import copy
import pickle
import time
from pathlib import Path

import pytest
from lines import sample_lines, write_dense_tokenizer
from reference_chat import ReferenceTokenizer
from tokenizer_folders import load_tk, write_json, write_tk
from transformers import AutoTokenizer

from kimi_k3.errors import TokenizerError
from kimi_k3.nano.tokenizer_files import TokenIds, write_tokenizer
from kimi_k3.tokenizer import bpe, register_tokenizer
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

NAMED = {
    **{"[BOS]": 320, "[EOS]": 321, "<|end_of_msg|>": 322, "<|open|>": 323},
    **{"<|close|>": 324, "<|sep|>": 325, "<|media_begin|>": 338, "[UNK]": 574},
    **{"<|media_content|>": 339, "<|media_end|>": 340, "<|media_pad|>": 341},
    "[PAD]": 575,
}

LONG_TEXTS = {
    "30k spaces": " " * 30_000 + "a",
    "25k spaces": " " * 25_000 + "a",
    "25k other": "a" * 25_000 + " b",
    "runs": "a" * 26_000 + " " * 51_000 + "b" + "中" * 25_001,
    "500k line": "hello 中文, “world” 123 " * 22_000,
    "500k Han": "你好" * 250_000,
    "500k of one letter": "a" * 500_000,
    "no space to str.isspace": "\x1c" * 26_000 + "b",
    "next line": "\x85" * 26_000 + "b",
    "zero width": "\u200b" * 26_000 + "b",
}


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    return load_tk(tmp_path_factory.mktemp("tk") / "model")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    write_dense_tokenizer(folder)
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_lines_come_back_and_match_the_reference(dense, seed):
    ours = TikTokenTokenizer.from_pretrained(dense)
    reference = ReferenceTokenizer(dense)
    for line in sample_lines(200, seed):
        ids = ours.encode(line)
        assert ids == reference.text_ids(line), line
        assert ours.decode(ids) == line


@pytest.mark.parametrize(
    ("part", "instead"),
    [(r"[\p{Han}]+|", ""), (r"&&[^\p{Han}]", ""), ("{1,3}", "+"), (r"|\s+(?!\S)", "")],
)
def test_another_split_gives_other_ids(dense, monkeypatch, part, instead):
    reference = ReferenceTokenizer(dense)
    assert part in bpe.SPLIT_PATTERN
    monkeypatch.setattr(bpe, "SPLIT_PATTERN", bpe.SPLIT_PATTERN.replace(part, instead))
    changed = TikTokenTokenizer.from_pretrained(dense)
    lines = sample_lines(200)
    assert any(changed.encode(line) != reference.text_ids(line) for line in lines)


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_long_text_is_cut_as_in_the_reference(dense, name):
    text = LONG_TEXTS[name]
    ours = TikTokenTokenizer.from_pretrained(dense)
    start = time.perf_counter()
    ids = ours.encode(text)
    assert time.perf_counter() - start < 5
    assert ids == ReferenceTokenizer(dense).text_ids(text)
    assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("MAX_RUN", LONG_TEXTS["30k spaces"]),
        # Moved along so that the cut falls within a token.
        ("MAX_CHARACTERS", "x" * 10 + LONG_TEXTS["500k line"]),
    ],
    ids=["run", "characters"],
)
def test_other_cuts_give_other_ids(dense, monkeypatch, limit, text):
    ours = TikTokenTokenizer.from_pretrained(dense)
    before = ours.encode(text)
    monkeypatch.setattr(bpe, limit, getattr(bpe, limit) - 1)
    assert ours.encode(text) != before


def test_every_control_id_has_its_name(tk):
    controls = {
        tk.convert_ids_to_tokens(token_id): token_id for token_id in range(320, 576)
    }
    assert len(controls) == 256
    assert controls.items() >= NAMED.items()
    reserved = controls.keys() - NAMED.keys()
    assert {f"<|reserved_token_{controls[name]}|>" for name in reserved} == reserved
    assert tk.all_special_ids == list(range(320, 576))
    assert tk.all_special_tokens == list(controls)
    assert all(tk.convert_tokens_to_ids(name) == i for name, i in controls.items())
    assert (tk.bos_token_id, tk.eos_token_id, tk.pad_token_id) == (320, 321, 575)
    assert tk.get_vocab().items() >= controls.items()


def test_vocabulary_is_the_files(tk):
    assert len(tk) == tk.vocab_size == len(tk.get_vocab()) == 576
    assert sorted(tk.get_vocab().values()) == list(range(576))
    assert tk.convert_tokens_to_ids("no such token") is None
    names = tk.tokenize(" the 你好 é\x00")
    assert names[0] == "Ġthe"
    assert tk.convert_tokens_to_string(names) == " the 你好 é\x00"
    assert tk.convert_ids_to_tokens(tk.convert_tokens_to_ids(names)) == names
    reference = ReferenceTokenizer(Path(tk.vocab_file).parent).tokenizer
    assert tk.get_vocab() == reference.get_vocab()


def test_text_that_spells_a_control_name_is_text(tk):
    for name in (*NAMED, "<|reserved_token_400|>"):
        for text in (f"a{name}", f"{name} ", f"<|open|>thought{name}"):
            ids = tk.encode(text)
            assert max(ids) < 320, text
            assert tk.decode(ids) == text
        assert max(tk.encode(name, split_special_tokens=True)) < 320
        assert tk.encode(f"a{name}b", split_special_tokens=False)[1:-1] == [
            tk.convert_tokens_to_ids(name)
        ]
    assert max(tk("a<|open|>", add_special_tokens=False)["input_ids"]) < 320


def test_a_rank_may_spell_a_control_name(tmp_path):
    """The name means the control id, and text that spells it is text."""
    folder = tmp_path / "model"
    write_tokenizer(folder, vocab_size=512)
    spelled = [b"<|open|>"[:end] for end in range(2, 9)]
    with (folder / "tiktoken.model").open("ab") as file:
        for rank, token in enumerate(spelled, start=256):
            file.write(b"%s %d\n" % (base64.b64encode(token), rank))
    config = (folder / "tokenizer_config.json").read_text()
    for token_id in range(511, 255, -1):
        config = config.replace(f'"{token_id}":', f'"{token_id + 7}":')
    (folder / "tokenizer_config.json").write_text(config)
    tokenizer = TikTokenTokenizer.from_pretrained(folder)
    assert max(tokenizer.encode("<|open|>")) < 263
    assert tokenizer.convert_tokens_to_ids("<|open|>") == 266
    assert tokenizer.encode("<|open|>think<|sep|>")[0] == 266
    assert tokenizer.decode([262, 266]) == "<|open|><|open|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0] == 266


def test_markers_that_mlx_lm_asks_for(tk):
    """Its thinking and tool markers, and an end id's name as a stop word."""
    for tag in ("think", "tools", "response", "message"):
        for first, token_id in (("<|open|>", 323), ("<|close|>", 324)):
            ids = tk.encode(f"{first}{tag}<|sep|>", add_special_tokens=False)
            assert ids == [token_id, *tk.encode(tag), 325]
    for other in (
        "<|open|>",
        "<|end_of_msg|>",
        "[EOS]",
        '<|open|>call tool="x"<|sep|>',
    ):
        assert max(tk.encode(other, add_special_tokens=False)) < 320


def test_raw_completion_that_is_a_conversation(tk):
    """A hand-written XTML prompt has markers; nothing else about it is special."""
    text = '<|open|>message role="user"<|sep|>[EOS]<|close|>message<|sep|>'
    ids = tk.encode(text)
    assert [i for i in ids if i >= 320] == [323, 325, 324, 325]
    assert tk.decode(ids) == text
    assert max(tk.encode(text, add_special_tokens=False)) < 320
    assert max(tk.encode(f"Summarise: {text}")) < 320
    assert max(tk.encode(text, split_special_tokens=True)) < 320


def test_decode_changes_nothing(tk):
    text = " a , b .  [x]\t\n ' s n't"
    assert tk.decode(tk.encode(text), clean_up_tokenization_spaces=True) == text
    ids = [323, *tk.encode("think"), 325, *tk.encode(" x"), 322, 321, 575]
    assert tk.decode(ids) == "<|open|>think<|sep|> x<|end_of_msg|>[EOS][PAD]"
    assert tk.decode(ids, skip_special_tokens=True) == "think x"
    assert tk.decode([]) == ""
    assert tk.decode(322) == "<|end_of_msg|>"
    assert tk.batch_decode([[322], tk.encode("你")]) == ["<|end_of_msg|>", "你"]
    assert tk.decode(tk.encode("吗")[:-1]) == "�"
    assert tk.encode("") == tk("")["input_ids"] == []


def test_ids_of_another_model_are_an_error(tk):
    for odd in (576, -1):
        with pytest.raises(TokenizerError, match=rf"id {odd} is not in .* 576 ids"):
            tk.decode([65, odd])
        with pytest.raises(TokenizerError, match=f"id {odd}"):
            tk.convert_ids_to_tokens([odd])


def test_lone_surrogates_are_replaced_not_raised(tk):
    assert tk.decode(tk.encode("a\ud800b")) == "a�b"


def test_batches_pairs_and_padding(tk):
    batch = tk(["hi", "", "think"], padding=True)
    assert batch["input_ids"] == [[104, 105], [575, 575], [tk.encode("think")[0], 575]]
    assert batch["attention_mask"] == [[1, 1], [0, 0], [1, 0]]
    assert tk.encode("a", "b") == [97, 98]
    assert tk.encode("abcdef", truncation=True, max_length=3) == [97, 98, 99]
    assert tk("hi", return_tensors="np")["input_ids"].tolist() == [[104, 105]]


def test_vocabulary_is_fixed(tk):
    assert tk.add_special_tokens({"pad_token": "[PAD]"}) == 0
    with pytest.raises(TokenizerError, match="'<new>' cannot be added.*fixed at 576"):
        tk.add_tokens(["<new>"])


def test_copies_know_the_same(tk):
    for twin in (copy.deepcopy(tk), pickle.loads(pickle.dumps(tk))):
        assert twin.encode("think 你好") == tk.encode("think 你好")
        assert twin.eos_token_id == tk.eos_token_id


def test_saved_folder_loads_again(tmp_path, tk):
    tk.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "tiktoken.model",
        "tokenizer_config.json",
    }
    write_json(tmp_path / "config.json", {"model_type": "kimi_k3"})
    register_tokenizer()
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(again) is TikTokenTokenizer
    assert again.get_vocab() == tk.get_vocab()
    assert again.special_tokens_map == tk.special_tokens_map
    again.save_pretrained(tmp_path)
    assert (tmp_path / "tiktoken.model").read_bytes() == Path(
        tk.vocab_file
    ).read_bytes()
    assert str(tmp_path) not in (tmp_path / "tokenizer_config.json").read_text()


def test_own_template_of_a_checkpoint_is_kept_but_not_used(tmp_path):
    folder, _ = write_tk(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("theirs")
    tokenizer = TikTokenTokenizer.from_pretrained(folder)
    assert "raise_exception" in tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "theirs"
    with pytest.raises(TokenizerError, match="not rendered by Jinja"):
        TikTokenTokenizer.from_pretrained(folder, chat_template="{{ messages }}")


def test_written_ids(tmp_path):
    ids = write_tokenizer(tmp_path / "small", vocab_size=512)
    assert ids == TokenIds(
        512, bos=256, eos=257, end_of_msg=258, media_pad=277, pad=511
    )
    assert ids.config_entries()["eos_token_id"] == 258
    assert len(TikTokenTokenizer.from_pretrained(tmp_path / "small")) == 512
    for size in (511, 5000):
        with pytest.raises(TokenizerError, match=f"not {size}; choose a"):
            write_tokenizer(tmp_path, vocab_size=size)
