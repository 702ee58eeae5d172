"""Gated NoPE MLA against the oracle: odd sizes, cached, padded, with and without LoRA."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache
from oracle_mla import MlaCache
from oracle_pair import MODULE, SIZES, Pair, float64, make_pair

LAYER = 3

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 20},
    "no-lora": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": None,
    },
    "no-gate": {"mla_use_output_gate": False, "qk_nope_head_dim": 10},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"), **VARIANTS[request.param])


def attend(pair: Pair, x: mx.array, cache: Any = None) -> mx.array:
    mask = create_attention_mask(x, cache, return_array=True)
    return pair.model.layers[LAYER].self_attn(x, mask, cache)


def truth(pair: Pair, x: mx.array, cache: MlaCache | None = None) -> tuple[Any, Any]:
    """Output (T, hidden) of one row and the cache afterwards."""
    out, cache, _ = pair.oracle.attend(LAYER, float64(x), cache)
    return out, cache


@pytest.mark.parametrize("tokens", SIZES)
def test_output_is_the_oracle(pair: Pair, tokens: int) -> None:
    x = pair.inputs(2, tokens)
    want = np.stack([truth(pair, row)[0] for row in x])
    assert_close(attend(pair, x), want, rel=MODULE, where="no cache", dtype=mx.float32)
    cache = KVCache()
    assert_close(attend(pair, x, cache), want, rel=MODULE, where="cache")
    latent = np.stack([truth(pair, row)[1].latent for row in x])
    assert cache.keys is not None
    assert_close(cache.keys[:, 0, :tokens], latent, rel=MODULE, where="latent")


def test_any_split_is_the_oracle(pair: Pair) -> None:
    """33 tokens in pieces: single tokens take the absorbed form, others do not."""
    x = pair.inputs(1, 33)
    want, _ = truth(pair, x[0])
    for split in ([33], [1] * 33, [1, 31, 1], [2, 1, 30]):
        cache, out, start = KVCache(), [], 0
        for size in split:
            out.append(attend(pair, x[:, start : start + size], cache))
            start += size
        got = mx.concatenate(out, axis=1)
        assert_close(got[0], want, rel=MODULE, where=f"{split}")


def test_left_padded_rows_are_rows_alone(pair: Pair) -> None:
    x = pair.inputs(3, 9)
    padding = [0, 8, 5]
    cache = BatchKVCache(padding)
    first, then = attend(pair, x, cache), attend(pair, x[:, :1], cache)
    for row, pad in enumerate(padding):
        alone = mx.concatenate([x[row, pad:], x[row, :1]])
        want, _ = truth(pair, alone)
        got = mx.concatenate([first[row, pad:], then[row]])
        assert_close(got, want, rel=MODULE, where=f"row {row}")


@pytest.mark.parametrize("pair", ["lora", "no-lora"], indirect=True)
@pytest.mark.parametrize("mistake", ["epsilon", "gate", "scale", "noncausal"])
def test_a_mistake_is_seen(pair: Pair, mistake: str) -> None:
    """Broken twin."""
    attn = pair.model.layers[LAYER].self_attn
    x = 0.01 * pair.inputs(1, 33)
    want, _ = truth(pair, x[0])
    assert_close(attend(pair, x)[0], want, rel=MODULE, where="intact")
    if mistake == "epsilon":
        norm, eps = attn.kv_a_layernorm, attn.kv_a_layernorm.eps
        norm.eps = 1e-5
        got = attend(pair, x)
        norm.eps = eps
    elif mistake == "scale":
        x = 100 * x
        want, _ = truth(pair, x[0])
        attn.scale *= 1.01
        got = attend(pair, x)
        attn.scale /= 1.01
    elif mistake == "noncausal":
        got = attn(x, None, None)
    else:
        attn.use_gate = False
        got = attend(pair, x)
        attn.use_gate = True
    assert relative_error(got[0], want) > 10 * MODULE
