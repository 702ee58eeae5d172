"""mlx-vlm's own K3 tokenizer and renderer on one of our tokenizer folders."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

from mlx_vlm.models.kimi_k3.processing_kimi_k3 import (
    KimiK3Processor,
    _convert_kimi_k3_tiktoken,
)


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
