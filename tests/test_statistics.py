"""Intervals: documents are drawn within corpora, all their predictions with them."""

import tracemalloc

import numpy as np
import pytest

from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation import statistics
from kimi_k3.evaluation.statistics import Bootstrap, Estimate, interval, ratios


def drawn_documents(counts: list[int], draws: int, seed: int) -> list[list[np.ndarray]]:
    """Draw → corpus → which of its documents, n − 1 of n."""
    picks = []
    for number, count in enumerate(counts):
        random = np.random.default_rng([seed, number])
        alone = np.zeros((draws, 1), int)
        picks.append(
            random.integers(0, count, (draws, count - 1)) if count > 1 else alone
        )
    return [[pick[draw] for pick in picks] for draw in range(draws)]


def looped_mean(
    values: np.ndarray, documents: np.ndarray, strata: np.ndarray, which: np.ndarray
) -> list[float]:
    """The mean of ``values[which]`` in each of 30 draws, from the raw predictions."""
    corpora = sorted(set(strata.tolist()))
    members = [sorted(set(documents[strata == c].tolist())) for c in corpora]
    means = []
    for draw in drawn_documents([len(m) for m in members], 30, 7):
        total = weight = 0.0
        for corpus, names, picked in zip(corpora, members, draw, strict=True):
            each = len(names) / len(picked)
            for pick in picked:
                for i in range(len(values)):
                    own = documents[i] == names[pick] and strata[i] == corpus
                    if own and which[i]:
                        total += each * values[i]
                        weight += each
        means.append(total / weight if weight else np.nan)
    return means


def made(seed: int = 0, size: int = 160) -> tuple[np.ndarray, ...]:
    """Values, documents and corpora of three sizes, one of a single document."""
    random = np.random.default_rng(seed)
    documents = random.integers(0, 12, size)
    strata = np.where(documents == 5, 9, np.where(documents < 5, 4, 2))
    return random.lognormal(0, 1, size), documents * 10, strata


@pytest.mark.parametrize("share", [1.0, 0.5, 0.02])
def test_sums_are_those_of_a_loop_over_raw_predictions(share: float):
    values, documents, strata = made()
    which = np.random.default_rng(1).random(len(values)) < share
    bootstrap = Bootstrap(documents, strata, draws=30, seed=7)
    got = ratios(bootstrap.sums(values, which), bootstrap.sums(None, which))
    want = looped_mean(values, documents, strata, which)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    if share == 1:
        # Broken twin: one value elsewhere.
        values[3] += 1
        off = ratios(bootstrap.sums(values), bootstrap.sums(None))
        assert (np.abs(off / want - 1) > 1e-9).any()
    if share == 0.02:
        assert np.isnan(want).any(), "no draw without the group: the case is missing"


def test_order_of_predictions_and_memory_change_nothing(monkeypatch):
    values, documents, strata = made()
    want = Bootstrap(documents, strata, draws=50, seed=3).sums(values)
    order = np.random.default_rng(5).permutation(len(values))
    bootstrap = Bootstrap(documents[order], strata[order], draws=50, seed=3)
    np.testing.assert_allclose(bootstrap.sums(values[order]), want, rtol=1e-12)
    monkeypatch.setattr(statistics, "_AT_ONCE", 13)
    np.testing.assert_allclose(bootstrap.sums(values[order]), want, rtol=1e-12)
    again = Bootstrap(documents, strata, draws=50, seed=3)
    np.testing.assert_array_equal(again.sums(values), again.sums(values))
    other = Bootstrap(documents, strata, draws=50, seed=4)
    assert (other.sums(values) != want).any()


def test_memory_does_not_grow_with_draws_times_documents(monkeypatch):
    monkeypatch.setattr(statistics, "_AT_ONCE", 1 << 16)
    documents = np.arange(20_000)
    bootstrap = Bootstrap(documents, documents % 2, draws=400)
    totals = np.ones((len(documents), 2))
    tracemalloc.start()
    bootstrap.drawn(totals)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All weights at once are 64 MB.
    assert peak < bootstrap.draws * len(documents)


def test_a_corpus_never_vanishes():
    documents = np.arange(20)
    strata = np.array([0] * 17 + [1] * 3)
    of_small = (strata == 1).astype(float)
    kept = Bootstrap(documents, strata, draws=500).sums(of_small)
    np.testing.assert_allclose(kept, 3.0, rtol=1e-12)
    # Broken twin: all documents as one corpus.
    pooled = Bootstrap(documents, np.zeros_like(strata), draws=500).sums(of_small)
    assert (pooled == 0).any()


def test_one_number_in_two_corpora_is_two_documents():
    same = Bootstrap(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), draws=5)
    other = Bootstrap(np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1]), draws=5)
    values = np.array([1.0, 2, 4, 8])
    assert same.units == 4
    np.testing.assert_array_equal(same.sums(values), other.sums(values))


