"""What an expert contributes, against a loop over tokens in float64."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, assert_same, relative_error
from expert_layers import EXPERTS, problem, two_banks
from oracle_calibration import Truth, record_experts
from oracle_pair import Pair, float64, make_pair
from tiny_k3 import t0_model

from kimi_k3.build.expert_recorder import (
    ExpertRecorder,
    ExpertSums,
    recorded_experts,
)
from kimi_k3.build.step_labels import StepLabels
from kimi_k3.errors import CalibrationError

LAYER, CORPORA = 2, 3
REL = 1e-5

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"routed_scaling_factor": 2.5, "num_experts": 11},
    "raw": {"moe_renormalize": False},
    "no-latent": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"))


def labels_for(rows: int, length: int) -> np.ndarray:
    """Corpora by runs of tokens, the ends of rows padded."""
    labels = (np.arange(rows * length) // 5 % CORPORA).reshape(rows, length)
    for row in range(rows):
        labels[row, length - row :] = -1
    return labels


def record(
    moe: Any, steps: list[tuple[mx.array, np.ndarray]], **settings: Any
) -> ExpertRecorder:
    with recorded_experts(moe, CORPORA, **settings) as recorder:
        for x, labels in steps:
            recorder.labels = StepLabels(labels, CORPORA)
            mx.eval(moe(x))
    return recorder


def truth_of(pair: Pair, steps: list[tuple[mx.array, np.ndarray]]) -> Truth:
    weights = pair.oracle.experts[LAYER]
    truth = Truth(CORPORA, len(weights["gate.weight"]))
    for x, labels in steps:
        for row, corpus in zip(float64(x), labels, strict=True):
            record_experts(truth, row, corpus, weights, pair.oracle.config)
    assert truth.gap > 1e-6, "a tie: choose another seed"
    return truth


def two_steps(pair: Pair) -> list[tuple[mx.array, np.ndarray]]:
    return [
        (pair.inputs(3, 33), labels_for(3, 33)),
        (pair.inputs(1, 7, seed=1), labels_for(1, 7)),
    ]


def far_from(recorder: ExpertRecorder, truth: Truth) -> list[str]:
    """The statistics that are not the truth's."""
    arrays = recorder.sums.arrays()
    return [n for n in truth.sums if relative_error(arrays[n], truth.sums[n]) > REL]


@pytest.mark.parametrize("chunk_tokens", [2048, 16])
def test_statistics_are_the_oracle(pair: Pair, chunk_tokens: int):
    steps, moe = two_steps(pair), pair.model.layers[LAYER].mlp
    recorder, truth = (
        record(moe, steps, chunk_tokens=chunk_tokens),
        truth_of(pair, steps),
    )
    assert_same(
        recorder.sums.count, truth.sums["count"].astype(np.int64), where="count"
    )
    for name, want in truth.sums.items():
        assert_close(recorder.sums.arrays()[name], want, rel=REL, where=name)
    for name, found in (
        ("gate_up", recorder.latent_moment),
        ("down", recorder.inner_moment),
    ):
        assert_close(found, truth.moments[name], rel=REL, where=name)


