"""The packed kernel of the KDA recurrence against its reference and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_kda
import pytest
from closeness import assert_close, relative_error
from oracle_pair import float64
from simulated import same_in_every_order, under_sanitizers

from kimi_k3.kernels import kda_recurrence as module
from kimi_k3.kernels.kda_recurrence import kda_recurrence, kda_recurrence_reference

NAME = "kimi_k3_kda_recurrence"
EXACT = 5e-6


def case(tokens: int, heads: int = 3, K: int = 32, V: int = 32, rows: int = 2) -> Any:
    """Unit queries and keys, decays from 1 down to exp(-5), a state that matters."""
    rng = np.random.default_rng(1000 * tokens + 100 * heads + K + V)

    def unit() -> np.ndarray:
        x = rng.standard_normal((rows, tokens, heads, K))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    given = {
        "query": unit() * K**-0.5,
        "key": unit(),
        "value": rng.standard_normal((rows, tokens, heads, V)),
        "log_decay": -5 * rng.random((rows, tokens, heads, K)) ** 3,
        "beta": rng.random((rows, tokens, heads)),
        "state": rng.standard_normal((rows, heads, V, K)),
    }
    return {name: mx.array(x.astype(np.float32)) for name, x in given.items()}


def truth(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    x = {name: float64(array) for name, array in given.items()}
    decay, beta, mask = np.exp(x["log_decay"]), x["beta"], given.get("mask")
    if mask is not None:
        real = np.array(mask)
        decay = np.where(real[..., None, None], decay, 1.0)
        beta = beta * real[..., None]
    outs, states = [], []
    for row in range(len(x["query"])):
        out, state = oracle_kda.delta_rule(
            x["query"][row],
            x["key"][row],
            x["value"][row],
            decay[row],
            beta[row],
            x["state"][row].swapaxes(-1, -2),
        )
        outs.append(out)
        states.append(state.swapaxes(-1, -2))
    return np.stack(outs), np.stack(states)


def check(given: dict[str, Any], kernels: Any) -> tuple[mx.array, mx.array]:
    with kernels() as launches:
        out, state = kda_recurrence(**given)
        mx.eval(out, state)
    assert launches.count(NAME) == 1
    reference = kda_recurrence_reference(**given)
    for got, wants in ((out, 0), (state, 1)):
        where = ("output", "state")[wants]
        assert_close(got, truth(given)[wants], rel=EXACT, where=where)
        assert_close(got, reference[wants], rel=EXACT, where=f"{where}: reference")
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, 33, 63])
def test_any_number_of_tokens(simulated_kernels: Any, tokens: int) -> None:
    check(case(tokens), simulated_kernels)


@pytest.mark.parametrize(
    ("heads", "K", "V"), [(1, 32, 8), (5, 64, 40), (2, 96, 96), (1, 256, 24)]
)
def test_any_head(simulated_kernels: Any, heads: int, K: int, V: int) -> None:
    """Also heads whose last threadgroup has fewer simdgroups than the others."""
    check(case(7, heads, K, V), simulated_kernels)


def test_a_thousand_tokens_do_not_drift(simulated_kernels: Any) -> None:
    check(case(1000, heads=1, rows=1), simulated_kernels)


def test_mask(simulated_kernels: Any) -> None:
    """Left, right and both; a masked token leaves the state as it is."""
    given = case(9, rows=3)
    mask = np.ones((3, 9), bool)
    mask[0, :4], mask[1, 7:], mask[2, :2], mask[2, 5:] = False, False, False, False
    out, _ = check({**given, "mask": mx.array(mask)}, simulated_kernels)
    assert relative_error(out, truth(given)[0]) > 0.01


def test_real_shape(simulated_kernels: Any) -> None:
    """96 heads of 128, a few tokens."""
    given = module.example(np.random.default_rng(0))
    for name in ("query", "key", "value", "log_decay", "beta"):
        given[name] = given[name][:, :4]
    check(given, simulated_kernels)


def test_one_shot_is_two_chunks(simulated_kernels: Any) -> None:
    given = case(12)
    want, last = check(given, simulated_kernels)
    pieces, state = [], given.pop("state")
    with simulated_kernels():
        for part in (slice(0, 5), slice(5, 12)):
            piece = {name: x[:, part] for name, x in given.items()}
            out, state = kda_recurrence(**piece, state=state)
            mx.eval(out, state)
            pieces.append(out)
    assert_close(mx.concatenate(pieces, axis=1), want, rel=EXACT, where="chunks")
    assert_close(state, last, rel=EXACT, where="state")


@pytest.mark.usefixtures("simulated_kernels")
def test_thread_order_and_garbage_do_not_matter() -> None:
    given = case(5, heads=2, K=64, V=40)
    same_in_every_order(lambda: kda_recurrence(**given))


@pytest.mark.usefixtures("simulated_kernels")
def test_sanitizers_find_nothing() -> None:
    given = case(2, heads=1, K=32, V=8, rows=1)
    given["mask"] = mx.array([[False, True]])
    under_sanitizers(lambda: kda_recurrence(**given))


@pytest.mark.parametrize("change", ["training", "K", "V"])
def test_the_rule_for_the_reference(simulated_kernels: Any, change: str) -> None:
    given = case(2, K=24 if change == "K" else 32, V=12 if change == "V" else 32)
    with simulated_kernels() as launches:
        mx.eval(kda_recurrence(**given, training=change == "training"))
    assert not launches.records


def test_a_decay_per_head_is_seen(simulated_kernels: Any) -> None:
    """Broken twin: one decay for all channels of a head."""
    given = case(5)
    out, _ = check(given, simulated_kernels)
    mean = given["log_decay"].mean(axis=-1, keepdims=True)
    per_head = mx.broadcast_to(mean, given["log_decay"].shape)
    assert relative_error(out, truth({**given, "log_decay": per_head})[0]) > 0.01
