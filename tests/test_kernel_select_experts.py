"""The kernels of the router against their references and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_moe
import pytest
from closeness import assert_close, relative_error, to_numpy
from oracle_pair import float64
from simulated import same_in_every_order, under_sanitizers

from kimi_k3.kernels import router_logits as logits_module
from kimi_k3.kernels import select_experts as select_module
from kimi_k3.kernels._tuned import Tiling
from kimi_k3.kernels.router_logits import router_logits, router_logits_reference
from kimi_k3.kernels.select_experts import select_experts, select_experts_reference

SELECT = "kimi_k3_select_experts"
LOGITS = "kimi_k3_router_logits"
EXACT = 2e-6


def case(experts: int, top_k: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1000 * experts + 10 * top_k + tokens)
    return {
        "logits": mx.array(2 * rng.standard_normal((tokens, experts), np.float32)),
        "correction_bias": mx.array(0.5 * rng.standard_normal(experts, np.float32)),
        "top_k": top_k,
        "groups": 1,
        "top_groups": 1,
        "renormalize": True,
        "scale": 2.5,
        **changes,
    }


def truth(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids in ascending order and their weights; of equals the lower ids."""
    config = {
        "num_experts_per_token": given["top_k"],
        "moe_renormalize": given["renormalize"],
        "routed_scaling_factor": given["scale"],
    }
    identity = np.eye(given["logits"].shape[-1])
    bias = float64(given["correction_bias"])
    ids, weights, _ = oracle_moe.route(float64(given["logits"]), identity, bias, config)
    return ids, weights


def in_id_order(ids: mx.array, weights: mx.array) -> tuple[np.ndarray, np.ndarray]:
    assert ids.dtype == mx.uint32
    assert weights.dtype == mx.float32
    order = np.argsort(to_numpy(ids), axis=-1)
    take = np.take_along_axis
    return take(to_numpy(ids), order, -1), take(to_numpy(weights), order, -1)


def selected(given: dict[str, Any], kernels: Any) -> tuple[mx.array, mx.array]:
    with kernels() as launches:
        ids, weights = select_experts(**given)
        mx.eval(ids, weights)
    assert launches.count(SELECT) == 1
    return ids, weights


def check(given: dict[str, Any], kernels: Any) -> None:
    ids, weights = in_id_order(*selected(given, kernels))
    wanted_ids, wanted = truth(given)
    assert (ids == wanted_ids).all()
    assert_close(weights, wanted, rel=EXACT, where="float64")
    ids, wanted = in_id_order(*select_experts_reference(**given))
    assert (ids == wanted_ids).all()
    assert_close(weights, wanted, rel=EXACT, where="reference")


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(1, 1), (7, 2), (33, 8), (63, 16), (326, 16), (1000, 32), (1024, 6), (16, 16)],
)
def test_selection_is_the_oracle(
    simulated_kernels: Any, experts: int, top_k: int
) -> None:
    check(case(experts, top_k), simulated_kernels)


@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_any_number_of_tokens(simulated_kernels: Any, tokens: int) -> None:
    check(case(63, 4, tokens), simulated_kernels)


def test_plain_scores(simulated_kernels: Any) -> None:
    given = case(33, 5, renormalize=False)
    check(given, simulated_kernels)
    _, weights = in_id_order(*selected(given, simulated_kernels))
    _, other = truth({**given, "renormalize": True})
    assert relative_error(weights, other) > 0.01


def test_real_shape(simulated_kernels: Any) -> None:
    given = select_module.example(np.random.default_rng(0))
    check({**given, "logits": given["logits"][0]}, simulated_kernels)
    ids, weights = selected(given, simulated_kernels)
    assert ids.shape == weights.shape == (1, 1, 16)


def test_ties_go_to_the_lower_ids(simulated_kernels: Any) -> None:
    given = case(100, 5, correction_bias=mx.zeros((100,)))
    logits = np.zeros((2, 100), np.float32)
    logits[1, [99, 64, 3, 35]] = 1.0
    given["logits"] = mx.array(logits)
    ids, _ = in_id_order(*selected(given, simulated_kernels))
    assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 3, 35, 64, 99]]


