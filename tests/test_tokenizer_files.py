"""Tokenizer files that are missing, damaged or of another model; packages too."""

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import edit_json, write_tk

from kimi_k3.errors import TokenizerError
from kimi_k3.tokenizer import check_tokenizer_folder
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer


def rank_line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


def edit_ranks(edit: Callable[[list[bytes]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tiktoken.model"
        lines = path.read_bytes().splitlines()
        edit(lines)
        path.write_bytes(b"\n".join(lines))

    return change


def edit_config(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", edit)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        for entry in config["added_tokens_decoder"].values():
            if entry["content"] == old:
                entry["content"] = new

    return edit


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no vocabulary": (
        lambda folder: (folder / "tiktoken.model").unlink(),
        r"tiktoken\.model",
    ),
    "not base64": (
        edit_ranks(lambda lines: lines.__setitem__(7, b"??? 7")),
        r"tiktoken\.model, line 8: b'\?\?\? 7' is not a base64 token and a rank",
    ),
    "no rank": (
        edit_ranks(lambda lines: lines.__setitem__(9, b"AAAA")),
        r"tiktoken\.model, line 10: b'AAAA' is not",
    ),
    "rank missing": (
        edit_ranks(lambda lines: lines.pop(300)),
        r"line 301: rank 301 of .* where rank 300 of a new token was expected",
    ),
    "token twice": (
        edit_ranks(lambda lines: lines.__setitem__(300, rank_line(b"a", 300))),
        r"line 301: rank 300 of b'a' where rank 300 of a new token",
    ),
    "cut": (
        edit_ranks(lambda lines: lines.__delitem__(slice(100, None))),
        r"tiktoken\.model holds 100 ranks but none for byte 0x64",
    ),
    "a merge lost": (
        edit_ranks(lambda lines: lines.__delitem__(slice(319, None))),
        r"names id 575 \('\[PAD\]'\), but the control ids .* are 319 to 574",
    ),
    "no marker": (
        edit_config(rename("<|open|>", "<|im_start|>")),
        r"tokenizer_config\.json does not name <\|open\|> among the control ids",
    ),
    "name twice": (
        edit_config(rename("<|close|>", "<|open|>")),
        r"tokenizer_config\.json gives the name '<\|open\|>' to two control ids",
    ),
    "unnamed end": (
        edit_config(lambda config: config.update(eos_token="<|im_end|>")),
        r"eos_token names '<\|im_end\|>', which added_tokens_decoder does not",
    ),
    "unnamed extra": (
        edit_config(lambda config: config.update(additional_special_tokens=["<x>"])),
        r"special_tokens names '<x>'",
    ),
    "no config": (
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        r"tokenizer_config\.json cannot be read",
    ),
    "config is no JSON": (
        lambda folder: (folder / "tokenizer_config.json").write_text("{"),
        r"tokenizer_config\.json is not JSON",
    ),
    "config is a list": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        r"tokenizer_config\.json is not a JSON object",
    ),
    "no names": (
        edit_config(lambda config: config.pop("added_tokens_decoder")),
        r"has no added_tokens_decoder",
    ),
    "key is no id": (
        edit_config(lambda config: config["added_tokens_decoder"].update({"x": "y"})),
        r"tokenizer_config\.json: added_tokens_decoder has the key 'x', which is no id",
    ),
}

ONLY_WHEN_CHECKED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other class": (
        edit_config(
            lambda config: config.update(tokenizer_class="PreTrainedTokenizerFast")
        ),
        r"tokenizer_class is 'PreTrainedTokenizerFast', Kimi K3's is 'TikTokenTokenizer'",
    ),
    "no class": (
        edit_config(lambda config: config.pop("tokenizer_class")),
        r"tokenizer_class is None",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_when_loading(tmp_path, fault):
    folder, _ = write_tk(tmp_path / "model")
    change, message = FAULTS[fault]
    change(folder)
    with pytest.raises(TokenizerError, match=message):
        TikTokenTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("fault", FAULTS | ONLY_WHEN_CHECKED)
def test_faults_are_named_by_the_check(tmp_path, fault):
    folder, _ = write_tk(tmp_path / "model")
    check_tokenizer_folder(folder)
    change, message = (FAULTS | ONLY_WHEN_CHECKED)[fault]
    change(folder)
    with pytest.raises(TokenizerError, match=message):
        check_tokenizer_folder(folder)


def test_other_ways_to_write_special_tokens(tmp_path):
    folder, _ = write_tk(tmp_path / "model")
    entry = {"__type": "AddedToken", "content": "[EOS]", "lstrip": False}
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(
            eos_token=entry,
            unk_token=None,
            add_bos_token=False,
            extra_special_tokens={"media_token": "<|media_pad|>"},
        ),
    )
    check_tokenizer_folder(folder)
    tokenizer = TikTokenTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("[EOS]", None)
    assert tokenizer.special_tokens_map["media_token"] == "<|media_pad|>"
    tokenizer.save_pretrained(tmp_path / "copy")
    again = TikTokenTokenizer.from_pretrained(tmp_path / "copy")
    assert again.special_tokens_map == tokenizer.special_tokens_map


def test_missing_package_is_a_hint(tmp_path, monkeypatch):
    folder, _ = write_tk(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(TokenizerError, match="pip install tiktoken") as raised:
        TikTokenTokenizer.from_pretrained(folder)
    assert "\n" not in str(raised.value)
