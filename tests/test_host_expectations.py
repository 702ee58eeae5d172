"""What mlx-lm's generic tools expect of any model, tried on ours.

mlx-lm's own tests ask the same of every model of its own (see docs/host-tests.md); here
it needs nothing but the installed packages. The class is the one that mlx-lm finds.
"""

import copy
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_close, relative_error
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from tiny_k3 import VOCAB, t0_config, t0_model

from kimi_k3.models.mla import fetch

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

PROMPT = mx.array([[4, 71, 300, 9, 12]])


def cast_all(model: Any, dtype: mx.Dtype) -> None:
    """Cast every parameter, also those that a checkpoint keeps in float32."""
    model.update(tree_map(lambda p: p.astype(dtype), model.parameters()))


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model()


def test_the_class_that_mlx_lm_finds_is_this_one():
    found = importlib.import_module("mlx_lm.models.kimi_k3")
    model = found.Model(found.ModelArgs.from_dict(t0_config()))
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    assert model.model_type == "kimi_k3"
    assert len(model.layers) == 5
    assert len(make_prompt_cache(model)) == 5


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_cast_model_answers_in_its_dtype(dtype: mx.Dtype):
    """Without a cache, in prefill and in decode, one row or two; numbers stay finite."""
    model = t0_model()
    cast_all(model, dtype)
    whole = model(PROMPT)
    cache = make_prompt_cache(model)
    filled = model(PROMPT, cache=cache)
    decoded = model(mx.argmax(filled[:, -1:], axis=-1), cache=cache)
    rows = model(mx.concatenate([PROMPT, PROMPT[:, ::-1]]))
    shapes = [whole.shape, filled.shape, decoded.shape, rows.shape]
    assert shapes == [(1, 5, VOCAB), (1, 5, VOCAB), (1, 1, VOCAB), (2, 5, VOCAB)]
    for logits in (whole, filled, decoded, rows):
        assert logits.dtype == dtype
        assert mx.isfinite(logits).all()
    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore
    assert {array.dtype for _, array in flat} == {dtype}


def test_prefill_and_decode_say_what_one_pass_says(model: Any):
    want = model(PROMPT)
    cache = make_prompt_cache(model)
    parts = [model(PROMPT[:, :3], cache=cache), model(PROMPT[:, 3:4], cache=cache)]
    parts.append(model(PROMPT[:, 4:], cache=cache))
    assert_close(mx.concatenate(parts, axis=1), want, rel=1e-5)


def test_rows_of_a_batch_do_not_meet(model: Any):
    rows = mx.concatenate([PROMPT, PROMPT[:, ::-1]])
    together = model(rows)
    for row in range(2):
        assert_close(together[row : row + 1], model(rows[row : row + 1]), rel=1e-5)
    assert relative_error(together[:1], together[1:]) > 1e-2


def test_a_copy_lives_on_its_own(model: Any):
    want = model(PROMPT)
    twin = copy.deepcopy(model)
    cast_all(twin, mx.float16)
    assert_close(model(PROMPT), want, rel=0.0, dtype=mx.float32)
    assert twin(PROMPT).dtype == mx.float16
    copied = copy.deepcopy(model)
    assert_close(copied(PROMPT), want, rel=0.0)


def test_embeddings_stand_in_for_ids(model: Any):
    """mlx-lm hands over embeddings without ids to match; a zeroed row must show."""
    embeddings = model.model.embed_tokens(PROMPT)
    assert_close(model(PROMPT, input_embeddings=embeddings), model(PROMPT), rel=0.0)
    other = model(PROMPT, input_embeddings=mx.zeros_like(embeddings))
    assert relative_error(other, model(PROMPT)) > 1e-2


@pytest.mark.parametrize("bits", [4, 8])
def test_kv_bits(bits: int, tmp_path: Path):
    """mlx-lm's ``--kv-bits`` quantises the latents; KDA's states stay as they are."""
    model = t0_model(kv_lora_rank=64, qk_rope_head_dim=64)  # whole groups of 64
    cache = make_prompt_cache(model)
    steps = generate_step(
        PROMPT[0],
        model,
        max_tokens=5,
        prompt_cache=cache,
        prefill_step_size=2,
        kv_bits=bits,
        quantized_kv_start=0,
    )
    assert all(mx.isfinite(logprobs).all() for _, logprobs in steps)
    kinds = [ArraysCache if x.is_linear else QuantizedKVCache for x in model.layers]
    assert [type(c) for c in cache] == kinds

    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    more = mx.array([[7, 8]])
    assert_close(model(more, cache=loaded), model(more, cache=cache), rel=1e-6)


@pytest.mark.parametrize(("bits", "rel"), [(4, 1e-1), (8, 6e-3)])
def test_quantised_latents_come_back_as_numbers(bits: int, rel: float):
    """All steps so far, each value at most half a step of its group away."""
    latent, shared = mx.random.normal((2, 1, 1, 7, 64), key=mx.random.key(0))
    cache = QuantizedKVCache(group_size=64, bits=bits)
    fetch(cache, latent[..., :5, :], shared[..., :5, :])
    for got, want in zip(
        fetch(cache, latent[..., 5:, :], shared[..., 5:, :]),
        (latent, shared),
        strict=True,
    ):
        assert assert_close(got, want, rel=rel) > 0