def biased_gates(moe: Any) -> Callable[[], None]:
    """The mistake of weighing with the scores that selection is made by."""
    route = type(moe).route

    def wrong(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        ids, weights = route(self, x)
        return ids, weights + self.e_score_correction_bias[ids]

    type(moe).route = wrong
    return lambda: setattr(type(moe), "route", route)


def test_the_selection_score_in_place_of_the_weight_is_found(plain: Pair):
    steps, moe = two_steps(plain), plain.model.layers[LAYER].mlp
    restore = biased_gates(moe)
    try:
        wrong = far_from(record(moe, steps), truth_of(plain, steps))
    finally:
        restore()
    assert {"gate_sum", "gate_square_sum", "reap_sum"} <= set(wrong)
    assert "count" not in wrong


def test_padding_left_in_and_corpora_mixed_up_are_found(plain: Pair):
    steps, moe = two_steps(plain), plain.model.layers[LAYER].mlp
    truth = truth_of(plain, steps)
    assert not far_from(record(moe, steps), truth)
    kept = [(x, np.maximum(labels, 0)) for x, labels in steps]
    assert {"count", "reap_sum", "relative_sum"} <= set(
        far_from(record(moe, kept), truth)
    )
    mixed = [(x, np.where(labels < 0, -1, (labels + 1) % 3)) for x, labels in steps]
    assert {"count", "reap_sum"} <= set(far_from(record(moe, mixed), truth))


@pytest.mark.parametrize("split", [0, 1, 5, 12])
@pytest.mark.parametrize("tokens", [1, 3, 33, 200])
def test_the_layer_does_not_notice(split: int, tokens: int):
    experts = two_banks(split)
    x, ids, weights = problem(tokens)
    want = experts.combine(x, ids, weights)
    for settings in ({}, {"chunk_tokens": 7}, {"moments": False}):
        recorder = ExpertRecorder(experts, 1, **settings)  # type: ignore[arg-type]
        recorder.labels = StepLabels(np.zeros(tokens), 1)
        assert_same(recorder.combine(x, ids, weights), want, where=str(settings))
        assert (recorder.latent_moment is None) == ("moments" in settings)
        assert recorder.sums.count.sum() == ids.size
        found = np.array(ids).reshape(-1)
        assert (recorder.sums.count[0] == np.bincount(found, minlength=EXPERTS)).all()


def test_float_experts_and_a_whole_layer_notice_nothing():
    model = t0_model()
    x = mx.random.normal((2, 40, 64), key=mx.random.key(3))
    moe = model.layers[LAYER].mlp
    want, experts = moe(x), moe.switch_mlp
    with recorded_experts(moe, 1) as recorder:
        recorder.labels = StepLabels(np.zeros((2, 40)), 1)
        assert moe.switch_mlp is recorder
        assert_same(moe(x), want, where="layer")
    assert moe.switch_mlp is experts
    assert_same(moe(x), want, where="layer afterwards")
    assert {"gate_proj", "up_proj", "down_proj"} <= set(experts)


def test_experts_come_back_after_a_failure():
    moe = t0_model().layers[LAYER].mlp
    experts = moe.switch_mlp
    with pytest.raises(RuntimeError, match="stop"), recorded_experts(moe, 1):
        raise RuntimeError("stop")
    assert moe.switch_mlp is experts


def test_slots_of_weight_0_do_not_count():
    """With ``expert_top_p`` a slot of weight 0 means that the expert is not run."""
    x, ids, weights = problem(33)
    for skips in (True, False):
        experts = two_banks(5)
        experts.skips = skips
        recorder = ExpertRecorder(experts, 1)
        recorder.labels = StepLabels(np.zeros(33), 1)
        got = recorder.combine(x, ids, weights)
        assert_same(got, experts.combine(x, ids, weights), where="sum")
        used = int((np.array(weights) != 0).sum()) if skips else ids.size
        assert recorder.sums.count.sum() == used


def test_two_runs_are_equal_to_the_bit(plain: Pair):
    steps, moe = two_steps(plain), plain.model.layers[LAYER].mlp
    first, second = (record(moe, steps, chunk_tokens=16) for _ in range(2))
    for name, array in first.sums.arrays().items():
        assert_same(second.sums.arrays()[name], array, where=name)
    assert_same(second.inner_moment, first.inner_moment, where="down")
    assert_same(second.latent_moment, first.latent_moment, where="gate_up")


def test_labels_that_do_not_fit_are_refused():
    experts = two_banks(5)
    recorder = ExpertRecorder(experts, 2)
    x, ids, weights = problem(3)
    with pytest.raises(CalibrationError, match="3 tokens .* with 0 labels"):
        recorder.combine(x, ids, weights)
    recorder.labels = StepLabels(np.zeros(4), 2)
    with pytest.raises(CalibrationError, match="3 tokens .* with 4 labels"):
        recorder.combine(x, ids, weights)
    with pytest.raises(CalibrationError, match="labels run from -1 to 2"):
        StepLabels(np.array([-1, 2]), 2)
    with pytest.raises(CalibrationError, match="chunk_tokens is 0"):
        ExpertRecorder(experts, 2, chunk_tokens=0)


def test_sums_of_another_shape_are_refused():
    sums = ExpertSums.zeros(2, 4)
    with pytest.raises(CalibrationError, match=r"gate_sum is float64 \(2, 3\)"):
        ExpertSums(**sums.arrays() | {"gate_sum": np.zeros((2, 3))})
    with pytest.raises(CalibrationError, match=r"count is float64 .*, wanted int64"):
        ExpertSums(**sums.arrays() | {"count": np.zeros((2, 4))})
