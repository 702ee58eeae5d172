"""How much of the saliency stays, if only a share of the experts is kept.

Scores are (L, E), 0 or more, padded with zeros where a layer has fewer experts. Every
layer counts the same: the norm behind the experts' sum cancels a layer's scale, so a
score is first made a share of its layer. A share of the experts that ends between two
of them counts the next one in part, which makes every curve continuous.
"""

import numpy as np


def layer_shares(score: np.ndarray) -> np.ndarray:
    """(L, E): each expert's share of its layer's saliency; rows of sum 1."""
    return score / score.sum(axis=1, keepdims=True)


def kept_by_layer(
    score: np.ndarray, experts: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """(L, F): share of each layer's saliency in its most salient experts.

    Args:
        experts: (L,), how many a layer has.
        kept: (F,), shares of the experts that are kept, 0 to 1.
    """
    ranked = -np.sort(-layer_shares(score), axis=1)
    return np.stack(
        [_kept(row[:n], kept) for row, n in zip(ranked, experts, strict=True)]
    )


def kept_uniformly(
    score: np.ndarray, experts: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """(F,): share of the saliency, if every layer keeps the same share of its experts."""
    return kept_by_layer(score, experts, kept).mean(axis=0)


def kept_globally(
    score: np.ndarray, experts: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """(F,): the same, if the experts of all layers are ranked together.

    Never less than :func:`kept_uniformly`; a layer may keep fewer experts than the
    router picks, see :func:`global_counts`.
    """
    shares = layer_shares(score)[np.arange(score.shape[1]) < experts[:, None]]
    return _kept(-np.sort(-shares), kept) / len(score)


def global_counts(score: np.ndarray, experts: np.ndarray, kept: float) -> np.ndarray:
    """(L,): how many experts of each layer a ranking of all together keeps."""
    exists = np.arange(score.shape[1]) < experts[:, None]
    layers = np.broadcast_to(np.arange(len(score))[:, None], score.shape)[exists]
    ranked = np.argsort(-layer_shares(score)[exists], kind="stable")
    best = ranked[: round_half_up(kept * len(ranked))]
    return np.bincount(layers[best], minlength=len(score))


def top_sets(score: np.ndarray, experts: np.ndarray, kept: float) -> np.ndarray:
    """(L, E) bool: the most salient experts of each layer, at least one.

    An expert without any saliency is never among them: only its number would put it
    there.
    """
    rank = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1)
    wanted = np.array([max(1, round_half_up(kept * n)) for n in experts])
    return (rank < wanted[:, None]) & (score > 0)


def set_overlap(sets: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much the sets of each two corpora have in common, and what chance gives.

    Args:
        sets: (C, L, E) bool, none empty.
        experts: (L,), how many a layer has.

    Returns:
        Two arrays (C, C), averages over layers: the share of the smaller set that lies
        in the other, and what it is for sets drawn at random.
    """
    by_layer = sets.transpose(1, 0, 2).astype(np.float64)  # (L, C, E)
    common = by_layer @ by_layer.transpose(0, 2, 1)  # (L, C, C)
    sizes = by_layer.sum(axis=2)  # (L, C)
    smaller = np.minimum(sizes[:, :, None], sizes[:, None, :])
    larger = np.maximum(sizes[:, :, None], sizes[:, None, :])
    chance = larger / experts[:, None, None]
    return (common / smaller).mean(axis=0), chance.mean(axis=0)


def round_half_up(number: float) -> int:
    """The nearest whole number; halves go up, and rounding of the product aside."""
    return int(np.floor(number + 0.5 + 1e-9))


def _kept(ranked: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(F,): sums over the first parts of ``ranked`` (N,), which falls."""
    sums = np.concatenate([[0.0], np.cumsum(ranked)])
    return np.interp(kept * len(ranked), np.arange(len(sums)), sums)
