"""A small two-bank model on the package's kernels, against the same model without.

No reference may run: where one is asked for, the test fails.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_close
from loading import load_float32
from mlx_lm.models.cache import ArraysCache, BatchKVCache
from simulated import no_references
from tiny_k3 import T2_COUNTS, TEXT_SIZES, write_t2

from kimi_k3.kernels import expert_down_combine
from kimi_k3.models.expert_banks import TwoBankSwitchGLU

Simulate = Callable[..., Any]

EXPERT_LAYERS = len(T2_COUNTS)
KDA_LAYERS = 4

#: Two before each layer and one before the head, but none reads an empty stack.
MIXES = 2 * TEXT_SIZES["num_hidden_layers"]

#: Launches of one forward pass, whatever the attention kernel.
LAUNCHES = {
    "kimi_k3_attention_residual_mix": MIXES,
    "kimi_k3_expert_down_combine": EXPERT_LAYERS,
    "kimi_k3_expert_gate_up": EXPERT_LAYERS,
    "kimi_k3_router_logits": EXPERT_LAYERS,
    "kimi_k3_select_experts": EXPERT_LAYERS,
}

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[None, 0.6], ids=["all experts", "top p"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """T2: two banks in three of four expert layers, one bank in the fourth."""
    folder = tmp_path_factory.mktemp("two-banks")
    model = load_float32(write_t2(folder, expert_top_p=request.param))
    banks = [layer.mlp.switch_mlp for layer in model.layers[1:]]
    assert sum(isinstance(bank, TwoBankSwitchGLU) for bank in banks) == 3
    return model


def filled_caches(model: Any, prompt: list[int]) -> list[Any]:
    caches = model.make_cache()
    mx.eval(model(mx.array([prompt]), cache=caches))
    return caches


def merged(rows: list[list[Any]]) -> list[Any]:
    """Caches of a batch made of caches of its rows."""
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


def steps(model: Any, caches: list[Any], tokens: list[list[int]]) -> mx.array:
    """Logits of all ``tokens`` (B, T), one decode step after the other."""
    logits = [
        model(mx.array([row[t : t + 1] for row in tokens]), cache=caches)
        for t in range(len(tokens[0]))
    ]
    return mx.concatenate(logits, axis=1)


def counts(launches: Any) -> dict[str, int]:
    return {name: launches.count(name) for name in launches.names}


def test_decode_steps(model: Any, simulated_kernels: Simulate):
    caches = filled_caches(model, [7, 8, 9, 10, 11])
    expected = steps(model, copy.deepcopy(caches), [[5, 6]])
    with simulated_kernels() as launches, no_references():
        logits = steps(model, caches, [[5, 6]])
        mx.eval(logits)
    assert_close(logits, expected, rel=TOLERANCE)
    one_step = LAUNCHES | {"kimi_k3_kda_decode": KDA_LAYERS}
    weights = [x.inputs["weights"] for x in launches.of("kimi_k3_expert_gate_up")]
    skips = mx.concatenate(weights).min().item() == 0
    assert skips == (model.args.text_config.expert_top_p is not None)
    assert counts(launches) == {name: 2 * count for name, count in one_step.items()}


def test_a_wrong_kernel_shows(
    model: Any, simulated_kernels: Simulate, monkeypatch: pytest.MonkeyPatch
):
    source = expert_down_combine._SOURCE
    assert "T(total)" in source
    # Not a factor: the norm behind the experts would hide it.
    wrong = source.replace("T(total)", "T(total + 0.01f * float(r))")
    monkeypatch.setattr(expert_down_combine, "_SOURCE", wrong)
    caches = filled_caches(model, [7, 8, 9, 10, 11])
    expected = steps(model, copy.deepcopy(caches), [[5]])
    with simulated_kernels(), no_references():
        logits = steps(model, caches, [[5]])
        mx.eval(logits)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(logits, expected, rel=10 * TOLERANCE)


def test_decode_steps_of_a_batch(model: Any, simulated_kernels: Simulate):
    rows = [filled_caches(model, prompt) for prompt in ([7, 8, 9], [10])]
    expected = steps(model, merged(copy.deepcopy(rows)), [[5], [6]])
    with simulated_kernels() as launches, no_references():
        logits = steps(model, merged(rows), [[5], [6]])
        mx.eval(logits)
    assert_close(logits, expected, rel=TOLERANCE)
    assert counts(launches) == LAUNCHES | {"kimi_k3_kda_decode": KDA_LAYERS}


def padded_caches(model: Any, padding: list[int]) -> list[Any]:
    """Empty caches of rows padded on the left, as mlx-lm makes them."""
    return [
        ArraysCache(2, left_padding=padding)
        if layer.is_linear
        else BatchKVCache(padding)
        for layer in model.layers
    ]


def test_a_padded_prefill(model: Any, simulated_kernels: Simulate):
    tokens, padding = [[7, 8, 9], [0, 0, 12]], [0, 2]
    expected = model(mx.array(tokens), cache=padded_caches(model, padding))
    with simulated_kernels() as launches, no_references():
        logits = model(mx.array(tokens), cache=padded_caches(model, padding))
        mx.eval(logits)
    for row, start in enumerate(padding):
        assert_close(logits[row, start:], expected[row, start:], rel=TOLERANCE)
    assert counts(launches) == LAUNCHES | {"kimi_k3_kda_recurrence": KDA_LAYERS}


def test_a_prefill_too_long_for_some_kernels(model: Any, simulated_kernels: Simulate):
    """Their rules hand it to references; what both leave behind decodes on."""
    # One rounding of these embeddings moves the logits by 3e-5, of others by 3e-4.
    prompt = [(13 * i + 2) % 300 for i in range(33)]
    reference_caches, caches = model.make_cache(), model.make_cache()
    expected = model(mx.array([prompt]), cache=reference_caches)
    with simulated_kernels() as launches:
        logits = model(mx.array([prompt]), cache=caches)
        mx.eval(logits)
    assert_close(logits, expected, rel=TOLERANCE)
    assert launches.count("kimi_k3_kda_recurrence") == KDA_LAYERS
    assert launches.count("kimi_k3_router_logits") == 0

    expected = steps(model, reference_caches, [[5]])
    with simulated_kernels(), no_references():
        logits = steps(model, caches, [[5]])
        mx.eval(logits)
    assert_close(logits, expected, rel=TOLERANCE)


@pytest.mark.parametrize("forbidden", [True, False])
def test_a_reference_that_runs_is_seen(model: Any, forbidden: bool):
    """Without kernels the same step asks for references."""
    caches = filled_caches(model, [7])
    with no_references() if forbidden else nullcontext():
        if forbidden:
            with pytest.raises(AssertionError, match="ran in place of its kernel"):
                mx.eval(steps(model, caches, [[5]]))
        else:
            mx.eval(steps(model, caches, [[5]]))


def test_training_takes_the_references(model: Any, simulated_kernels: Simulate):
    model.train()
    try:
        with simulated_kernels() as launches:
            mx.eval(model(mx.array([[7, 8]])))
    finally:
        model.eval()
    assert not launches.records