def test_the_spread_is_that_of_a_mean():
    """Standard deviation of draws of the mean of n documents: s/√n, with n − 1 in s."""
    values = np.array([1.0, 2.0, 4.0, 8.0])
    bootstrap = Bootstrap(np.arange(4), np.zeros(4), draws=40_000)
    spread = (bootstrap.sums(values) / 4).std()
    want = values.std(ddof=1) / 2
    assert spread == pytest.approx(want, rel=0.02)
    assert spread != pytest.approx(values.std(ddof=0) / 2, rel=0.02)


def experiments(count: int, by_token: bool = False, size: int = 25) -> float:
    """How often the interval holds the true mean of documents that differ.

    ``size`` is the number of documents of each of two corpora.
    """
    random = np.random.default_rng(11)
    held = 0
    corpora, tokens = 2, 15
    strata = np.repeat(np.arange(corpora), size * tokens)
    documents = np.repeat(np.arange(corpora * size), tokens)
    level = np.array([-4.0, -2.5])
    truth = np.exp(level + (0.6**2 + 0.8**2) / 2).mean()
    for number in range(count):
        own = random.normal(level[:, None], 0.6, (corpora, size))
        values = np.exp(random.normal(own[..., None], 0.8, (corpora, size, tokens)))
        unit = np.arange(len(documents)) if by_token else documents
        found = Bootstrap(unit, strata, draws=300, seed=number).mean(values.reshape(-1))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    return held / count


def test_intervals_hold_the_truth():
    # 200 tries at 95 % give 89 % or less, or 99.6 % or more, less than once in 500.
    assert 0.89 < experiments(200) < 0.996


def test_few_documents_leave_them_too_narrow():
    """What the summary's text says of few documents."""
    assert 0.7 < experiments(200, size=6) < 0.9


def test_tokens_of_a_document_are_not_independent():
    """Broken twin: drawing tokens gives intervals that are much too narrow."""
    assert experiments(60, by_token=True) < 0.75


def test_paired_differences_are_narrower():
    random = np.random.default_rng(2)
    documents, strata = np.repeat(np.arange(40), 10), np.repeat(np.arange(2), 200)
    hard = np.exp(random.normal(0, 1, 40))[documents]
    a = hard * np.exp(random.normal(0, 0.2, 400))
    b = hard * np.exp(random.normal(0, 0.2, 400)) * 1.1
    one, other = (Bootstrap(documents, strata, seed=seed) for seed in (0, 1))
    paired = interval(0.1, (one.sums(b) - one.sums(a)) / 400)
    unpaired = interval(0.1, (one.sums(b) - other.sums(a)) / 400)
    width = [x.high - x.low for x in (paired, unpaired) if x.high and x.low is not None]
    assert width[0] < width[1] / 2
    assert paired.low is not None
    assert paired.low > 0
    assert unpaired.low is not None
    assert unpaired.low < 0


@pytest.mark.parametrize(
    ("documents", "strata"),
    [([0, 0, 0], [0, 0, 0]), ([0, 1, 2], [0, 0, 1]), ([0, 1, 2], [0, 1, 2])],
    ids=["one document", "one alone in its corpus", "each alone"],
)
def test_no_interval_where_draws_tell_nothing(documents: list[int], strata: list[int]):
    bootstrap = Bootstrap(np.array(documents), np.array(strata))
    found = bootstrap.mean(np.array([1.0, 2.0, 6.0]))
    assert found == Estimate(3.0, None, None)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(EvaluationError, match=r"shape \(0,\)"):
        Bootstrap(np.array([]), np.array([]))
    with pytest.raises(EvaluationError, match=r"both are \(N,\)"):
        Bootstrap(np.arange(3), np.arange(2))
    with pytest.raises(EvaluationError, match="at least once"):
        Bootstrap(np.arange(3), np.zeros(3), draws=0)
    bootstrap = Bootstrap(np.arange(3), np.zeros(3))
    with pytest.raises(EvaluationError, match="no predictions"):
        bootstrap.mean(np.ones(3), np.zeros(3, bool))


@pytest.mark.parametrize(
    "parts", [(np.nan,), (1.0, 0.5), (1.0, 0.5, np.inf), (1.0, 2.0, 0.5)]
)
def test_half_an_estimate_is_refused(parts: tuple[float, ...]):
    with pytest.raises(EvaluationError, match="no estimate|reversed"):
        Estimate(*parts)


def test_estimates_come_back_from_plain_values():
    for one in (Estimate(1.5, 1.0, 2.0), Estimate(0.0)):
        assert Estimate.from_dict(one.to_dict()) == one
    for wrong in ({"value": 1.0}, {"value": "x", "low": None, "high": None}):
        with pytest.raises(EvaluationError, match="no estimate"):
            Estimate.from_dict(wrong)


@pytest.mark.parametrize(("documents", "there"), [(4, False), (5, True)])
def test_a_handful_of_documents_has_no_interval(documents: int, there: bool):
    bootstrap = Bootstrap(np.arange(documents), np.zeros(documents, int))
    varies = bootstrap.varies(bootstrap.totals(None))
    assert varies is there
