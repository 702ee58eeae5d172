"""Gated NoPE MLA against the oracle: odd sizes, cached, padded, with and without LoRA."""

from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from closeness import assert_close, relative_error
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache
from oracle_mla import MlaCache
from oracle_pair import MODULE, SIZES, Pair, float64, make_pair

from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.models import mla
from kimi_k3.nano.config import small_config

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


def mask_of(x: mx.array, cache: Any = None) -> Any:
    return create_attention_mask(x, cache, return_array=True)


def attend(pair: Pair, x: mx.array, cache: Any = None) -> mx.array:
    return pair.model.layers[LAYER].self_attn(x, mask_of(x, cache), cache)


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


def grouped_args(**sizes: Any) -> TextArgs:
    """Sizes of which quantisation groups of 32 divide every one."""
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 6,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    } | sizes
    text["num_key_value_heads"] = text["num_attention_heads"]
    return ModelArgs.from_dict(small_config(text, {})).text_config


class TestBlocks:
    """Prompts are attended to in blocks of heads and rows; the result is the same."""

    @pytest.mark.parametrize("tokens", [7, 33])
    @pytest.mark.parametrize("before", [0, 20])
    @pytest.mark.parametrize("block_bytes", [1, 500, 2000, 2**26])
    @pytest.mark.parametrize("absorbs", [True, False])
    def test_any_block_is_the_oracle(
        self,
        pair: Pair,
        monkeypatch: pytest.MonkeyPatch,
        tokens: int,
        before: int,
        block_bytes: int,
        absorbs: bool,
    ):
        attn = pair.model.layers[LAYER].self_attn
        monkeypatch.setattr(attn, "block_bytes", block_bytes)
        monkeypatch.setattr(type(attn), "_absorbs", lambda self, tokens: absorbs)
        monkeypatch.setattr(mla, "BLOCK_ROWS", 5)
        x = pair.inputs(1, before + tokens)
        cache = KVCache()
        if before:
            attend(pair, x[:, :before], cache)
        want, _ = truth(pair, x[0])
        got = attend(pair, x[:, before:], cache)
        assert_close(got[0], want[before:], rel=MODULE, where=f"{block_bytes}")

    def test_left_padded_rows(self, pair: Pair, monkeypatch: pytest.MonkeyPatch):
        attn = pair.model.layers[LAYER].self_attn
        monkeypatch.setattr(attn, "block_bytes", 700)
        monkeypatch.setattr(type(attn), "_absorbs", lambda self, tokens: False)
        monkeypatch.setattr(mla, "BLOCK_ROWS", 4)
        test_left_padded_rows_are_rows_alone(pair)

    def test_quantised_projections(self, pair: Pair, monkeypatch: pytest.MonkeyPatch):
        """Heads of quantised projections are cut the same way."""
        args = grouped_args()
        mx.random.seed(3)
        attn = mla.GatedMLA(args)
        nn.quantize(attn, group_size=32, bits=4)
        x = mx.random.normal((1, 23, args.hidden_size))
        mask = mask_of(x)
        monkeypatch.setattr(mla.GatedMLA, "_absorbs", lambda self, tokens: False)
        want = attn(x, mask)
        attn.block_bytes = 300
        monkeypatch.setattr(mla, "BLOCK_ROWS", 5)
        assert_close(attn(x, mask), want, rel=MODULE, where="quantised")

    def test_blocks_keep_to_their_bytes(self):
        """The scores of a block, over all lengths and widths that K3 meets."""
        attn = mla.GatedMLA(grouped_args())
        for keys in (1, 2048, 65_536, 2**20):
            assert attn._block(8, 1, keys, 2) == (attn.num_heads, 1)
            for tokens in (2, 100, 2048):
                for batch in (1, 8):
                    heads, rows = attn._block(batch, tokens, keys, 2)
                    assert 1 <= heads <= attn.num_heads
                    assert 1 <= rows <= tokens
                    assert batch * heads * rows * keys * 2 <= attn.block_bytes

    @pytest.mark.parametrize("absorbs", [True, False])
    def test_memory_does_not_grow_with_heads_and_rows(
        self, monkeypatch: pytest.MonkeyPatch, absorbs: bool
    ):
        """Peak of a chunk in blocks, against all at once. MLX runs some tasks ahead."""
        monkeypatch.setattr(mla.GatedMLA, "_absorbs", lambda self, tokens: absorbs)
        attn = mla.GatedMLA(grouped_args(num_attention_heads=32))
        x = mx.random.normal((1, 512, attn.g_proj.weight.shape[1]))
        cache = KVCache()
        lora, shared = attn.kv_lora_rank, attn.shared_dim
        latent = mx.random.normal((1, 1, 512, lora))
        cache.update_and_fetch(latent, mx.random.normal((1, 1, 512, shared)))
        mask = mask_of(x, cache)
        mx.eval(attn.parameters(), x, mask, cache.state)
        peaks = []
        for block_bytes in (2**30, 2**20):
            attn.block_bytes = block_bytes
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(attn(x, mask, copy(cache)))
            peaks.append(mx.get_peak_memory() - before)
        whole = 32 * 512 * 1024 * 4
        assert peaks[0] > whole
        assert peaks[1] < whole / 2
