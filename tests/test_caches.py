"""Report B09: the caches are mlx-lm's own and survive whatever mlx-lm does to them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_close
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from tiny_k3 import t0_model

TOKENS = mx.array([[11, 7, 300, 45, 2, 99, 8, 150, 31, 77]])


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model()


def used(model: Any, tokens: mx.array) -> list[Any]:
    """A cache that has seen ``tokens``."""
    cache = make_prompt_cache(model)
    mx.eval(model(tokens, cache=cache))
    return cache


def following(model: Any, cache: list[Any], token: int = 5) -> mx.array:
    """Logits of one more token, (B, vocab)."""
    batch = cache[0].batch_size
    return model(mx.full((batch, 1), token), cache=cache)[:, 0]


def merged(*caches: list[Any]) -> list[Any]:
    return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]


def test_one_host_cache_a_layer_with_two_slots(model: Any) -> None:
    cache = make_prompt_cache(model)
    kinds = [ArraysCache if layer.is_linear else KVCache for layer in model.layers]
    assert [type(c) for c in cache] == kinds
    assert all(len(c.cache) == 2 for c in cache if isinstance(c, ArraysCache))


def test_merged_and_extracted_rows_go_on_as_alone(model: Any) -> None:
    short, long = TOKENS[:, :3], TOKENS
    both = merged(used(model, short), used(model, long))
    together = following(model, both)
    for row, tokens in enumerate((short, long)):
        alone = following(model, used(model, tokens))
        assert_close(together[row : row + 1], alone, rel=1e-5, where=f"row {row}")
        taken = [c.extract(row) for c in both]
        want = used(model, mx.concatenate([tokens, mx.array([[5]])], axis=1))
        assert_close(
            following(model, taken),
            following(model, want),
            rel=1e-5,
            where=f"row {row}",
        )


def test_merging_a_fresh_cache_with_a_used_one(model: Any) -> None:
    both = merged(make_prompt_cache(model), used(model, TOKENS))
    together = following(model, both)
    assert_close(together[:1], following(model, make_prompt_cache(model)), rel=1e-5)
    assert_close(together[1:], following(model, used(model, TOKENS)), rel=1e-5)


def test_filtered_and_extended_batches(model: Any) -> None:
    first = merged(used(model, TOKENS[:, :4]), used(model, TOKENS[:, :6]))
    second = merged(used(model, TOKENS))
    for kept, more in zip(first, second, strict=True):
        kept.filter(mx.array([1]))
        kept.extend(more)
    together = following(model, first)
    assert_close(together[:1], following(model, used(model, TOKENS[:, :6])), rel=1e-5)
    assert_close(together[1:], following(model, used(model, TOKENS)), rel=1e-5)


def test_state_and_file_round_trips(model: Any, tmp_path: Path) -> None:
    want = following(model, used(model, TOKENS))
    cache = used(model, TOKENS)
    copied = [type(c).from_state(c.state) for c in cache]
    assert_close(following(model, copied), want, rel=1e-6)

    save_prompt_cache(str(tmp_path / "cache.safetensors"), used(model, TOKENS))
    loaded: Any = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [type(c) for c in loaded] == [type(c) for c in cache]
    assert_close(following(model, loaded), want, rel=1e-6)


def test_trimming_never_pretends(model: Any) -> None:
    cache = used(model, TOKENS)
    before = following(
        model, [type(c).from_state(c.state) for c in used(model, TOKENS)]
    )
    assert not can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 3) == 0
    assert_close(following(model, cache), before, rel=1e-6)


def test_a_lost_state_shows(model: Any) -> None:
    cache = used(model, TOKENS)
    cache[0][1] = mx.zeros_like(cache[0][1])
    with pytest.raises(AssertionError):
        assert_close(
            following(model, cache), following(model, used(model, TOKENS)), rel=1e-5
        )
