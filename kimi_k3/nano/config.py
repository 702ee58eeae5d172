"""Configurations of small K3s: the real one with other sizes.

Everything that is not a size (activation, gate bound, router, residual design,
quantisation block) is the released model's, so a small K3 takes the same code paths.
"""

import json
from typing import Any

from ..checkpoint.source_layout import full_size_config
from . import NANO_FOLDER
from .tokenizer_files import CONTROL_NAMES


def small_config(
    text: dict[str, Any],
    linear: dict[str, Any],
    *,
    vision: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The released config with ``text`` and ``linear`` (KDA) sizes replaced.

    ``vision`` replaces sizes of the vision tower; None leaves the tower out. Token ids
    are those of :func:`~kimi_k3.nano.tokenizer_files.write_tokenizer` for the
    ``vocab_size``, which must be in ``text``.
    """
    config = full_size_config()
    config["text_config"] |= text
    config["text_config"]["linear_attn_config"] |= linear
    if vision is None:
        del config["vision_config"]
    else:
        config["vision_config"] |= vision
    return config | _token_ids(text["vocab_size"])


def _token_ids(vocab_size: int) -> dict[str, int]:
    first = vocab_size - 256
    names = {
        "bos_token_id": "[BOS]",
        "eos_token_id": "<|end_of_msg|>",
        "pad_token_id": "[PAD]",
        "media_placeholder_token_id": "<|media_pad|>",
    }
    return {key: first + CONTROL_NAMES[name] for key, name in names.items()}


#: The configuration of the shipped nano.
NANO_CONFIG: dict[str, Any] = json.loads(
    (NANO_FOLDER / "config.json").read_text(encoding="utf-8")
)
