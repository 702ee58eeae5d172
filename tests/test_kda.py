"""Kimi Delta Attention against the oracle: odd sizes, both gates, caches, padding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error
from mlx_lm.models.cache import ArraysCache
from oracle_kda import KdaState
from oracle_pair import MODULE, SIZES, Pair, float64, make_pair

from kimi_k3.kernels import kda_prefill as kda

LAYER = 1

VARIANTS: dict[str, dict[str, Any]] = {
    "bound": {"linear_attn_config": {"num_heads": 3, "head_dim": 24}},
    "softplus": {"linear_attn_config": {"num_heads": 5, "gate_lower_bound": None}},
    "low-rank": {"linear_attn_config": {"num_heads": 3, "use_full_rank_gate": False}},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"), **VARIANTS[request.param])


def attend(pair: Pair, x: mx.array, cache: ArraysCache | None = None) -> mx.array:
    mask = None if cache is None else cache.make_mask(x.shape[1])
    return pair.model.layers[LAYER].self_attn(x, mask, cache)


def truth(pair: Pair, x: mx.array, state: Any = None) -> tuple[np.ndarray, KdaState]:
    """Output (T, hidden) of one row and the state afterwards."""
    out, state, _ = pair.oracle.attend(LAYER, float64(x), state)
    return out, state


def compare_state(cache: ArraysCache, row: int, want: KdaState, where: str) -> None:
    conv, state = float64(cache[0][row]), float64(cache[1][row])
    assert_close(conv, np.concatenate(want.conv, axis=1), rel=MODULE, where=where)
    wanted = want.recurrent.swapaxes(-1, -2)
    assert_close(state, wanted, rel=MODULE, where=f"{where} state")
    assert cache[1].dtype == mx.float32


@pytest.mark.parametrize("tokens", SIZES)
def test_output_and_state_are_the_oracle(pair: Pair, tokens: int) -> None:
    x = pair.inputs(2, tokens)
    cache = ArraysCache(2)
    plain, cached = attend(pair, x), attend(pair, x, cache)
    for row in range(2):
        want, state = truth(pair, x[row])
        assert_close(plain[row], want, rel=MODULE, where="plain", dtype=mx.float32)
        assert_close(cached[row], want, rel=MODULE, where="cached")
        compare_state(cache, row, state, f"row {row}")


@pytest.mark.parametrize("split", [[1] * 12, [2, 1, 9], [9, 2, 1], [3, 3, 6]], ids=str)
def test_any_split_is_the_oracle(pair: Pair, split: list[int]) -> None:
    x = pair.inputs(1, sum(split))
    want, state = truth(pair, x[0])
    cache, out, start = ArraysCache(2), [], 0
    for size in split:
        out.append(attend(pair, x[:, start : start + size], cache))
        start += size
    assert_close(mx.concatenate(out, axis=1)[0], want, rel=MODULE, where="output")
    compare_state(cache, 0, state, "end")


def run_right_padded(pair: Pair, x: mx.array, lengths: list[int], step: int) -> Any:
    """Rows of ``lengths`` tokens, padded on the right, in chunks of ``step``."""
    cache = ArraysCache(2)
    cache.prepare(lengths=lengths)
    pieces = [
        attend(pair, x[:, start : start + step], cache)
        for start in range(0, x.shape[1], step)
    ]
    cache.finalize()
    return mx.concatenate(pieces, axis=1), cache


@pytest.mark.parametrize("step", [2, 5, 64])
def test_right_padded_rows_are_rows_alone(pair: Pair, step: int) -> None:
    """Lengths below the convolution's width, a chunk's edge, and none to pad."""
    lengths = [1, 2, 3, 10, 13]
    x = pair.inputs(len(lengths), max(lengths))
    out, cache = run_right_padded(pair, x, lengths, step)
    later = attend(pair, x[:, :1], cache)
    for row, length in enumerate(lengths):
        want, state = truth(pair, mx.concatenate([x[row, :length], x[row, :1]]))
        got = mx.concatenate([out[row, :length], later[row]])
        assert_close(got, want, rel=MODULE, where=f"{length} tokens")
        compare_state(cache, row, state, f"{length} tokens")


@pytest.mark.parametrize("step", [2, 64])
def test_left_padded_rows_are_rows_alone(pair: Pair, step: int) -> None:
    padding = [0, 5, 8]
    x = pair.inputs(len(padding), 9)
    cache = ArraysCache(2, left_padding=padding)
    pieces = [attend(pair, x[:, i : i + step], cache) for i in range(0, 9, step)]
    out = mx.concatenate(pieces, axis=1)
    for row, pad in enumerate(padding):
        want, state = truth(pair, x[row, pad:])
        assert_close(out[row, pad:], want, rel=MODULE, where=f"{pad} padded")
        compare_state(cache, row, state, f"{pad} padded")


def test_forgotten_lengths_are_seen(pair: Pair) -> None:
    """Broken twin: a shorter row's state when nobody says where the row ends."""
    x = pair.inputs(2, 9)
    cache = ArraysCache(2)
    attend(pair, x, cache)
    _, state = truth(pair, x[1, :4])
    assert relative_error(float64(cache[1][1]), state.recurrent.swapaxes(1, 2)) > 0.01


