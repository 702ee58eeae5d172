"""Bytes of a conversation, counted from the config = those of the caches themselves."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tiny_k3 import t0_model

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import ModelArgs
from kimi_k3.errors import KimiK3Error
from kimi_k3.machine.sequence_memory import (
    CACHE_STEP,
    QuantisedCache,
    latents_bytes,
    state_bytes,
    token_bytes,
)

FULL_SIZE = ModelArgs.from_dict(full_size_config()).text_config


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model(kv_lora_rank=64, qk_rope_head_dim=32)


def held(model: Any, tokens: int, chunk: int, **options: Any) -> tuple[int, int]:
    """Bytes of the MLA layers' caches and of the KDA layers', after a generation."""
    cache = make_prompt_cache(model)
    prompt = mx.array([(37 * i) % 97 for i in range(tokens - 5)])
    for _ in generate_step(
        prompt,
        model,
        prompt_cache=cache,
        max_tokens=5,
        prefill_step_size=chunk,
        **options,
    ):
        pass
    arrays = {True: 0, False: 0}
    for entry in cache:
        flat: Any = tree_flatten(
            entry.cache
            if isinstance(entry, ArraysCache)
            else [entry.keys, entry.values]
        )
        arrays[isinstance(entry, ArraysCache)] += sum(a.nbytes for _, a in flat)
    return arrays[False], arrays[True]


@pytest.mark.parametrize(("tokens", "chunk"), [(20, 2048), (256, 100), (600, 64)])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_counts_are_what_the_caches_hold(
    model: Any, tokens: int, chunk: int, bits: int | None
):
    args, options = model.args.text_config, {}
    quantised = QuantisedCache(bits, 32) if bits else None
    if quantised:
        options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 0}
    latents, states = held(model, tokens, chunk, **options)
    assert states == state_bytes(args, size=4)
    most = latents_bytes(args, tokens, size=4, quantised=quantised)
    per_token = token_bytes(args, size=4, quantised=quantised)
    assert most - CACHE_STEP * per_token < latents <= most
    assert latents % per_token == 0


def test_full_size():
    """What the release takes: figures that the guides give."""
    assert token_bytes(FULL_SIZE) == 27_648
    assert round(state_bytes(FULL_SIZE) / 1e6) == 449
    assert latents_bytes(FULL_SIZE, 0) == 0
    eight = token_bytes(FULL_SIZE, quantised=QuantisedCache(8))
    assert eight == 24 * (576 + 9 * 4)


def test_groups_have_to_divide():
    with pytest.raises(KimiK3Error, match="does not divide the 64 numbers"):
        token_bytes(FULL_SIZE, quantised=QuantisedCache(8, 128))
