"""Configurations of small K3s: the real one with other sizes.

Everything that is not a size (activation, gate bound, router, residual design,
quantisation block) is the released model's, so a small K3 takes the same code paths.
"""

from typing import Any

from ..checkpoint.source_layout import full_size_config
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


#: A K3 of 3.7 M parameters in 2.7 MB: 9 layers in 3 residual blocks, 32 experts, top-4.
NANO_CONFIG: dict[str, Any] = small_config(
    text={
        "vocab_size": 576,
        "hidden_size": 64,
        "num_hidden_layers": 9,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
        "attn_res_block_size": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
    },
    linear={
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8, 9],
        "num_heads": 2,
        "head_dim": 32,
    },
)

#: Ids of the 256 control tokens: the last of the vocabulary, as in the release.
CONTROL_TOKENS = range(
    NANO_CONFIG["text_config"]["vocab_size"] - 256,
    NANO_CONFIG["text_config"]["vocab_size"],
)
