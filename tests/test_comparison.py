"""Two builds beside each other: paired differences, refusals, the verb ``compare``."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_evaluations import ABOUT, in_order, made_evaluation

from kimi_k3.cli import main
from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation.comparison import DIFFERENCES, Comparison, excludes_zero
from kimi_k3.evaluation.evaluation import GROUPINGS, Evaluation
from kimi_k3.evaluation.statistics import Bootstrap, Estimate
from kimi_k3.evaluation.summary import Row, Summary


def looped(a: Evaluation, b: Evaluation, weights: np.ndarray) -> dict[str, float]:
    """Every difference over predictions that count ``weights`` times each."""
    total, kl_a, kl_b, nll, agrees = 0.0, 0.0, 0.0, 0.0, 0.0
    for i, weight in enumerate(weights.tolist()):
        total += weight
        kl_a += weight * float(a.kl[i])
        kl_b += weight * float(b.kl[i])
        nll += weight * (float(b.build_nll[i]) - float(a.build_nll[i]))
        agrees += weight * (int(b.agrees[i]) - int(a.agrees[i]))
    if not total:
        return dict.fromkeys(DIFFERENCES, np.nan)
    return {
        "kl": (kl_b - kl_a) / total,
        "kl_ratio": kl_b / kl_a,
        "log_ppl": nll / total,
        "agreement": agrees / total,
    }


def check_row(row: Row, a: Evaluation, b: Evaluation, which: np.ndarray) -> None:
    bootstrap = Bootstrap(a.document, a.corpus, 40, seed=5)
    counts = bootstrap.drawn(np.eye(bootstrap.units))[:, bootstrap.unit]
    values = looped(a, b, which.astype(float))
    draws = [looped(a, b, which * count) for count in counts]
    assert list(row.estimates) == list(DIFFERENCES)
    for name, estimate in row.estimates.items():
        assert estimate.value == pytest.approx(values[name], rel=1e-9)
        ends = np.nanquantile([draw[name] for draw in draws], [0.025, 0.975])
        found = (estimate.low, estimate.high)
        assert found == pytest.approx(ends.tolist(), rel=1e-9, abs=1e-15)


def test_differences_are_those_of_a_loop_over_predictions():
    a = made_evaluation(9, most_tokens=14)
    b = made_evaluation(9, most_tokens=14, seed=1, worse=1.5)
    comparison = Comparison.of(a, b, draws=40, seed=5)
    check_row(comparison.overall, a, b, np.ones(len(a.kl), bool))
    assert list(comparison.groups) == list(GROUPINGS)
    think = a.groups("span")["think"]
    check_row(comparison.groups["span"]["think"], a, b, think)
    # Broken twin: the builds exchanged.
    with pytest.raises(AssertionError):
        check_row(comparison.overall, b, a, np.ones(len(a.kl), bool))


def test_pairing_is_what_makes_it_sure():
    a = made_evaluation(40)
    b = made_evaluation(40, seed=1, worse=1.2)
    found = Comparison.of(a, b, draws=500).overall.estimates["kl"]
    alone = [Summary.of(one, draws=500).overall.estimates["kl"] for one in (a, b)]
    assert found.value == pytest.approx(alone[1].value - alone[0].value, rel=1e-9)
    widths = [one.high - one.low for one in (found, *alone) if one.high and one.low]
    assert len(widths) == 3
    assert widths[0] < 0.7 * np.hypot(widths[1], widths[2])


def test_a_build_and_itself_do_not_differ():
    a = made_evaluation()
    comparison = Comparison.of(a, a, draws=50)
    assert comparison.overall.estimates["kl"] == Estimate(0.0, 0.0, 0.0)
    assert comparison.overall.estimates["kl_ratio"] == Estimate(1.0, 1.0, 1.0)
    assert "The interval of KL holds 0" in comparison.text()
    assert max(map(len, comparison.text().splitlines())) <= 80


def test_exchanged_builds_give_the_opposite():
    a, b = made_evaluation(), made_evaluation(seed=3, worse=2)
    there = Comparison.of(a, b, draws=100).overall.estimates["kl"]
    back = Comparison.of(b, a, draws=100).overall.estimates["kl"]
    assert there.low is not None
    assert (back.value, back.high) == pytest.approx((-there.value, -there.low))
    assert excludes_zero(there)
    assert "excludes 0: A is closer" in Comparison.of(a, b).text()
    assert "excludes 0: B is closer" in Comparison.of(b, a).text()


def test_without_kl_of_the_first_there_is_no_ratio():
    a, b = made_evaluation(), made_evaluation(seed=3)
    exact = replace(a, kl=np.zeros_like(a.kl))
    comparison = Comparison.of(exact, b, draws=50)
    assert "kl_ratio" not in comparison.overall.estimates
    assert "times that of A" not in comparison.text()


def test_one_document_gives_no_verdict():
    a, b = (
        in_order(one, np.flatnonzero(one.document == 1))
        for one in (made_evaluation(), made_evaluation(seed=1))
    )
    comparison = Comparison.of(a, b)
    assert comparison.overall.estimates["kl"].low is None
    assert "There is no interval" in comparison.text()


def with_side(side: str, **changed: Any) -> Callable[[Evaluation], Evaluation]:
    def change(evaluation: Evaluation) -> Evaluation:
        about = {**ABOUT, side: {**evaluation.about[side], **changed}}
        return replace(evaluation, about=about)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_side("teacher", checkpoint="x" * 64), "another teacher (tttt"),
        (with_side("teacher", values="x" * 32), "a teacher of other values (unknown"),
        (with_side("teacher", samples="x" * 64), "other samples (ssss"),
        (with_side("teacher", tokenizer="x" * 64), "another tokenizer"),
        (
            with_side("teacher", dtype="float32"),
            "another type to compute in (stored and float32)",
        ),
        (with_side("build", dtype="float32"), "builds computed in another type"),
        (
            lambda e: replace(
                e, about={**e.about, "direction": "KL(build || teacher)"}
            ),
            "another direction",
        ),
        (lambda e: in_order(e, np.arange(len(e.kl) - 1)), "other predictions"),
        (lambda e: replace(e, corpora=("x", "y", "z")), "other predictions"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    change: Callable[[Evaluation], Evaluation], told: str
):
    a = made_evaluation()
    with pytest.raises(EvaluationError) as error:
        Comparison.of(a, change(made_evaluation(seed=1)))
    assert told in str(error.value)
    assert "kimi-k3 teacher" in str(error.value)


def test_other_roundings_are_noted():
    a = made_evaluation()
    b = with_side("teacher", device="gpu")(made_evaluation(seed=1))
    b = replace(b, teacher_nll=b.teacher_nll + 1e-7)
    text = Comparison.of(a, b, draws=20).text()
    assert (
        "teacher: device was cpu for A and gpu for B, which changes roundings" in text
    )
    assert "-log p differs by up to 1.0e-07 nats" in text


def test_text_fits_a_terminal():
    long = ("a corpus with quite a long name", "chat", "中文语料")
    for size in (1e-6, 1.0, 30.0):
        a = made_evaluation(60, most_tokens=300, corpora=long, worse=size)
        b = made_evaluation(60, most_tokens=300, corpora=long, worse=2 * size, seed=1)
        text = Comparison.of(a, b, draws=50).text()
        assert max(map(len, text.splitlines())) <= 80


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Of three builds of one teacher, and one of another."""
    made = [made_evaluation(seed=seed, worse=1 + seed) for seed in range(3)]
    made.append(with_side("teacher", checkpoint="x" * 64)(made[1]))
    for number, evaluation in enumerate(made):
        (tmp_path / str(number)).mkdir()
        evaluation.save(tmp_path / str(number))
    return [str(tmp_path / str(number)) for number in range(4)]


def test_the_verb_compares_all_with_the_first(
    folders: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["compare", *folders[:3], "--draws", "100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["a"] == folders[0]
    assert [one["folder"] for one in document["comparisons"]] == folders[1:3]
    first = Evaluation.load(folders[0]), Evaluation.load(folders[1])
    want = Comparison.of(*first, draws=100).to_dict()
    assert document["comparisons"][0] == {"folder": folders[1], **want}

    assert main(["compare", *folders[:3], "--draws", "100"]) == 0
    text = capsys.readouterr().out
    assert text.count("excludes 0: A is closer") == 2
    assert "100 draws" in text


def test_the_verb_says_what_is_wrong(
    folders: list[str], capsys: pytest.CaptureFixture[str]
):
    for arguments, told in (
        ([folders[0], folders[3]], f"{folders[0]} and {folders[3]}: these evaluations"),
        ([folders[0], "nowhere"], "nowhere"),
        ([*folders[:2], "--draws", "0"], "draw at least once"),
        ([*folders[:2], "--seed", "-1"], "--seed is -1"),
    ):
        assert main(["compare", *arguments]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert len(error.splitlines()) == 1
