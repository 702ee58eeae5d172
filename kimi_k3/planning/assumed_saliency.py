"""A saliency table before anything is calibrated: a published curve, nothing recorded."""

from statistics import NormalDist

import numpy as np

from ..build.saliency import SaliencyTable
from ..config import TextArgs

#: Published of Kimi K3: the top 27 % of a layer's experts hold 55 to 58 % of its saliency.
TOP, HELD = 0.27, 0.58

#: What a report says of it.
ASSUMED = (
    f"no calibration: in every layer alike, the top {TOP:.0%} of the experts hold "
    f"{HELD:.0%} of the saliency, as published for Kimi K3"
)

#: Tokens of the table, so many that counts follow the curve.
_TOKENS = 1 << 24


def assumed_table(text: TextArgs) -> SaliencyTable:
    """Of a checkpoint of ``text``; one corpus, ``assumed``, experts in order of saliency.

    Saliency is lognormal over the experts of a layer; they differ only in how often they
    are chosen.
    """
    total, top_k = text.num_experts, text.num_experts_per_token
    count = _counts(total, top_k).astype(np.int64)
    share = count / top_k
    layer = {
        "count": count,
        "gate_sum": share,
        "gate_square_sum": share / top_k,
        "reap_sum": share,
        "relative_sum": share,
        "contribution_max": (count > 0) / top_k,
    }
    one_corpus = {name: array[None] for name, array in layer.items()}
    layers = [n for n in range(text.num_hidden_layers) if text.is_moe_layer(n)]
    return SaliencyTable.from_layers(
        dict.fromkeys(layers, one_corpus),
        corpora=["assumed"],
        tokens=[_TOKENS],
        top_k=top_k,
        source={"assumed": ASSUMED},
        samples={"fingerprint": "none", "tokenizer": "none", "document_hashes": []},
    )


def _counts(total: int, top_k: int) -> np.ndarray:
    """(E,) whole, falling, of sum tokens × top_k; none more than all tokens."""
    normal = NormalDist()
    # The top share p of a lognormal of this spread holds Φ(spread - Φ⁻¹(1 - p)).
    spread = normal.inv_cdf(HELD) + normal.inv_cdf(1 - TOP)
    places = (np.arange(total) + 0.5) / total
    chance = np.exp([-spread * normal.inv_cdf(place) for place in places.tolist()])
    free = np.ones(total, bool)
    while True:  # an expert is chosen once a token at most
        left = top_k - (~free).sum()
        chance[free] *= left / chance[free].sum() if free.any() else 1
        if not (over := free & (chance >= 1)).any():
            break
        chance[over], free[over] = 1, False
    count = np.floor(chance * _TOKENS)
    missing = round(_TOKENS * top_k - count.sum())
    count[np.flatnonzero(count < _TOKENS)[:missing]] += 1
    return count
