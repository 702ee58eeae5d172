"""The string of a rendered conversation, in the ways that hosts handle strings."""

import copy
import json
import pickle

import pytest
from conversations import INJECTION, assistant, user
from tokenizer_folders import load_tk

from kimi_k3.tokenizer.prompt import Piece, RenderedPrompt
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

PIECES = (Piece("<|open|>", control=True), Piece("a<|open|>"), Piece(" b "))
PROMPT = RenderedPrompt(PIECES)
TEXT = "<|open|>a<|open|> b "


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    return load_tk(tmp_path_factory.mktemp("tk"))


def test_it_is_its_text():
    assert PROMPT == TEXT
    assert hash(PROMPT) == hash(TEXT)
    assert {TEXT: 1}[PROMPT] == 1
    assert json.loads(json.dumps(PROMPT)) == TEXT
    assert PROMPT[0] == "<"
    assert PROMPT[::-1] == TEXT[::-1]


@pytest.mark.parametrize(
    ("kept", "pieces"),
    [
        (PROMPT[:], PIECES),
        (PROMPT[:8], PIECES[:1]),
        (PROMPT[:7], (Piece("<|open|"),)),
        (PROMPT[1:9], (Piece("|open|>"), Piece("a"))),
        (PROMPT[9:], (Piece("<|open|>"), PIECES[2])),
        (PROMPT[-3:-1], (Piece(" b"),)),
        (PROMPT[50:], ()),
        (PROMPT[5:2], ()),
        (PROMPT.strip(), (*PIECES[:2], Piece(" b"))),
        (PROMPT.lstrip("<"), (Piece("|open|>"), *PIECES[1:])),
        (PROMPT.removeprefix("<|open|>"), PIECES[1:]),
        (PROMPT.removesuffix(" b "), PIECES[:2]),
        (PROMPT.removesuffix("x"), PIECES),
        (PROMPT + "<|sep|>", (*PIECES, Piece("<|sep|>"))),
        ("<|sep|>" + PROMPT, (Piece("<|sep|>"), *PIECES)),
        (PROMPT + PROMPT, PIECES + PIECES),
        (str(PROMPT), PIECES),
        (f"{PROMPT}", PIECES),
        (copy.deepcopy(PROMPT), PIECES),
        (pickle.loads(pickle.dumps(PROMPT)), PIECES),
    ],
)
def test_what_keeps_the_pieces(kept, pieces):
    assert isinstance(kept, RenderedPrompt)
    assert kept.pieces == pieces
    assert kept == "".join(piece.text for piece in pieces)


def test_an_ordinary_string_of_it_is_all_text(tk):
    for plain in ("".join(PROMPT), PROMPT.replace("b", "c"), f"{PROMPT} and more"):
        assert type(plain) is str
        assert max(tk.encode(plain)) < 320


def test_a_cached_prefix_is_cut_off_as_mlx_lm_does(tk):
    """mlx-lm cuts a prompt where a probe's query begins; markers in it stay text."""
    options = {"tokenize": False, "add_generation_prompt": True}
    prompt = tk.apply_chat_template([user(INJECTION)], **options)
    probe = tk.apply_chat_template([user("<query>")], **options)
    rest = prompt[probe.index("<query>") :]
    start = tk.apply_chat_template([user("")], continue_final_message=True)
    whole = tk.apply_chat_template([user(INJECTION)], add_generation_prompt=True)
    assert start + tk.encode(rest, add_special_tokens=False) == whole


def test_a_prefilled_answer_goes_on(tk):
    messages = [user("Q"), assistant("Sure, <|sep|>")]
    prompt = tk.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    more = tk.encode(prompt + "ly")
    assert tk.decode(more) == str(prompt) + "ly"
    assert more[-2:] == tk.encode("ly")
