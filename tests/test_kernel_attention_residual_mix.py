"""The kernel of the attention-residual mix against its reference and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_model
import pytest
from closeness import assert_close, relative_error
from oracle_pair import float64
from simulated import same_in_every_order, under_sanitizers

from kimi_k3.kernels import attention_residual_mix as module
from kimi_k3.kernels.attention_residual_mix import (
    attention_residual_mix,
    attention_residual_mix_reference,
    inverse_rms,
)

NAME = "kimi_k3_attention_residual_mix"
EPS = 1e-5
EXACT = 2e-6


def case(
    blocks: int, tokens: int, dims: int, dtype: mx.Dtype = mx.float32, rows: int = 1
) -> dict[str, Any]:
    """Residuals of very different sizes, so that scores decide."""
    rng = np.random.default_rng(100 * blocks + tokens + dims)
    shape = (blocks, rows, tokens, dims)
    sizes = 10.0 ** rng.uniform(-2, 2, (blocks, rows, tokens, 1))
    stored = mx.array((sizes * rng.standard_normal(shape)).astype(np.float32))
    stored = stored.astype(dtype)
    prefix = mx.array(rng.standard_normal(shape[1:], np.float32)).astype(dtype)
    projection = 2 * rng.standard_normal(dims) * dims**-0.5
    return {
        "blocks": stored,
        "blocks_inverse_rms": inverse_rms(stored, EPS),
        "prefix": prefix,
        "norm_weight": mx.array(1 + 0.3 * rng.standard_normal(dims, np.float32)),
        "projection": mx.array(projection.astype(np.float32)),
        "eps": EPS,
    }


def truth(given: dict[str, Any]) -> np.ndarray:
    rows = [
        oracle_model.mix(
            list(float64(given["blocks"][:, row])),
            float64(given["prefix"][row]),
            float64(given["norm_weight"]),
            float64(given["projection"]),
            given["eps"],
        )[0]
        for row in range(len(given["prefix"]))
    ]
    return np.stack(rows)


def check(given: dict[str, Any], kernels: Any, rel: float = EXACT) -> mx.array:
    with kernels() as launches:
        got = attention_residual_mix(**given)
        mx.eval(got)
    assert launches.count(NAME) == 1
    assert_close(got, truth(given), rel=rel, where="float64")
    want = attention_residual_mix_reference(**given)
    # The reference is itself off by float32 rounding of long sums.
    assert_close(got, want, rel=5 * rel, where="reference", dtype=want.dtype)
    return got


@pytest.mark.parametrize("dims", [1, 33, 63, 64, 1000])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_kernel_is_the_oracle(simulated_kernels: Any, blocks: int, dims: int) -> None:
    check(case(blocks, 3, dims, rows=2), simulated_kernels)


@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_any_number_of_tokens(simulated_kernels: Any, tokens: int) -> None:
    check(case(2, tokens, 63), simulated_kernels)


def test_bfloat16_residuals(simulated_kernels: Any) -> None:
    """One rounding, of the result."""
    check(case(5, 4, 1000, mx.bfloat16), simulated_kernels, rel=2**-8)


def test_real_shape(simulated_kernels: Any) -> None:
    given = module.example(np.random.default_rng(0))
    check(given, simulated_kernels, rel=2**-8)
    exact = {**given, "blocks": given["blocks"].astype(mx.float32)}
    check({**exact, "prefix": given["prefix"].astype(mx.float32)}, simulated_kernels)


def test_small_residuals_need_epsilon(simulated_kernels: Any) -> None:
    given = case(2, 3, 63)
    given["blocks"] = given["blocks"] * 1e-4
    given["blocks_inverse_rms"] = inverse_rms(given["blocks"], EPS)
    got = check(given, simulated_kernels)
    assert relative_error(got, truth({**given, "eps": 1e-6})) > 100 * EXACT


@pytest.mark.usefixtures("simulated_kernels")
def test_thread_order_and_garbage_do_not_matter() -> None:
    given = case(8, 2, 1000)
    same_in_every_order(lambda: attention_residual_mix(**given))


@pytest.mark.usefixtures("simulated_kernels")
def test_sanitizers_find_nothing() -> None:
    given = case(2, 2, 133)
    under_sanitizers(lambda: attention_residual_mix(**given))


def test_training_takes_the_reference(simulated_kernels: Any) -> None:
    given = case(2, 3, 33)
    with simulated_kernels() as launches:
        got = attention_residual_mix(**given, training=True)
        mx.eval(got)
    assert not launches.records
    assert_close(got, truth(given), rel=EXACT, where="reference")


def test_a_normed_sum_is_seen(simulated_kernels: Any) -> None:
    """Broken twin: the mix of normed candidates."""
    given = case(3, 3, 63)
    got = check(given, simulated_kernels)
    normed = given["blocks"] * given["blocks_inverse_rms"][..., None]
    assert relative_error(got, truth({**given, "blocks": normed})) > 100 * EXACT
