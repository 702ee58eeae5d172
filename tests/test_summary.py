"""The numbers of an evaluation, against loops over its predictions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_evaluations import in_order, made_evaluation

from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation.evaluation import GROUPINGS, Evaluation
from kimi_k3.evaluation.statistics import Bootstrap, Estimate
from kimi_k3.evaluation.summary import ESTIMATES, Row, Summary
from kimi_k3.evaluation.summary_text import FEW_TEXT, number_text

DRAWS = 40


def looped(evaluation: Evaluation, weights: np.ndarray) -> dict[str, float]:
    """Every estimate of predictions that count ``weights`` times each."""
    sums = dict.fromkeys(ESTIMATES, 0.0)
    total = 0.0
    for i, weight in enumerate(weights.tolist()):
        kl = float(evaluation.kl[i])
        total += weight
        sums["teacher_ppl"] += weight * float(evaluation.teacher_nll[i])
        sums["build_ppl"] += weight * float(evaluation.build_nll[i])
        sums["kl"] += weight * kl
        sums["agreement"] += weight * bool(evaluation.agrees[i])
        sums["below_0.01"] += weight * (kl < 0.01)
        sums["below_0.1"] += weight * (kl < 0.1)
    means = {name: value / total if total else np.nan for name, value in sums.items()}
    means["ppl_ratio"] = np.exp(means["build_ppl"] - means["teacher_ppl"])
    for name in ("teacher_ppl", "build_ppl"):
        means[name] = np.exp(means[name])
    for name, share in (("kl_median", 0.5), ("kl_p90", 0.9), ("kl_p99", 0.99)):
        kept = np.sort(evaluation.kl[weights > 0])
        place = share * (len(kept) - 1) if len(kept) else 0.0
        below, part = int(place), place % 1
        means[name] = np.nan
        if len(kept):
            above = kept[min(below + 1, len(kept) - 1)]
            means[name] = kept[below] + part * (above - kept[below])
    return means


def drawn_weights(evaluation: Evaluation) -> np.ndarray:
    """How often each prediction counts in each draw, (draws, N), from the same draws."""
    bootstrap = Bootstrap(evaluation.document, evaluation.corpus, DRAWS, seed=5)
    return bootstrap.drawn(np.eye(bootstrap.units))[:, bootstrap.unit]


def check_row(row: Row, evaluation: Evaluation, which: np.ndarray) -> None:
    assert row.tokens == which.sum()
    assert row.documents == len(set(evaluation.document[which].tolist()))
    assert list(row.estimates) == list(ESTIMATES)
    values = looped(evaluation, which.astype(float))
    draws = [looped(evaluation, which * w) for w in drawn_weights(evaluation)]
    for name, estimate in row.estimates.items():
        assert estimate.value == pytest.approx(values[name], rel=1e-12)
        if row.documents < 5 or name in ("kl_median", "kl_p90", "kl_p99"):
            assert estimate.low is None
            continue
        ends = np.nanquantile([draw[name] for draw in draws], [0.025, 0.975])
        assert (estimate.low, estimate.high) == pytest.approx(ends.tolist(), rel=1e-10)


def test_rows_are_those_of_a_loop_over_predictions():
    evaluation = made_evaluation(18, most_tokens=14)
    summary = Summary.of(evaluation, draws=DRAWS, seed=5)
    check_row(summary.overall, evaluation, np.ones(len(evaluation.kl), bool))
    assert list(summary.groups) == list(GROUPINGS)
    for grouping in GROUPINGS:
        wanted = evaluation.groups(grouping)
        assert list(summary.groups[grouping]) == list(wanted)
    spans = evaluation.groups("span")
    for name in ("think", "tool call"):
        check_row(summary.groups["span"][name], evaluation, spans[name])
    chat = evaluation.groups("corpus")["chat"]
    check_row(summary.groups["corpus"]["chat"], evaluation, chat)
    # Broken twin: one prediction is another one's.
    kl = evaluation.kl.copy()
    kl[3] *= 1.001
    with pytest.raises(AssertionError):
        check_row(summary.overall, replace(evaluation, kl=kl), np.ones(len(kl), bool))


def test_order_changes_nothing_and_the_seed_does():
    evaluation = made_evaluation()
    want = Summary.of(evaluation, draws=200)
    assert Summary.of(evaluation, draws=200) == want
    order = np.random.default_rng(0).permutation(len(evaluation.kl))
    other = Summary.of(in_order(evaluation, order), draws=200)
    for name, estimate in other.overall.estimates.items():
        same = want.overall.estimates[name]
        assert estimate.value == pytest.approx(same.value, rel=1e-12)
        assert (estimate.low or 0.0) == pytest.approx(same.low or 0.0, rel=1e-12)
    seeded = Summary.of(evaluation, draws=200, seed=1)
    assert seeded.overall.estimates["kl"] != want.overall.estimates["kl"]


def test_a_model_and_itself():
    evaluation = made_evaluation(worse=0.0)
    evaluation = replace(
        evaluation,
        build_nll=evaluation.teacher_nll,
        agrees=np.ones(len(evaluation.kl), bool),
    )
    estimates = Summary.of(evaluation, draws=100).overall.estimates
    assert estimates["kl"] == Estimate(0.0, 0.0, 0.0)
    assert estimates["ppl_ratio"] == Estimate(1.0, 1.0, 1.0)
    for name in ("agreement", "below_0.01", "below_0.1"):
        value = estimates[name]
        assert (value.value, value.low) == pytest.approx((1.0, 1.0), rel=1e-12)
    assert number_text(0.0) == "0"


def test_one_document_has_no_interval():
    evaluation = made_evaluation()
    one = in_order(evaluation, np.flatnonzero(evaluation.document == 4))
    summary = Summary.of(one)
    assert all(e.low is None for e in summary.overall.estimates.values())
    assert summary.overall.documents == 1
    assert "Without an interval: too few documents" in summary.text()


def test_saved_and_read_again(tmp_path: Path):
    summary = Summary.of(made_evaluation(), draws=50)
    summary.save(tmp_path)
    assert Summary.load(tmp_path) == summary
    file = tmp_path / "evaluation.json"
    assert Summary.load(file) == summary
    content = json.loads(file.read_text())
    assert content["groups"]["span"]["think"]["tokens"] > 0
    content["overall"]["tokens"] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match="was changed after it was written"):
        Summary.load(tmp_path)
    with pytest.raises(EvaluationError, match=r"is not there.*kimi-k3 evaluate"):
        Summary.load(tmp_path / "none.json")
    with pytest.raises(EvaluationError, match="a summary lacks 'predictions'"):
        Summary.from_dict({"about": {}})


def test_a_hopeless_build_has_numbers_too():
    evaluation = made_evaluation()
    lost = replace(evaluation, build_nll=evaluation.build_nll + 5000)
    estimates = Summary.of(lost, draws=20).overall.estimates
    assert np.isfinite(estimates["build_ppl"].value)
    assert estimates["build_ppl"].value > 1e300


def test_text_tells_what_a_reader_needs():
    long = ("a corpus with quite a long name", "chat", "中文语料")
    for size in (1e-9, 1.0, 40.0):
        evaluation = made_evaluation(60, most_tokens=300, corpora=long, worse=size)
        text = Summary.of(evaluation, draws=50).text()
        assert "so few" not in text
        assert max(map(len, text.splitlines())) <= 80
    for words in (
        *("KL(teacher || build), nats", "teacher-folder", "build-folder"),
        *("stored type", "overlap  not checked; --calibration FOLDER checks it"),
        *("by corpus", "by span", "by language", "by position", "tool result"),
        *("95%, from drawing documents", "64 to 255", "a corpus with …"),
    ):
        assert words in text


def test_text_names_the_calibration_that_was_checked():
    told = f"none with the calibration {'f' * 64}"
    text = Summary.of(made_evaluation(overlap=told), draws=20).text()
    assert FEW_TEXT in text
    assert "overlap  none with the calibration ffffffffffff\n" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0392, "0.0392"), (1.0, "1.00"), (12.345, "12.3"), (123.4, "123")),
        *((98765.4, "98,765"), (3e-7, "3.00e-07"), (2.5e7, "2.50e+07"), (0, "0")),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert number_text(value) == text
