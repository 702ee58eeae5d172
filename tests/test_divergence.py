"""KL, log-likelihoods and agreement = float64 loops over the whole vocabulary."""

import mlx.core as mx
import numpy as np
import oracle_divergence as oracle
import pytest

from kimi_k3.evaluation import divergence as module
from kimi_k3.evaluation.divergence import Divergences, divergences, kl_divergence

#: Relative error of a KL, and absolute error, in nats, of a log-likelihood up to 20.
KL, NLL = 1e-5, 4e-6

#: Where the float64 sum itself cancels, in nats; below, 60 digits judge.
CANCELS = 1e-14

#: Most tokens for which there is time for 60 digits.
FEW = 40


def compared(teacher: np.ndarray, build: np.ndarray) -> Divergences:
    targets = np.arange(len(teacher), dtype=np.int32) % teacher.shape[1]
    return divergences(mx.array(teacher), mx.array(build), targets)


def assert_as_loops(teacher: np.ndarray, build: np.ndarray) -> Divergences:
    """Every number = that of the loops over the same float32 logits."""
    got = compared(teacher, build)
    assert got.kl.dtype == got.teacher_nll.dtype == got.build_nll.dtype == np.float64
    for i, (a, b) in enumerate(zip(teacher.tolist(), build.tolist(), strict=True)):
        target = i % len(a)
        assert got.kl[i] == pytest.approx(oracle.kl(a, b), rel=KL, abs=CANCELS), i
        if len(a) <= FEW:
            assert got.kl[i] == pytest.approx(oracle.exact_kl(a, b), rel=KL, abs=0), i
        for nll, logits in ((got.teacher_nll, a), (got.build_nll, b)):
            assert nll[i] == pytest.approx(
                oracle.nll(logits, target), rel=1e-6, abs=NLL
            )
        assert got.agrees[i] == (oracle.likeliest(a) == oracle.likeliest(b))
    return got


def logits(
    rows: int, vocab: int, scale: float, apart: float, higher: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Teacher and build whose logits are ``apart``, the build's ``higher``."""
    rng = np.random.default_rng(vocab)
    teacher = rng.standard_normal((rows, vocab)) * scale
    build = teacher + rng.standard_normal((rows, vocab)) * apart + higher
    return teacher.astype(np.float32), build.astype(np.float32)


@pytest.mark.parametrize("vocab", [2, 3, 33, 1000, 4097])
@pytest.mark.parametrize("apart", [0.03, 1.0, 10.0])
@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])
def test_whole_vocabulary(vocab: int, apart: float, scale: float):
    got = assert_as_loops(*logits(4, vocab, scale, apart))
    assert got.kl.min() > 0


def test_the_release_s_vocabulary():
    for apart in (1e-2, 3.0):
        assert_as_loops(*logits(2, 163_840, 3.0, apart))


