"""The text that probes read: windows of a calibration's samples, some of every corpus.

Samples lie in long rows that hold several documents, and a few rows may leave whole
corpora out. Windows are short, so that each corpus has its own without much text in all.
"""

import numpy as np

from ..build.sample_rows import Samples

#: Tokens of a window, where rows are longer.
WINDOW = 256


def probe_windows(samples: Samples, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and corpus labels (−1: padding) of some windows, (windows, length) each.

    Every corpus gets an equal part of ``tokens``, in whole windows and at least one,
    where it has as many; windows of one corpus are spread over all that hold little else.
    The same samples give the same windows.
    """
    length = min(WINDOW, samples.length)
    rows, per_row = len(samples.tokens), samples.length // length
    cut = per_row * length
    ids = samples.tokens[:, :cut].reshape(rows * per_row, length)
    labels = samples.labels[:, :cut].reshape(rows * per_row, length)
    wanted = -(-tokens // len(samples.corpora))
    chosen: set[int] = set()
    for corpus in range(len(samples.corpora)):
        chosen |= _windows_of((labels == corpus).sum(axis=1), wanted)
    order = sorted(chosen)
    return ids[order], labels[order]


def _windows_of(counts: np.ndarray, wanted: int) -> set[int]:
    """Windows with ``wanted`` tokens of a corpus, given how many (windows,) each has."""
    most = int(counts.max(initial=0))
    if not most:
        return set()
    # Little else: windows that are nearly as full as the fullest, evenly spread.
    full = np.flatnonzero(counts >= 0.9 * most)
    number = min(len(full), -(-wanted // most))
    spread = np.linspace(0, len(full) - 1, number).round().astype(int)
    found = {int(window) for window in full[spread]}
    for window in np.argsort(-counts, kind="stable").tolist():
        if counts[sorted(found)].sum() >= wanted or not counts[window]:
            break
        found.add(window)
    return found
