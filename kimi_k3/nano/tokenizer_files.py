"""Write the tokenizer of a small K3: the release's files, a few dozen merges.

Ids lie as in the release: ranks, then 256 control ids of which a dozen have names.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TokenizerError

#: Control names and how far above the first control id each lies. The release's places
#: where they are known: [EOS] 1, <|end_of_msg|> 2, <|media_pad|> 21.
CONTROL_NAMES = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}

#: Each becomes one token, built up byte by byte from its start: a Han word so gives
#: tokens that end within a character.
WORDS = (
    *("think", " the", "message", " role", "user", "system", "tools", "call", '="'),
    *("你好", "中文", "123", "202", "    ", "\n\n", "\r\n", "é", "😀"),
    *("in", "er", "on", " a", "response", "assistant", "argument", " string", "的"),
    *(
        " and",
        " of",
        "ing",
        "number",
        "boolean",
        "object",
        "index",
        " type",
        "function",
    ),
)

_BYTES, _CONTROLS = 256, 256


@dataclass(frozen=True)
class TokenIds:
    """Ids of a written tokenizer that a config needs."""

    vocab_size: int
    bos: int
    eos: int
    end_of_msg: int
    media_pad: int
    pad: int

    def config_entries(self) -> dict[str, int]:
        """The top-level entries of ``config.json``, as in the release."""
        return {
            "bos_token_id": self.bos,
            "eos_token_id": self.end_of_msg,
            "pad_token_id": self.pad,
            "media_placeholder_token_id": self.media_pad,
        }


def write_tokenizer(
    folder: str | Path,
    *,
    vocab_size: int = 576,
    merges: Sequence[bytes] | None = None,
) -> TokenIds:
    """Write tokenizer and generation files into ``folder``; the ids in them.

    ``vocab_size`` counts bytes, merges and control ids; the merges are those of
    :data:`WORDS` unless ``merges`` gives all of them. The folder is created; files of
    the same names are replaced.
    """
    if merges is None:
        merges = list(_merges())
    else:
        vocab_size = _BYTES + len(merges) + _CONTROLS
    wanted = vocab_size - _BYTES - _CONTROLS
    if not 0 <= wanted <= len(merges):
        raise TokenizerError(
            f"a small tokenizer has {_BYTES + _CONTROLS} to "
            f"{_BYTES + _CONTROLS + len(merges)} ids, not {vocab_size}; choose a "
            "vocab_size between."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([byte]) for byte in range(_BYTES)] + list(merges)[:wanted]
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    ids = {name: len(tokens) + place for name, place in CONTROL_NAMES.items()}
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(ids))
    _write_json(folder / "generation_config.json", _generation_config(ids))
    return TokenIds(
        vocab_size=vocab_size,
        bos=ids["[BOS]"],
        eos=ids["[EOS]"],
        end_of_msg=ids["<|end_of_msg|>"],
        media_pad=ids["<|media_pad|>"],
        pad=ids["[PAD]"],
    )


def _merges() -> Iterator[bytes]:
    seen: set[bytes] = set()
    for word in WORDS:
        encoded = word.encode()
        for end in range(2, len(encoded) + 1):
            if (token := encoded[:end]) not in seen:
                seen.add(token)
                yield token


def _tokenizer_config(ids: dict[str, int]) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(token_id): {"content": name, **plain, "special": True}
            for name, token_id in ids.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1048576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids["[BOS]"],
        "do_sample": True,
        "eos_token_id": [ids["<|end_of_msg|>"], ids["[EOS]"]],
        "pad_token_id": ids["[PAD]"],
        "temperature": 1.0,
        "top_p": 0.95,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
