"""The tiny checkpoints that tests share.

T0  hidden 64, 5 layers (KDA, KDA, KDA, MLA, KDA), 16 experts top-4, float32, in memory
T1  the same sizes in the source format: folder with 3 shards, vision keys, A_log of 4
    heads stored with 6 entries
T2  a graded two-bank build made from a T1 whose experts are 64 wide: 12, 9, 16 and 7
    experts a layer, the third MoE layer with one bank; in the published builds' format
TK  tokenizer folder: 256 byte ranks and some merges, 256 control ids above them
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from two_bank_copy import write_two_bank_copy

from kimi_k3.nano.config import small_config
from kimi_k3.nano.random_checkpoint import random_values, write_random_checkpoint
from kimi_k3.nano.tokenizer_files import write_tokenizer

VOCAB = 576

TEXT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "attn_res_block_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
}

LINEAR_SIZES: dict[str, Any] = {
    "kda_layers": [1, 2, 3, 5],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 32,
}

VISION_SIZES: dict[str, Any] = {
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "mm_hidden_size": 32,
    "qkv_hidden_size": 48,
    "text_hidden_size": 64,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}

#: Stored length of A_log in T1, for 4 heads.
A_LOG_STORED = 6

#: What T2's source has besides T1's sizes: experts wide enough for groups of 64.
WIDE_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
}

#: T2: experts kept in layers 1 to 4, and how many of them are in the high bank.
T2_COUNTS = (12, 9, 16, 7)
T2_HIGH = (5, 1, 0, 6)


def t0_config(**text: Any) -> dict[str, Any]:
    """``config.json`` of T0 without an expert format; ``text`` changes text_config."""
    linear = LINEAR_SIZES | text.pop("linear_attn_config", {})
    config = small_config(TEXT_SIZES | text, linear)
    del config["text_config"]["quantization_config"]
    return config


def t1_config(**text: Any) -> dict[str, Any]:
    """``config.json`` of T1, with the compressed-tensors block and a vision tower."""
    linear = LINEAR_SIZES | text.pop("linear_attn_config", {})
    vision = VISION_SIZES | {
        "text_hidden_size": (TEXT_SIZES | text)["hidden_size"],
    }
    return small_config(TEXT_SIZES | text, linear, vision=vision)


def random_parameters(model: Any, *, seed: int = 0) -> None:
    """Fill every parameter of ``model`` with the float32 values of the T0 recipe."""
    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore
    values = [
        (name, mx.array(random_values(name, array.shape, seed=seed)))
        for name, array in flat
    ]
    model.update(tree_unflatten(values))
    mx.eval(model.parameters())


def t0_model(*, seed: int = 0, **text: Any) -> Any:
    """T0: our Model with random float32 weights, in evaluation mode."""
    from kimi_k3.models import Model, ModelArgs

    model = Model(ModelArgs.from_dict(t0_config(**text)))
    random_parameters(model, seed=seed)
    model.eval()
    return model


def write_tk(folder: Path) -> Path:
    """TK, the tokenizer files that fit T0, T1 and T2, into ``folder``."""
    write_tokenizer(folder, vocab_size=VOCAB)
    return folder


def write_t1(
    folder: Path, *, seed: int = 0, tokenizer: bool = False, **text: Any
) -> Path:
    """T1 into ``folder``, which is returned; with ``tokenizer`` also TK."""
    if tokenizer:
        write_tk(folder)
    return write_random_checkpoint(
        folder, t1_config(**text), seed=seed, shards=3, a_log_stored=A_LOG_STORED
    )


def t2_keep() -> dict[int, list[int]]:
    """The source expert behind each expert of T2, by layer; not in source order."""
    total = TEXT_SIZES["num_experts"]
    return {
        layer: [(5 * expert + layer) % total for expert in range(count)]
        for layer, count in enumerate(T2_COUNTS, start=1)
    }


def write_t2(
    folder: Path, *, seed: int = 0, tokenizer: bool = False, **text: Any
) -> Path:
    """T2 into ``folder``, which is returned; with ``tokenizer`` also TK."""
    with TemporaryDirectory() as source:
        write_t1(Path(source), seed=seed, tokenizer=tokenizer, **(WIDE_EXPERTS | text))
        high = dict(enumerate(T2_HIGH, start=1))
        return write_two_bank_copy(source, folder, keep=t2_keep(), high=high)
