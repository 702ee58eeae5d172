"""How one model's distribution of the next token differs from another's, in float32."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np


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
    wanted, got = log_probabilities(teacher), log_probabilities(build)
    at = mx.array(targets)[:, None]
    found = (
        kl_divergence(wanted, got),
        -mx.take_along_axis(wanted, at, axis=-1)[:, 0],
        -mx.take_along_axis(got, at, axis=-1)[:, 0],
        wanted.argmax(axis=-1) == got.argmax(axis=-1),
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
    logits = logits.astype(mx.float32)
    # From the largest, or what is small beside a large logit is rounded away twice.
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def kl_divergence(wanted: mx.array, got: mx.array) -> mx.array:
    """(..., vocab) log-probabilities, twice → (...) KL(wanted ‖ got) in nats.

    Σ p·(d + e⁻ᵈ − 1) with d = log p − log q, which is Σ p·d because both sum to 1. No
    term is negative, so small divergences do not drown in rounding. Written as
    Σ p·d + Σ (q − p) where e⁻ᵈ would overflow: at a p that is 0 in float32 it gives q.
    """
    d = wanted - got
    p = mx.exp(wanted)
    near = p * (d + mx.expm1(-d))
    far = p * (d - 1) + mx.exp(got)
    return mx.where(mx.abs(d) < _NEAR, near, far).sum(axis=-1)


#: Up to this difference of log-probabilities the first form is the more exact one.
_NEAR = 1.0
