"""Affine quantisation in float64, plain NumPy: what is stored, and the best there is."""

from itertools import combinations_with_replacement

import numpy as np
from oracle_mxfp4 import affine


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """(rows, n) codes of (rows, n·bits/32) uint32."""
    ones = np.ones((len(words), 1))
    return affine(words, ones, 0 * ones, bits).astype(np.int64)


def decoded(
    codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> np.ndarray:
    """(rows, groups, g) float64: the weights that are stored."""
    return affine(codes, scales, biases, bits).reshape(*scales.shape, -1)


def group_errors(
    weights: np.ndarray, stored: np.ndarray, importance: np.ndarray | None = None
) -> np.ndarray:
    """(rows, groups) Σ h·(w - w')²; ``weights`` (rows, in), ``importance`` (in,)."""
    square = (weights.astype(float).reshape(stored.shape) - stored) ** 2
    if importance is not None:
        square = square * importance.astype(float).reshape(1, *stored.shape[1:])
    return square.sum(axis=-1)


def least_error(weights: np.ndarray, importance: np.ndarray, bits: int) -> float:
    """The least Σ h·(w - s·q - b)² of one group over all codes and all real s and b.

    Best codes rise with the weights, so all ways to cut the sorted weights into 2**bits
    runs, empty ones included, are all that can be best.
    """
    order = np.argsort(weights, kind="stable")
    w, h = weights[order].astype(float), importance[order].astype(float)
    total, mean = h.sum(), (h * w).sum() / h.sum()
    w = w - mean
    cuts = np.array(
        list(combinations_with_replacement(range(len(w) + 1), 2**bits - 1)), np.int64
    )
    # A weight's code is the number of cuts that are not above it.
    behind = np.concatenate([np.cumsum(h[::-1])[::-1], [0.0]])[cuts]
    moment = np.concatenate([np.cumsum((h * w)[::-1])[::-1], [0.0]])[cuts]
    first = behind.sum(axis=-1)
    second = (behind * (2 * np.arange(1, 2**bits) - 1)).sum(axis=-1)
    product = moment.sum(axis=-1)
    spread = second - first**2 / total
    explained = np.where(
        spread > 1e-12 * total, product**2 / np.maximum(spread, 1e-300), 0
    )
    return float((h * w**2).sum() - explained.max())


def searched_error(weights: np.ndarray, importance: np.ndarray, bits: int) -> float:
    """A least error of one group as far as a search from 1,000 starts finds it."""
    top, w, h = 2**bits - 1, weights.astype(float), importance.astype(float)
    w = w - (h * w).sum() / h.sum()
    shares, shifts = np.linspace(0.4, 1.1, 40), np.linspace(-0.5, 0.5, 25)
    scale = np.repeat(shares, len(shifts)) * (w.max() - w.min()) / top
    middle = np.outer(shares, [(w.max() + w.min()) / 2]).repeat(len(shifts), 0)[:, 0]
    bias = middle + (np.tile(shifts, len(shares)) - top / 2) * scale
    for _ in range(30):
        codes = np.clip(np.round((w - bias[:, None]) / scale[:, None]), 0, top)
        first, second = (h * codes).sum(-1), (h * codes**2).sum(-1)
        spread = second - first**2 / h.sum()
        product = (h * codes * w).sum(-1)
        scale = np.where(spread > 1e-9, product / np.maximum(spread, 1e-9), scale)
        bias = -scale * first / h.sum()
    codes = np.clip(np.round((w - bias[:, None]) / scale[:, None]), 0, top)
    left = w - bias[:, None] - codes * scale[:, None]
    return float((h * left**2).sum(-1).min())
