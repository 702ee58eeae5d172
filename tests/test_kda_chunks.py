"""The KDA recurrence in chunks against the one token by token, and where it is taken."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error

from kimi_k3.kernels import kda_chunks, kda_recurrence
from kimi_k3.kernels.kda_chunks import kda_recurrence_in_chunks, suits_chunks
from kimi_k3.kernels.kda_recurrence import kda_recurrence_reference

EXACT = 2e-6
K3_BOUND = -5.0


def case(tokens: int, decays: str = "mixed", rows: int = 1) -> dict[str, mx.array]:
    rng = np.random.default_rng(tokens)
    H, K, V = 3, 32, 24

    def unit() -> np.ndarray:
        x = rng.standard_normal((rows, tokens, H, K))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    log_decay = K3_BOUND * rng.random((rows, tokens, H, K)) ** 3
    if decays == "strongest":
        log_decay = np.full_like(log_decay, K3_BOUND)
    if decays == "none":
        log_decay = np.zeros_like(log_decay)
    values: dict[str, Any] = {
        "query": unit() * K**-0.5,
        "key": unit(),
        "value": rng.standard_normal((rows, tokens, H, V)),
        "log_decay": log_decay,
        "beta": rng.random((rows, tokens, H)),
        "state": rng.standard_normal((rows, H, V, K)),
    }
    return {name: mx.array(x.astype(np.float32)) for name, x in values.items()}


@pytest.mark.parametrize("decays", ["mixed", "strongest", "none"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 200])
def test_chunks_are_the_recurrence(tokens: int, decays: str) -> None:
    given = case(tokens, decays)
    want = kda_recurrence_reference(**given)
    got = kda_recurrence_in_chunks(**given)
    for name, one, other in zip(("output", "state"), got, want, strict=True):
        assert_close(one, other, rel=EXACT, where=name, dtype=mx.float32)


def test_a_masked_token_leaves_the_state() -> None:
    given = case(40, rows=2)
    mask = mx.random.uniform(shape=(2, 40), key=mx.random.key(1)) < 0.7
    want = kda_recurrence_reference(**given, mask=mask)
    got = kda_recurrence_in_chunks(**given, mask=mask)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rel=EXACT)
    unmasked = kda_recurrence_in_chunks(**given)
    assert relative_error(unmasked[1], want[1]) > 0.01


def test_bfloat16_activations() -> None:
    given = case(33)
    halved = {n: given[n].astype(mx.bfloat16) for n in ("query", "key", "value")}
    want = kda_recurrence_reference(**(given | halved))
    for one, other in zip(
        kda_recurrence_in_chunks(**(given | halved)), want, strict=True
    ):
        assert_close(one, other, rel=EXACT, dtype=mx.float32)


def test_a_wrong_inverse_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin that must fail: corrections that do not see each other."""

    def first_order(lower: mx.array) -> mx.array:
        return mx.eye(kda_chunks.CHUNK) - lower

    given = case(33)
    want = kda_recurrence_reference(**given)[0]
    monkeypatch.setattr(kda_chunks, "_inverse", first_order)
    assert relative_error(kda_recurrence_in_chunks(**given)[0], want) > 100 * EXACT


@pytest.mark.parametrize(
    ("tokens", "bound", "suits"),
    [
        (kda_chunks.FROM_TOKENS, K3_BOUND, True),
        (kda_chunks.FROM_TOKENS - 1, K3_BOUND, False),
        (200, None, False),
        (200, -6.0, False),
    ],
)
def test_what_suits_chunks(tokens: int, bound: float | None, suits: bool) -> None:
    assert suits_chunks(tokens, bound) is suits


@pytest.mark.parametrize(
    ("tokens", "options", "taken"),
    [
        (70, {"lower_bound": K3_BOUND}, True),
        (70, {"lower_bound": K3_BOUND, "training": True}, False),
        (70, {}, False),
        (4, {"lower_bound": K3_BOUND}, False),
    ],
    ids=["bounded", "training", "unbounded", "few tokens"],
)
def test_when_chunks_are_taken(
    tokens: int,
    options: dict[str, Any],
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def recorded(*args: Any) -> Any:
        calls.append(args)
        return kda_recurrence_in_chunks(*args)

    monkeypatch.setattr(kda_recurrence, "kda_recurrence_in_chunks", recorded)
    monkeypatch.setattr(kda_recurrence._common, "can_run_metal", lambda: False)
    kda_recurrence.kda_recurrence(*case(tokens).values(), **options)
    assert bool(calls) is (taken and kda_recurrence._common.runs_on_cpu())