def test_odd_scores_still_choose_different_experts(simulated_kernels: Any) -> None:
    """NaN and infinity: nothing is chosen twice and no id is out of range."""
    given = case(40, 16, tokens=4)
    logits = np.zeros((4, 40), np.float32)
    logits[0], logits[1] = np.nan, -np.inf
    logits[2, ::2], logits[3, 7] = np.nan, np.inf
    ids, _ = selected({**given, "logits": mx.array(logits)}, simulated_kernels)
    for row in to_numpy(ids):
        assert len(set(row)) == 16
        assert row.max() < 40
    assert (to_numpy(ids)[2] % 2 == 1).all()


@pytest.mark.parametrize(
    "change",
    [{"groups": 4, "top_groups": 2}, {"training": True}, {"experts": 1056}],
    ids=str,
)
def test_the_rule_for_the_reference(simulated_kernels: Any, change: dict) -> None:
    given = case(change.pop("experts", 64), 8) | change
    with simulated_kernels() as launches:
        ids, _ = select_experts(**given)
        mx.eval(ids)
    assert not launches.records


@pytest.mark.usefixtures("simulated_kernels")
def test_thread_order_and_garbage_do_not_matter() -> None:
    given = case(326, 16)
    same_in_every_order(lambda: select_experts(**given))
    x, weight = inputs(3, 70, 33)
    same_in_every_order(lambda: router_logits(x, weight))


@pytest.mark.usefixtures("simulated_kernels")
def test_sanitizers_find_nothing() -> None:
    given = case(33, 4, 2)
    under_sanitizers(lambda: select_experts(**given))
    x, weight = inputs(2, 33, 7)
    under_sanitizers(lambda: router_logits(x, weight))


def inputs(
    tokens: int, dims: int, experts: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(tokens + dims)
    x = mx.array(rng.standard_normal((1, tokens, dims), np.float32))
    weight = mx.array(rng.standard_normal((experts, dims), np.float32))
    return x.astype(dtype), weight.astype(dtype)


def check_logits(x: mx.array, weight: mx.array, kernels: Any) -> None:
    with kernels() as launches:
        got = router_logits(x, weight)
        mx.eval(got)
    assert launches.count(LOGITS) == 1
    assert_close(got, float64(x) @ float64(weight).T, rel=EXACT, where="float64")
    want = router_logits_reference(x, weight)
    assert_close(got, want, rel=EXACT, where="reference", dtype=mx.float32)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (mx.float32, 1),
        (mx.float32, 63),
        (mx.bfloat16, 33),
        (mx.bfloat16, 1000),
        (mx.float16, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (8, 63)])
def test_logits_are_the_oracle(
    simulated_kernels: Any, tokens: int, experts: int, dtype: mx.Dtype, dims: int
) -> None:
    """Also of bfloat16 weights: nothing is rounded on the way."""
    check_logits(*inputs(tokens, dims, experts, dtype), simulated_kernels)


@pytest.mark.parametrize("tiling", [(1, 8), (4, 4), (8, 1)], ids=str)
def test_every_tiling(simulated_kernels: Any, tiling: tuple[int, int]) -> None:
    x, weight = inputs(3, 133, 63, mx.bfloat16)
    with simulated_kernels() as launches:
        got = router_logits(x, weight, tiling=Tiling(*tiling))
        mx.eval(got)
    assert launches.of(LOGITS)[0].call["threadgroup"] == (32 * tiling[1], 1, 1)
    assert_close(got, float64(x) @ float64(weight).T, rel=EXACT, where="float64")


def test_logits_at_the_real_shape(simulated_kernels: Any) -> None:
    given = logits_module.example(np.random.default_rng(0))
    check_logits(given["x"], given["weight"], simulated_kernels)


def test_many_tokens_take_the_reference(simulated_kernels: Any) -> None:
    x, weight = inputs(9, 33, 7)
    with simulated_kernels() as launches:
        mx.eval(
            router_logits(x, weight), router_logits(x[:, :3], weight, training=True)
        )
    assert not launches.records


def test_bfloat16_sums_are_seen() -> None:
    """Broken twin: the matmul in the weights' own dtype."""
    x, weight = inputs(3, 1000, 33, mx.bfloat16)
    rounded = (x @ weight.T).astype(mx.float32)
    assert relative_error(rounded, float64(x) @ float64(weight).T) > 100 * EXACT
