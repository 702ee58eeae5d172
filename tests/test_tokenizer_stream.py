"""Text as ids arrive: mlx-lm's own streaming over our tokenizer."""

import time

import pytest
from lines import sample_lines
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizer_folders import load_tk

from kimi_k3.tokenizer.decoded import DecodedText
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    return load_tk(tmp_path_factory.mktemp("tk"))


@pytest.fixture(scope="module")
def wrapper(tk: TikTokenTokenizer) -> TokenizerWrapper:
    return TokenizerWrapper(tk)


def segments(wrapper: TokenizerWrapper, ids: list[int]) -> list[str]:
    """What a host shows after each id and after the end."""
    stream = wrapper.detokenizer
    shown = []
    for token_id in ids:
        stream.add_token(token_id)
        shown.append(stream.last_segment)
    stream.finalize()
    shown.append(stream.last_segment)
    assert stream.text == "".join(shown)
    assert stream.tokens == ids
    return shown


def test_segments_add_up_to_the_text(tk, wrapper):
    for line in sample_lines(60):
        assert "".join(segments(wrapper, tk.encode(line))) == line


def test_incomplete_characters_are_held_back(tk, wrapper):
    ids = tk.encode("a吗😎b")
    assert len(ids) == 7
    shown = segments(wrapper, ids)
    assert [text for text in shown if text] == ["a", "吗", "😎", "b"]
    assert segments(wrapper, ids[:3])[-1] == "�"
    broken = [ids[1], 98, 323, 255, 322]
    assert "".join(segments(wrapper, broken)) == tk.decode(broken)


def test_segments_know_control_ids(tk, wrapper):
    text = "a<|sep|>\n<|open|>吗"
    ids = tk.encode(text, split_special_tokens=False)
    shown = segments(wrapper, ids)
    whole = DecodedText.joined(*shown)
    assert whole.controls == tk.decode(ids).controls == ((1, 8), (9, 17))
    spelled = segments(wrapper, tk.encode(text, split_special_tokens=True))
    assert DecodedText.joined(*spelled) == whole
    assert DecodedText.joined(*spelled).controls == ()


def seconds(wrapper: TokenizerWrapper, ids: list[int]) -> float:
    begun = time.process_time()
    segments(wrapper, ids)
    return time.process_time() - begun


def test_a_long_answer_costs_little(wrapper):
    """Lines cost what they are long; a line of 3,000 tokens, seconds at the very most."""
    line = [97] * 39 + [10]
    few = min(seconds(wrapper, line * 25) for _ in range(3))
    many = min(seconds(wrapper, line * 200) for _ in range(2))
    assert many < 24 * few
    assert seconds(wrapper, [97] * 3000) < 5
