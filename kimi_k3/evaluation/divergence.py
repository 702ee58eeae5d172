"""How one model's distribution of the next token differs from another's, in float32.

A build that is hardly damaged has divergences far below the rounding of a logarithm in
float32. So the difference of two log-probabilities is made of the difference of the
logits, and is as exact as that, instead of being taken between two rounded logarithms.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

#: Differences of log-probabilities up to which a series, and then ``expm1``, is exact.
_NEAR, _FAR = 0.5, 1.0

#: Terms of the series: the rest is below float32's rounding up to _NEAR.
_TERMS = 7

#: Numbers that are summed one after the other; sums of sums follow.
_SUMMED = 512


@dataclass(frozen=True, eq=False)
class Divergences:
    """Of N predictions, (N,) each, in nats.

    Attributes:
        kl: KL(teacher ‖ build) over the whole vocabulary, float64, ≥ 0.
        teacher_nll: −log p of the token that follows, under the teacher, float64.
        build_nll: the same under the build.
        agrees: whether both find the same token the likeliest.
    """

    kl: np.ndarray
    teacher_nll: np.ndarray
    build_nll: np.ndarray
    agrees: np.ndarray


def divergences(teacher: mx.array, build: mx.array, targets: np.ndarray) -> Divergences:
    """Compare logits (N, vocab) of ``teacher`` and ``build``; ``targets`` are (N,) ids.

    Of tokens that are equally likely the one with the lowest id counts as likeliest.
    """
    teacher, build = teacher.astype(mx.float32), build.astype(mx.float32)
    at = mx.array(targets)[:, None]
    found = (
        kl_divergence(teacher, build),
        -mx.take_along_axis(log_probabilities(teacher), at, axis=-1)[:, 0],
        -mx.take_along_axis(log_probabilities(build), at, axis=-1)[:, 0],
        teacher.argmax(axis=-1) == build.argmax(axis=-1),
    )
    mx.eval(found)
    kl, teacher_nll, build_nll, agrees = map(np.array, found)
    return Divergences(
        kl.astype(np.float64),
        teacher_nll.astype(np.float64),
        build_nll.astype(np.float64),
        agrees,
    )


def log_probabilities(logits: mx.array) -> mx.array:
    """Logits (..., vocab) → log-softmax in float32."""
    from_largest, log_sum = _normalised(logits.astype(mx.float32))
    return from_largest - log_sum


def kl_divergence(teacher: mx.array, build: mx.array) -> mx.array:
    """Logits (..., vocab) of both → (...) KL(teacher ‖ build) in nats, float32.

    Σ p·(d + e⁻ᵈ − 1) with d = log p − log q, which is Σ p·d because p and q both sum to
    1. No term is negative, so small divergences do not drown in rounding.
    """
    teacher, build = teacher.astype(mx.float32), build.astype(mx.float32)
    a, a_sum = _normalised(teacher)
    b, b_sum = _normalised(build)
    p, q = mx.exp(a - a_sum), mx.exp(b - b_sum)
    # Logits that are all higher by a constant are the same model's: from both maxima.
    shift = teacher.max(axis=-1, keepdims=True) - build.max(axis=-1, keepdims=True)
    difference = teacher - build
    delta = (difference - shift) + _rounded_away(teacher, build, difference)
    # The difference of the logarithmic sums is log Σ q·eᵟ, in numbers as small as δ.
    near = mx.abs(delta) < _NEAR
    small = q * mx.expm1(mx.where(near, delta, 0))
    grown = _sum(mx.where(near, small, mx.exp(a - b_sum) - q))
    exact = mx.abs(grown) < _NEAR
    sums = mx.where(exact, mx.log1p(mx.where(exact, grown, 0)), a_sum - b_sum)
    return _sum(_terms(p, q, delta - sums))[..., 0]


def _rounded_away(a: mx.array, b: mx.array, difference: mx.array) -> mx.array:
    """What ``difference``, which is a − b rounded, lacks of it (Knuth's two-sum)."""
    b_seen = a - difference
    lacking = (a - (difference + b_seen)) + (b_seen - b)
    return mx.where(mx.isfinite(lacking), lacking, 0)


def _terms(p: mx.array, q: mx.array, d: mx.array) -> mx.array:
    """p·(d + e⁻ᵈ − 1), in the form that is exact at each d."""
    size = mx.abs(d)
    # Where p is 0 in float32 d may be infinite; the limit of the term is q.
    far = mx.where(p > 0, p * (d - 1) + q, q)
    middle = p * (d + mx.expm1(-d))
    return mx.where(size < _NEAR, p * _excess(d), mx.where(size < _FAR, middle, far))


def _excess(d: mx.array) -> mx.array:
    """d + e⁻ᵈ − 1 for small d: d²/2 − d³/6 + …, where nothing cancels."""
    series = mx.ones_like(d)
    for n in range(_TERMS + 2, 2, -1):
        series = 1 - d / n * series
    return d * d / 2 * series


def _normalised(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Logits from the largest on, and the logarithm of the sum of their exponentials."""
    # Or what is small beside a large logit is rounded away twice.
    from_largest = logits - logits.max(axis=-1, keepdims=True)
    return from_largest, mx.log(_sum(mx.exp(from_largest)))


def _sum(terms: mx.array) -> mx.array:
    """Sums over the last axis, which is kept.

    Of a few numbers at a time: the rounding of one long sum would add up.
    """
    missing = -terms.shape[-1] % _SUMMED
    if missing:
        terms = mx.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, missing)])
    parts = terms.reshape(*terms.shape[:-1], -1, _SUMMED).sum(axis=-1)
    return parts.sum(axis=-1, keepdims=True)
