"""Every golden case through mlx-lm's loader: our model against Moonshot's outputs."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error, to_numpy
from golden_data import Case
from loading import load_float32, recorded
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

LOGITS = 1e-4
HIDDEN = 3e-4
STATE = 1e-4
ROUTER = 1e-5

#: Golden tensors that no module of ours hands on.
UNREACHED = ("res_probs", "router_gap", "input_ids", "sub_idx", "kda")


@pytest.fixture(scope="module")
def model(golden: Case) -> Any:
    return load_float32(golden.folder)


@pytest.fixture(scope="module")
def full(golden: Case, model: Any) -> dict[str, Any]:
    """One forward pass without a cache, under the golden file's names."""
    ids = golden.expected("golden_text")["input_ids"]
    with recorded(model) as seen:
        logits = model(ids)
        mx.eval(logits, seen)
    return {**seen, "logits": logits}


def sort_choice(ids: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts in ascending order, and their weights in that order."""
    ids, weights = to_numpy(ids).astype(np.int64), to_numpy(weights)
    order = np.argsort(ids, axis=-1)
    sort = np.take_along_axis
    return sort(ids, order, axis=-1), sort(weights, order, axis=-1)


def test_forward_pass(golden: Case, full: dict[str, Any]) -> None:
    want = golden.expected("golden_text")
    compared = 0
    for name, value in want.items():
        if any(part in name for part in UNREACHED):
            continue
        if name.endswith(("topk_idx", "topk_weight", "kv_latent", "k_rope")):
            continue  # compared in tests of their own
        got = full[name.removesuffix("_sub")]
        if name.endswith("_sub"):
            got = got[:, want["sub_idx"]]
        rel = LOGITS if name == "logits" else HIDDEN
        assert_close(
            got, value, rel=rel, where=f"{golden.name} {name}", dtype=mx.float32
        )
        compared += 1
    assert compared > 3 * golden.text_config["num_hidden_layers"]


def test_router(golden: Case, full: dict[str, Any]) -> None:
    want = golden.expected("golden_text")
    names = [name for name in want if name.endswith("topk_idx")]
    assert len(names) == golden.text_config["num_hidden_layers"] - 1
    for name in names:
        weight = name.replace("idx", "weight")
        routing = full[name.replace("topk_idx", "routing")]
        ids, shares = sort_choice(*routing)
        assert (ids == to_numpy(want[name])).all(), f"{golden.name} {name}"
        assert routing[1].dtype == mx.float32
        # The shares see the rounding of the layers before; alone they are held to ROUTER.
        assert_close(shares, want[weight], rel=5 * ROUTER, where=weight)


def test_router_on_golden_inputs(golden: Case, model: Any) -> None:
    want = golden.expected("golden_text")
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}."
        if f"{at}topk_idx" not in want or f"{at}mlp_in" not in want:
            continue
        x = layer.post_attention_layernorm(want[f"{at}mlp_in"])
        ids, shares = sort_choice(*layer.mlp.route(x))
        assert (ids == to_numpy(want[f"{at}topk_idx"])).all(), at
        assert_close(shares, want[f"{at}topk_weight"], rel=ROUTER, where=at)


def compare_states(cache: list[Any], want: dict[str, mx.array], at: str) -> int:
    """KDA state and convolution state of every layer; how many layers had one."""
    compared = 0
    for i, entry in enumerate(cache):
        if not isinstance(entry, ArraysCache):
            continue
        here = f"{at}layers.{i}."
        conv, state = entry[0], entry[1]
        assert_close(
            state, want[f"{here}recurrent_state"], rel=STATE, where=f"{here}state"
        )
        stored = [want[f"{here}conv_state_{name}"][..., 1:] for name in "qkv"]
        stored = mx.concatenate(stored, axis=1).swapaxes(1, 2)
        assert_close(conv, stored, rel=STATE, where=f"{here}conv")
        compared += 1
    return compared


def check_cached_run(
    model: Any, cache: list[Any], want: dict[str, mx.array], at: str = ""
) -> None:
    """Prefill, then one token at a time: logits and states at both ends."""
    ids = want["input_ids"]
    prefill = int(want[f"{at}prefill_len"])
    logits = model(ids[:, :prefill], cache=cache)
    first = want[f"{at}prefill_logits"]
    assert_close(logits[:, -1], first, rel=LOGITS, where=f"{at}prefill")
    assert compare_states(cache, want, at) > 1
    steps = []
    for t in range(prefill, ids.shape[1]):
        steps.append(model(ids[:, t : t + 1], cache=cache))
        mx.eval(steps[-1])
    stepped = mx.concatenate(steps, axis=1)
    assert_close(stepped, want[f"{at}step_logits"], rel=LOGITS, where=f"{at}steps")
    compare_states(cache, want, f"{at}final.")


def test_prefill_and_decode(golden: Case, model: Any) -> None:
    want = golden.expected("golden_cache")
    check_cached_run(model, model.make_cache(), want)


def test_mla_cache_holds_the_latents(golden: Case, model: Any) -> None:
    want = golden.expected("golden_text")
    ids = want["input_ids"]
    cache = model.make_cache()
    model(ids, cache=cache)
    compared = 0
    for i, entry in enumerate(cache):
        if not isinstance(entry, KVCache):
            continue
        assert entry.keys is not None
        assert entry.values is not None
        latent, shared = (a[:, 0, : ids.shape[1]] for a in (entry.keys, entry.values))
        at = f"layers.{i}."
        assert_close(latent, want[f"{at}kv_latent"], rel=HIDDEN, where=f"{at}latent")
        assert_close(shared, want[f"{at}k_rope"], rel=HIDDEN, where=f"{at}k_rope")
        compared += 1
    assert compared == len(golden.text_config["linear_attn_config"]["full_attn_layers"])


def left_padded_cache(model: Any, padding: list[int]) -> list[Any]:
    return [
        ArraysCache(2, left_padding=padding)
        if layer.is_linear
        else BatchKVCache(padding)
        for layer in model.layers
    ]


@pytest.fixture(scope="module")
def padded_model(padded_golden: Case) -> Any:
    return load_float32(padded_golden.folder)


@pytest.fixture(scope="module")
def padded(padded_golden: Case) -> dict[str, mx.array]:
    return padded_golden.expected("golden_leftpad")


def real_tokens(padded: dict[str, mx.array]) -> tuple[np.ndarray, list[int]]:
    """Which positions are real (B, T), and how many of each row are not."""
    mask = to_numpy(padded["attention_mask"]) == 1
    padding = [int(n) for n in (~mask).sum(axis=1)]
    assert sorted(padding) == [0, 5]
    return mask, padding


def test_left_padded_batch(padded: dict[str, mx.array], padded_model: Any) -> None:
    mask, padding = real_tokens(padded)
    cache = left_padded_cache(padded_model, padding)
    with recorded(padded_model) as seen:
        logits = padded_model(padded["input_ids"], cache=cache)
        mx.eval(logits, seen)
    got = {k: v for k, v in seen.items() if k.endswith(".out")} | {"logits": logits}
    assert len(got) == len(padded_model.layers) + 1
    for name, value in got.items():
        rel = LOGITS if name == "logits" else HIDDEN
        real, want = to_numpy(value)[mask], to_numpy(padded[name])[mask]
        assert_close(real, want, rel=rel, where=name)


def test_left_padded_decode(padded: dict[str, mx.array], padded_model: Any) -> None:
    _, padding = real_tokens(padded)
    cache = left_padded_cache(padded_model, padding)
    check_cached_run(padded_model, cache, padded, "cached.")


def test_a_padded_batch_without_its_mask_fails(
    padded: dict[str, mx.array], padded_model: Any
) -> None:
    """Broken twin: the same batch with a cache that does not know the padding."""
    mask, _ = real_tokens(padded)
    got = to_numpy(padded_model(padded["input_ids"], cache=padded_model.make_cache()))
    assert relative_error(got[mask], to_numpy(padded["logits"])[mask]) > 100 * LOGITS


def test_golden_logits_notice_one_expert(golden: Case, model: Any) -> None:
    """Broken twin: two router rows of one layer swapped."""
    want = golden.expected("golden_text")
    gate = model.layers[1].mlp.gate
    weight = gate.weight
    swapped = [1, 0, *range(2, len(weight))]
    gate.weight = weight[mx.array(swapped)]
    try:
        got = model(want["input_ids"])
        assert relative_error(got, want["logits"]) > 10 * LOGITS
    finally:
        gate.weight = weight
