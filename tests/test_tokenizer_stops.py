"""Both end ids stop mlx-lm, whatever the checkpoint's configs say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import stream_generate
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer
from tokenizer_folders import edit_json, write_json, write_tk

import kimi_k3.models.kimi_k3 as model_module
from kimi_k3.nano.tokenizer_files import write_tokenizer
from kimi_k3.tokenizer import TOKENIZER_DEFAULTS
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

EOS, END_OF_MSG = 321, 322

#: eos_token_id of config.json and of generation_config.json; None: no such entry or file.
STATED: dict[str, tuple[Any, Any]] = {
    "only end_of_msg": (END_OF_MSG, None),
    "only EOS": (EOS, None),
    "lists of one": ([EOS], None),
    "both": ([EOS, END_OF_MSG], None),
    "none": (None, None),
    "generation wins, end_of_msg": (EOS, END_OF_MSG),
    "generation wins, EOS": (END_OF_MSG, [EOS]),
    "generation both": (None, [END_OF_MSG, EOS]),
}


def checkpoint(folder: Path, config: Any, generation: Any) -> Path:
    write_tk(folder, **({} if config is None else {"eos_token_id": config}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        write_json(folder / "generation_config.json", {"eos_token_id": generation})
    return folder


def as_mlx_lm_loads(folder: Path):
    """mlx-lm's tokenizer as its ``load`` gets it: with the end ids of the config."""
    from mlx_lm.utils import load_config

    return load_tokenizer(folder, eos_token_ids=load_config(folder).get("eos_token_id"))


@pytest.mark.parametrize("stated", STATED)
def test_union_of_all_sources(tmp_path, stated):
    folder = checkpoint(tmp_path / "model", *STATED[stated])
    assert as_mlx_lm_loads(folder).eos_token_ids == {EOS, END_OF_MSG}
    assert load_tokenizer(folder).eos_token_ids == {EOS, END_OF_MSG}


def test_other_stated_ids_stop_too(tmp_path):
    folder = checkpoint(tmp_path / "model", [575, END_OF_MSG], None)
    assert as_mlx_lm_loads(folder).eos_token_ids == {575, EOS, END_OF_MSG}


def test_config_that_states_neither_end(tmp_path):
    """Of the two, the end of a chat message; mlx-lm asks a tokenizer for one id."""
    folder = checkpoint(tmp_path / "model", 7, None)
    assert as_mlx_lm_loads(folder).eos_token_ids == {7, END_OF_MSG}


def test_ids_come_from_the_folder_not_from_the_release(tmp_path):
    small = tmp_path / "small"
    write_tokenizer(small, vocab_size=512)
    write_json(small / "config.json", {"model_type": "kimi_k3"})
    (small / "generation_config.json").unlink()
    assert load_tokenizer(small).eos_token_ids == {257, 258}
    other = checkpoint(tmp_path / "other", None, None)
    assert load_tokenizer(other).eos_token_ids == {EOS, END_OF_MSG}
    assert model_module.TOKENIZER_DEFAULTS is TOKENIZER_DEFAULTS


def test_a_chosen_end_is_kept(tmp_path):
    folder = checkpoint(tmp_path / "model", EOS, None)
    chosen = load_tokenizer(folder, {"eos_token": "[PAD]"})
    assert chosen.eos_token_id == 575


def test_saved_again_it_still_stops_on_both(tmp_path):
    folder = checkpoint(tmp_path / "model", EOS, None)
    copy = tmp_path / "copy"
    load_tokenizer(folder).save_pretrained(copy)
    (folder / "config.json").rename(copy / "config.json")
    for _ in range(2):
        again = as_mlx_lm_loads(copy)
        assert again.eos_token_ids == {EOS, END_OF_MSG}
        again.save_pretrained(copy)


def test_tokenizer_whose_own_end_is_the_message_end(tmp_path):
    folder = checkpoint(tmp_path / "model", END_OF_MSG, None)
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(eos_token="<|end_of_msg|>"),
    )
    assert as_mlx_lm_loads(folder).eos_token_ids == {EOS, END_OF_MSG}


class Scripted(nn.Module):
    """A model that answers with ``script``, whatever it is given."""

    def __init__(self, script: Sequence[int], vocab_size: int):
        super().__init__()
        self._script = list(script)
        self._vocab_size = vocab_size
        self.layers = [None]

    def make_cache(self):
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        rows, length = inputs.shape
        cache[0].update_and_fetch(*[mx.zeros((rows, 1, length, 1))] * 2)
        token = self._script.pop(0) if length == 1 else self._script[0]
        return mx.broadcast_to(
            100 * (mx.arange(self._vocab_size) == token),
            (rows, length, self._vocab_size),
        ).astype(mx.float32)


@pytest.mark.parametrize("stated", ["only end_of_msg", "only EOS", "none"])
@pytest.mark.parametrize("end", [EOS, END_OF_MSG])
def test_generation_stops_on_each(tmp_path, stated, end):
    tokenizer = as_mlx_lm_loads(checkpoint(tmp_path / "model", *STATED[stated]))
    script = [*tokenizer.encode("think"), 104, 105, end, 104, 104, 104, 104]
    last = None
    text = ""
    for last in stream_generate(
        Scripted(script, len(tokenizer)), tokenizer, [65], max_tokens=20
    ):
        text += last.text
    assert last is not None
    assert last.finish_reason == "stop"
    assert last.token == end
    assert text == "thinkhi"


@pytest.mark.parametrize("end", [EOS, END_OF_MSG])
def test_a_batch_stops_on_each(tmp_path, end):
    tokenizer = as_mlx_lm_loads(checkpoint(tmp_path / "model", END_OF_MSG, None))
    script = [104, 105, end, 104, 104, 104, 104]
    model = Scripted(script, len(tokenizer))
    result = batch_generate(model, tokenizer, [[65]], max_tokens=7)
    assert result.texts == ["hi"]


def test_the_direct_class_knows_its_ends(tmp_path):
    folder, _ = write_tk(tmp_path / "model")
    assert TikTokenTokenizer.from_pretrained(folder).end_ids == [EOS, END_OF_MSG]
