"""Kimi K3's tokenizer and chat format, without code from a checkpoint.

Importing this package loads neither transformers nor tiktoken.
"""

from typing import Any

from .files import check_tokenizer_folder

__all__ = ["TOKENIZER_DEFAULTS", "check_tokenizer_folder", "register_tokenizer"]

#: What mlx-lm reads from the model's module. The end ids are the release's until a
#: tokenizer is loaded, which puts its own there: mlx-lm uses them right after that, for
#: a checkpoint whose config states none.
TOKENIZER_DEFAULTS: dict[str, Any] = {
    "eos_token_ids": [163585, 163586],
    "chat_template_type": "kimi_k3",
    "tool_parser_type": "kimi_k3",
}


def register_tokenizer() -> None:
    """Make transformers' ``AutoTokenizer`` give our class for Kimi K3; idempotent."""
    from .auto import register_tokenizer

    register_tokenizer()
