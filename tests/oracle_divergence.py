"""What KL, log-likelihoods and agreement are, in float64 and in whole numbers of digits.

Plain loops over the whole vocabulary, one prediction at a time; nothing here is shared
with the package.
"""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Of one prediction, in float64."""
    largest = max(logits)
    total = math.fsum(math.exp(x - largest) for x in logits)
    return [x - largest - math.log(total) for x in logits]


def kl(teacher: Sequence[float], build: Sequence[float]) -> float:
    """KL(teacher || build), the sum that defines it."""
    p, q = log_softmax(teacher), log_softmax(build)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def nll(logits: Sequence[float], target: int) -> float:
    """-log p of the token ``target``."""
    return -log_softmax(logits)[target]


def likeliest(logits: Sequence[float]) -> int:
    """The first of the tokens with the largest logit."""
    found = 0
    for token, logit in enumerate(logits):
        if logit > logits[found]:
            found = token
    return found


def exact_kl(teacher: Sequence[float], build: Sequence[float]) -> float:
    """The same in 60 decimal digits, for sums that cancel in float64."""
    with localcontext() as context:
        context.prec = 60
        a, b = [Decimal(x) for x in teacher], [Decimal(x) for x in build]
        ea, eb = [x.exp() for x in a], [x.exp() for x in b]
        total_a, total_b = sum(ea, Decimal(0)), sum(eb, Decimal(0))
        ratio = (total_a / total_b).ln()
        terms = (
            e / total_a * (x - y - ratio) for e, x, y in zip(ea, a, b, strict=True)
        )
        return float(sum(terms, Decimal(0)))
