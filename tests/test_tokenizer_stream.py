"""Text as ids arrive: ours and mlx-lm's own streaming over our tokenizer."""

import time
from typing import Any

import pytest
from lines import sample_lines
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizer_folders import load_tk

from kimi_k3.tokenizer.stream import Utf8Detokenizer
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

DETOKENIZERS: dict[str, Any] = {
    "ours": Utf8Detokenizer,
    "mlx-lm's": NaiveStreamingDetokenizer,
}


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    return load_tk(tmp_path_factory.mktemp("tk"))


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


@pytest.mark.parametrize("kind", DETOKENIZERS)
def test_segments_add_up_to_the_text(tk, kind):
    wrapper = TokenizerWrapper(tk, DETOKENIZERS[kind])
    for line in sample_lines(60):
        assert "".join(segments(wrapper, tk.encode(line))) == line


@pytest.mark.parametrize("kind", DETOKENIZERS)
def test_incomplete_characters_are_held_back(tk, kind):
    wrapper = TokenizerWrapper(tk, DETOKENIZERS[kind])
    ids = tk.encode("a吗😎b")
    assert len(ids) == 7
    shown = segments(wrapper, ids)
    assert [text for text in shown if text] == ["a", "吗", "😎", "b"]
    assert segments(wrapper, ids[:3])[-1] == "�"
    broken = [ids[1], 98, 323, 255, 322]
    assert "".join(segments(wrapper, broken)) == tk.decode(broken)


def test_streams_do_not_share_state(tk):
    wrapper = TokenizerWrapper(tk, DETOKENIZERS["ours"])
    first, second = wrapper.detokenizer, wrapper.detokenizer
    ids = tk.encode("吗")
    first.add_token(ids[0])
    second.add_token(98)
    first.add_token(ids[1])
    first.add_token(ids[2])
    assert (first.last_segment, second.last_segment) == ("吗", "b")
    first.reset()
    assert (first.text, first.tokens) == ("", [])


def test_a_long_line_costs_the_same_for_each_id(tk):
    """mlx-lm's own decodes the whole line again for each id; ours does not."""
    stream = TokenizerWrapper(tk, DETOKENIZERS["ours"]).detokenizer
    start = time.perf_counter()
    for _ in range(50_000):
        stream.add_token(97)
        assert stream.last_segment == "a"
    assert time.perf_counter() - start < 5
    assert len(stream.text) == 50_000