#: How far logits are apart, and how much higher the build's are: float32 has no more
#: digits than that.
APART = [(apart, 0) for apart in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
APART += [(apart, higher) for apart in (1e-3, 1e-2, 1e-1) for higher in (2.5, -37)]


@pytest.mark.parametrize(("apart", "higher"), APART)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_small_divergences_do_not_drown(apart: float, higher: float, scale: float):
    got = assert_as_loops(*logits(4, FEW, scale, apart, higher))
    assert got.kl.max() < apart


def test_two_rounded_logarithms_would_not_do():
    """Broken twin: the textbook sum in float32 fails the same comparison."""
    teacher, build = logits(8, FEW, 6.0, 1e-3)
    p = mx.array(teacher) - mx.logsumexp(mx.array(teacher), axis=-1, keepdims=True)
    q = mx.array(build) - mx.logsumexp(mx.array(build), axis=-1, keepdims=True)
    naive = np.array((mx.exp(p) * (p - q)).sum(axis=-1), np.float64)
    want = [
        oracle.exact_kl(a, b)
        for a, b in zip(teacher.tolist(), build.tolist(), strict=True)
    ]
    errors = np.abs(naive - want) / want
    assert errors.max() > 100 * KL


def test_less_than_the_whole_vocabulary_is_seen():
    """Broken twin: only the likeliest tokens, or another direction, are not the same."""
    teacher, build = logits(1, 1000, 2.0, 1.0)
    want = oracle.kl(teacher[0].tolist(), build[0].tolist())
    best = np.argsort(-teacher[0])[:500]
    some = compared(teacher[:, best], build[:, best]).kl[0]
    assert abs(some - want) > 500 * KL * want
    other = compared(build, teacher).kl[0]
    assert abs(other - want) > 1000 * KL * want
    assert other == pytest.approx(
        oracle.kl(build[0].tolist(), teacher[0].tolist()), rel=KL
    )


EXTREMES = {
    "large": ([1e4, 9999, -1e4, 0], [9998, 1e4, 1e4, 1e4]),
    "equal": ([5, 5, 5, 5], [5, 5, 5, 5]),
    "equal-and-higher": ([5, 5, 5, 5], [-80, -80, -80, -80]),
    "one-sided": ([100, 0, 0, 0], [0, 0, 0, 100]),
    "certain": ([100, 0, 0, 0], [100, 0, 0, 1]),
    "nearly-zero": ([0, -80, -90, -200], [0, -85, -70, -100]),
    "masked": ([0, 1, -1e30, -1e30], [1, 0, -1e30, -1e30]),
    "masked-otherwise": ([0, 1, -1e30, 2], [1, 0, 3, 1]),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str):
    teacher, build = (np.array([x], np.float32) for x in EXTREMES[name])
    got = compared(teacher, build).kl[0]
    a, b = teacher[0].tolist(), build[0].tolist()
    if name.startswith("equal"):
        assert got == 0
    # Below float32's smallest number is nothing.
    assert got == pytest.approx(oracle.exact_kl(a, b), rel=KL, abs=1e-37)
    assert got == pytest.approx(oracle.kl(a, b), rel=KL, abs=CANCELS)


def test_impossible_tokens():
    """Of probability 0 in both: as if they were not there. In the build alone: infinite."""
    teacher = np.array([[0.5, 1, 2, -np.inf], [0, 1, -np.inf, 1]], np.float32)
    build = np.array([[1, 0.25, 2, -np.inf], [1, 2, 0.5, 0]], np.float32)
    got = np.array(kl_divergence(mx.array(teacher), mx.array(build)))
    assert got[0] == pytest.approx(oracle.kl([0.5, 1, 2], [1, 0.25, 2]), rel=KL)
    p, q = oracle.log_softmax([0, 1, 1]), oracle.log_softmax([1, 2, 0.5, 0])
    want = sum(np.exp(a) * (a - b) for a, b in zip(p, (q[0], q[1], q[3]), strict=True))
    assert got[1] == pytest.approx(want, rel=KL)
    back = np.array(kl_divergence(mx.array(build), mx.array(teacher)))
    assert back[1] == np.inf


def test_a_vocabulary_of_one_token():
    got = compared(np.array([[3.0], [-1e4]], np.float32), np.zeros((2, 1), np.float32))
    assert (
        got.kl.tolist() == got.teacher_nll.tolist() == got.build_nll.tolist() == [0, 0]
    )
    assert got.agrees.all()


def test_a_model_and_itself():
    teacher, _ = logits(4, 4097, 10, 0)
    got = compared(teacher, teacher)
    assert (got.kl == 0).all()
    assert (got.teacher_nll == got.build_nll).all()
    assert got.agrees.all()
    higher = (teacher + np.float32(64)).astype(np.float32)
    assert compared(teacher, higher).kl.max() < 1e-7


def test_of_equals_the_first_is_the_likeliest():
    teacher = np.array([[1, 2, 2], [1, 2, 2]], np.float32)
    build = np.array([[0, 3, 3], [0, 3, 3.5]], np.float32)
    assert compared(teacher, build).agrees.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_logits_of_a_narrow_type_are_compared_in_float32(dtype: mx.Dtype):
    teacher, build = (mx.array(x).astype(dtype) for x in logits(3, 100, 2, 0.5))
    got = divergences(teacher, build, np.zeros(3, np.int32))
    wide = [x.astype(mx.float32) for x in (teacher, build)]
    want = divergences(wide[0], wide[1], np.zeros(3, np.int32))
    assert got.kl.tolist() == want.kl.tolist()


def test_predictions_do_not_touch_each_other():
    teacher, build = logits(7, 1000, 3, 0.3)
    together = compared(teacher, build)
    for i in range(7):
        alone = divergences(
            mx.array(teacher[i : i + 1]), mx.array(build[i : i + 1]), np.array([i])
        )
        assert alone.kl[0] == together.kl[i]
        assert alone.build_nll[0] == together.build_nll[i]


def test_every_form_of_a_term_is_needed(monkeypatch: pytest.MonkeyPatch):
    """Broken twin: one form for all differences fails where another is exact."""
    for name, value, apart in (("_NEAR", 0.0, 1e-3), ("_NEAR", 40.0, 10.0)):
        teacher, build = logits(4, FEW, 3.0, apart)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            got = compared(teacher, build).kl
        want = [
            oracle.exact_kl(a, b)
            for a, b in zip(teacher.tolist(), build.tolist(), strict=True)
        ]
        assert (np.abs(got - want) > KL * np.array(want)).any(), (name, value)
