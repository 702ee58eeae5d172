"""The kernel of the attention-residual mix against its reference and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_model
import pytest
from closeness import assert_close, relative_error
from oracle_pair import float64
from oracles import rms_norm
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
        "added": mx.array(rng.standard_normal(shape[1:], np.float32)).astype(dtype),
        "norm_weight": mx.array(1 + 0.3 * rng.standard_normal(dims, np.float32)),
        "projection": mx.array(projection.astype(np.float32)),
        "eps": EPS,
        "output_weight": (1 + mx.array(rng.random(dims, np.float32))).astype(dtype),
        "output_eps": 1e-4,
    }


#: What a call can leave out.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "all": {},
    "no sum": {"added": None},
    "no norm": {"output_weight": None, "output_eps": 0.0},
    "mix": {"added": None, "output_weight": None},
}


def truth(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The mix and the sum; in bfloat16 the sum is rounded before it is used."""
    prefix = given["prefix"]
    if given["added"] is not None:
        prefix = prefix + given["added"]
    rows = [
        oracle_model.mix(
            list(float64(given["blocks"][:, row])),
            float64(prefix[row]),
            float64(given["norm_weight"]),
            float64(given["projection"]),
            given["eps"],
        )[0]
        for row in range(len(prefix))
    ]
    mixed = np.stack(rows)
    if given["output_weight"] is not None:
        weight = float64(given["output_weight"])
        mixed = rms_norm(mixed, weight, given["output_eps"])
    return mixed, float64(prefix)


def check(given: dict[str, Any], kernels: Any, rel: float = EXACT) -> mx.array:
    with kernels() as launches:
        got, total = attention_residual_mix(**given)
        mx.eval(got, total)
    assert launches.count(NAME) == 1
    wanted, wanted_total = truth(given)
    assert_close(got, wanted, rel=rel, where="float64")
    assert_close(total, wanted_total, rel=1e-7, where="sum")
    want, _ = attention_residual_mix_reference(**given)
    # The reference is itself off by float32 rounding of long sums.
    assert_close(got, want, rel=5 * rel, where="reference", dtype=want.dtype)
    return got


@pytest.mark.parametrize(
    ("blocks", "dims"),
    [(1, 1), (8, 1), (3, 33), (8, 63), (1, 64), (1, 1000), (8, 1000)],
)
def test_kernel_is_the_oracle(simulated_kernels: Any, blocks: int, dims: int) -> None:
    check(case(blocks, 3, dims, rows=2), simulated_kernels)


@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_any_number_of_tokens(simulated_kernels: Any, tokens: int) -> None:
    check(case(2, tokens, 63), simulated_kernels)


@pytest.mark.parametrize("parts", LEFT_OUT)
def test_any_part_can_be_left_out(simulated_kernels: Any, parts: str) -> None:
    check(case(2, 3, 63) | LEFT_OUT[parts], simulated_kernels)
    check(case(3, 2, 1000, rows=2) | LEFT_OUT[parts], simulated_kernels)


@pytest.mark.parametrize("parts", LEFT_OUT)
def test_bfloat16_residuals(simulated_kernels: Any, parts: str) -> None:
    """One rounding of the mix and one of its norm."""
    given = case(5, 4, 1000, mx.bfloat16) | LEFT_OUT[parts]
    check(given, simulated_kernels, rel=2**-7)


@pytest.mark.parametrize("name", ["added", "output_weight"])
def test_several_dtypes_take_the_reference(simulated_kernels: Any, name: str) -> None:
    given = case(2, 2, 33, mx.bfloat16)
    given[name] = given[name].astype(mx.float32)
    with simulated_kernels() as launches:
        mx.eval(attention_residual_mix(**given))
    assert not launches.records


def test_real_shape(simulated_kernels: Any) -> None:
    given = module.example(np.random.default_rng(0))
    check(given, simulated_kernels, rel=2**-7)
    exact = {
        name: x.astype(mx.float32) if isinstance(x, mx.array) else x
        for name, x in given.items()
    }
    check(exact, simulated_kernels)


def test_more_blocks_take_the_reference(simulated_kernels: Any) -> None:
    given = case(9, 2, 33)
    with simulated_kernels() as launches:
        got, _ = attention_residual_mix(**given)
        mx.eval(got)
    assert not launches.records
    assert_close(got, truth(given)[0], rel=EXACT, where="reference")


def test_small_residuals_need_epsilon(simulated_kernels: Any) -> None:
    given = case(2, 3, 63) | LEFT_OUT["mix"]
    given["blocks"] = given["blocks"] * 1e-4
    given["blocks_inverse_rms"] = inverse_rms(given["blocks"], EPS)
    got = check(given, simulated_kernels)
    assert relative_error(got, truth({**given, "eps": 1e-6})[0]) > 100 * EXACT


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
        got, _ = attention_residual_mix(**given, training=True)
        mx.eval(got)
    assert not launches.records
    assert_close(got, truth(given)[0], rel=EXACT, where="reference")


def test_a_normed_sum_is_seen(simulated_kernels: Any) -> None:
    """Broken twin: the mix of normed candidates."""
    given = case(3, 3, 63)
    got = check(given, simulated_kernels)
    normed = given["blocks"] * given["blocks_inverse_rms"][..., None]
    assert relative_error(got, truth({**given, "blocks": normed})[0]) > 100 * EXACT