def per_channel(log_decay: Callable) -> Callable:
    """The mistake of reading A_log per channel, as its stored length suggests."""

    def mistaken(gate: mx.array, A_log: mx.array, dt_bias: mx.array, bound: Any) -> Any:
        rates = mx.tile(A_log, (gate.shape[-1],))[: gate.shape[-1]]
        swapped = log_decay(gate.swapaxes(-1, -2), rates, dt_bias.T, bound)
        return swapped.swapaxes(-1, -2)

    return mistaken


def clamped(log_decay: Callable) -> Callable:
    """The mistake of reading the bound as a clamp of the softplus gate."""

    def mistaken(gate: mx.array, A_log: mx.array, dt_bias: mx.array, bound: Any) -> Any:
        plain = log_decay(gate, A_log, dt_bias, None)
        return plain if bound is not None else mx.maximum(plain, -0.1)

    return mistaken


@contextmanager
def replaced(name: str, wrap: Callable) -> Iterator[None]:
    original = getattr(kda, name)
    setattr(kda, name, wrap(original))
    try:
        yield
    finally:
        setattr(kda, name, original)


def epsilon_on_the_mean(l2_normalize: Callable) -> Callable:
    def mistaken(x: mx.array, scale: float = 1.0) -> mx.array:
        size = x.shape[-1]
        mean = mx.square(x).mean(-1, keepdims=True)
        return x * mx.rsqrt(mean + kda.L2_NORM_EPS) * (scale * size**-0.5)

    return mistaken


MISTAKES = {
    "A_log per channel": ("log_decay", per_channel, 1.0),
    "a clamp": ("log_decay", clamped, 1.0),
    "epsilon on the mean": ("l2_normalize", epsilon_on_the_mean, 1e-2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(pair: Pair, mistake: str) -> None:
    """Broken twin: known mistakes of other ports."""
    name, wrap, scale = MISTAKES[mistake]
    x = scale * pair.inputs(1, 33)
    want, _ = truth(pair, x[0])
    assert_close(attend(pair, x)[0], want, rel=MODULE, where="intact")
    with replaced(name, wrap):
        assert relative_error(attend(pair, x)[0], want) > 10 * MODULE


#: log g at x = -8, 0, 8 for A_log = 0.5 and dt_bias = 1, to 9 digits.
GATE_POINTS = {
    -5.0: (-4.86129450e-05, -4.19359076, -4.99999820),
    None: (-1.50275413e-3, -2.16520248, -14.8386949),
}


@pytest.mark.parametrize("bound", GATE_POINTS)
def test_gate_by_hand(bound: float | None) -> None:
    x = mx.array([-8.0, 0.0, 8.0]).reshape(1, 3, 1, 1)
    got = kda.log_decay(x, mx.array([0.5]), mx.array([[1.0]]), bound)
    np.testing.assert_allclose(float64(got).reshape(-1), GATE_POINTS[bound], rtol=2e-6)
    assert got.dtype == mx.float32
