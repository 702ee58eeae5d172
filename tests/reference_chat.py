"""mlx-vlm's own K3 tokenizer and renderer on one of our tokenizer folders, beside ours."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlx_vlm.models.kimi_k3.processing_kimi_k3 import (
    KimiK3Processor,
    _convert_kimi_k3_tiktoken,
)

from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer


class ReferenceTokenizer:
    """Ids as mlx-vlm 0.7.10 gives them, from ``tiktoken.model`` in ``folder``."""

    def __init__(self, folder: Path):
        # tiktoken else keeps a copy of the file under a name made from its path.
        with mock.patch.dict(os.environ, {"TIKTOKEN_CACHE_DIR": ""}):
            self.tokenizer = _convert_kimi_k3_tiktoken(
                folder / "tiktoken.model", folder / "tokenizer_config.json"
            )
        self.processor = KimiK3Processor(tokenizer=self.tokenizer)

    def text_ids(self, text: str) -> Any:
        """Ids of ``text`` as ordinary text."""
        return self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )

    def chat_ids(self, messages: list[Any], **options: Any) -> Any:
        options = {"add_generation_prompt": False} | options
        return self.processor.apply_chat_template(messages, tokenize=True, **options)


def both_tokenizers(folder: Path) -> tuple[TikTokenTokenizer, ReferenceTokenizer]:
    """Ours and mlx-vlm's of the same folder."""
    return TikTokenTokenizer.from_pretrained(folder), ReferenceTokenizer(folder)


def go_by_way_of_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break our tokenizer: prompts are joined, and every control name in them counts."""
    monkeypatch.setattr(
        TikTokenTokenizer,
        "_ids_of_pieces",
        lambda self, pieces: self._bpe.encode_with_controls(
            "".join(piece.text for piece in pieces)
        ),
    )
