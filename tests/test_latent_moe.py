"""Router and experts against the oracle: odd sizes, groups, banks, float32 routing."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_moe
import pytest
from closeness import assert_close, relative_error, to_numpy
from oracle_pair import MODULE, SIZES, Pair, float64, make_pair

from kimi_k3.config import TextArgs
from kimi_k3.models.expert_banks import ExpertBank, TwoBankSwitchGLU

LAYER = 2

VARIANTS: dict[str, dict[str, Any]] = {
    "normed": {"num_experts": 11, "num_experts_per_token": 3},
    "scaled": {"latent_moe_use_norm": False, "routed_scaling_factor": 2.5},
    "raw": {"latent_moe_use_norm": False, "moe_renormalize": False},
    "groups": {"num_expert_group": 4, "topk_group": 2, "latent_moe_use_norm": False},
    "no-latent": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no-shared": {"num_shared_experts": 0, "num_experts_per_token": 1},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"))


def moe_of(pair: Pair) -> Any:
    return pair.model.layers[LAYER].mlp


def routed(moe: Any, x: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts in ascending order and their weights, as NumPy."""
    ids, weights = moe.route(x)
    assert weights.dtype == mx.float32
    ids, weights = to_numpy(ids).astype(np.int64), to_numpy(weights)
    order = np.argsort(ids, axis=-1)
    take = np.take_along_axis
    return take(ids, order, axis=-1), take(weights, order, axis=-1)


@pytest.mark.parametrize("tokens", SIZES)
def test_output_and_routing_are_the_oracle(pair: Pair, tokens: int) -> None:
    x = pair.inputs(2, tokens)
    got, (ids, weights) = moe_of(pair)(x), routed(moe_of(pair), x)
    for row in range(2):
        want, routing = pair.oracle.feed(LAYER, float64(x[row]))
        assert routing["router_gap"].min() > 1e-6, "a tie: choose another seed"
        assert (ids[row] == routing["topk_idx"]).all()
        shares = routing["topk_weight"]
        assert_close(weights[row], shares, rel=MODULE, where="weights")
        assert_close(got[row], want, rel=MODULE, where="output", dtype=mx.float32)


def test_the_dense_layer_is_the_oracle(plain: Pair) -> None:
    x = plain.inputs(1, 33)
    want, routing = plain.oracle.feed(0, float64(x[0]))
    assert not routing
    assert_close(plain.model.layers[0].mlp(x)[0], want, rel=MODULE, where="dense")


@pytest.mark.parametrize(
    ("pair", "mistake"),
    [
        ("normed", {"latent_moe_use_norm": False}),
        ("scaled", {"routed_scaling_factor": 1.0}),
        ("raw", {"moe_renormalize": True}),
        ("groups", {"topk_group": 4}),
        ("normed", {"num_experts_per_token": 4}),
        ("normed", {"activation_situ_beta": 3.9}),
    ],
    indirect=["pair"],
)
def test_a_mistake_is_seen(pair: Pair, mistake: dict) -> None:
    """Broken twin: the oracle reads another configuration."""
    x = pair.inputs(1, 33)
    config = pair.oracle.config | mistake
    weights = pair.oracle.experts[LAYER]
    want, _ = oracle_moe.latent_moe(float64(x[0]), weights, config)
    assert relative_error(moe_of(pair)(x)[0], want) > 100 * MODULE


def test_the_bias_chooses_and_is_not_a_weight(plain: Pair) -> None:
    """A bias that beats every score forces an expert whose weight stays its score."""
    moe, x = moe_of(plain), plain.inputs(1, 33)
    bias = moe.e_score_correction_bias
    forced = mx.zeros_like(bias)
    forced[7] = 5.0
    moe.e_score_correction_bias = forced
    try:
        ids, weights = routed(moe, x)
    finally:
        moe.e_score_correction_bias = bias
    assert (ids == 7).any(axis=-1).all()
    assert (weights < 1).all()
    gate = plain.oracle.experts[LAYER]["gate.weight"]
    want = oracle_moe.route(float64(x[0]), gate, float64(forced), plain.oracle.config)
    assert (ids[0] == want[0]).all()
    assert_close(weights[0], want[1], rel=MODULE, where="weights")


def bank_weights(bank: Any, rows: slice, target: Any) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        target[name] = target[name].to_quantized(group_size=32, bits=4, mode="mxfp4")
        for part in ("weight", "scales"):
            target[name][part] = bank[name][part][rows]


@pytest.mark.parametrize("split", [1, 6, 15])
@pytest.mark.parametrize("tokens", SIZES)
def test_two_banks_of_the_same_weights_are_one(
    plain: Pair, split: int, tokens: int
) -> None:
    """Each expert in its bank, one-expert banks and unsorted pairs included."""
    args = TextArgs.from_dict(plain.oracle.config)
    one = moe_of(plain).switch_mlp
    assert isinstance(one, ExpertBank)
    two = TwoBankSwitchGLU(args, 16, split)
    bank_weights(one, slice(0, split), two.bank_hi)
    bank_weights(one, slice(split, 16), two.bank_lo)
    x = mx.random.normal((2, tokens, 32), key=mx.random.key(tokens))
    ids = mx.random.randint(0, 16, (2, tokens, 4), key=mx.random.key(7))
    assert_close(two(x, ids), one(x, ids), rel=1e-6, where=f"split {split}")
    # Broken twin: ids that point one expert further.
    moved = two(x, (ids + 1) % 16)
    assert relative_error(moved, one(x, ids)) > 100 * MODULE


def share_of_other_sets(moe: Any, x: mx.array, bias: np.ndarray, top: int) -> float:
    """Share of tokens whose expert set is not float64's on the very same numbers."""
    config = {"num_experts_per_token": top}
    wanted, _, _ = oracle_moe.route(
        float64(x[0]), float64(moe.gate.weight), bias, config
    )
    ids, _ = routed(moe, x)
    return float((ids[0] != wanted).any(axis=-1).mean())


@pytest.fixture(scope="module")
def bf16_moe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A layer of 64 experts, 8 a token, as a bfloat16 model holds it."""
    sizes = {"num_experts": 64, "num_experts_per_token": 8}
    pair = make_pair(tmp_path_factory.mktemp("t1"), **sizes)
    pair.model.set_dtype(mx.bfloat16)
    moe = moe_of(pair)
    bias = pair.oracle.experts[LAYER]["gate.e_score_correction_bias"]
    moe.e_score_correction_bias = mx.array(bias.astype(np.float32))
    return moe


def test_a_bfloat16_model_routes_as_float64(bf16_moe: Any) -> None:
    x = mx.random.normal((1, 4096, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    assert bf16_moe.gate.weight.dtype == mx.bfloat16
    bias = float64(bf16_moe.e_score_correction_bias)
    assert share_of_other_sets(bf16_moe, x, bias, 8) < 0.001


def test_bfloat16_router_logits_are_seen(bf16_moe: Any) -> None:
    """Broken twin: the same layer with its router's matmul in bfloat16."""
    x = mx.random.normal((1, 4096, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    gate = bf16_moe.gate
    bias = float64(bf16_moe.e_score_correction_bias)

    class Rounded:
        weight = gate.weight

        def __call__(self, x: mx.array) -> mx.array:
            return x @ gate.weight.T

    bf16_moe.gate = Rounded()
    try:
        assert share_of_other_sets(bf16_moe, x, bias, 8) > 0.01
    finally:
        bf16_moe.gate = gate
