"""What holds for the sums of every calibration; what breaks it is named.

Statistics are arrays (C, L, E): corpora, layers with experts, experts. A layer that has
fewer experts than E is padded with zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SaliencyError

#: What is recorded per corpus, layer and expert, and its type. g is the weight that
#: multiplies the expert's output e; sums go over the tokens that chose the expert.
STATISTICS: dict[str, type] = {
    "count": np.int64,  # how many tokens chose it
    "gate_sum": np.float64,  # Σ g
    "gate_square_sum": np.float64,  # Σ g²
    "reap_sum": np.float64,  # Σ g·‖e‖
    "relative_sum": np.float64,  # Σ ‖g·e‖ / ‖Σ g·e‖
    "contribution_max": np.float64,  # max of g·‖e‖
}

#: Sums that are zero in a whole layer only if nothing was calibrated there.
SALIENCIES = ("gate_sum", "gate_square_sum", "reap_sum", "relative_sum")

AGAIN = "Calibrate again, on samples that hold text of every corpus."
REPLACE = "Take an intact copy, or calibrate again."

#: Relative: rounding of sums whose terms were added in another order.
SLACK = 1e-6


@dataclass(frozen=True)
class Outline:
    """What the sums are of: axes and sizes. Checks itself.

    Attributes:
        corpora: C names.
        tokens: (C,) int64, tokens of each corpus that went through every layer.
        layers: (L,) int64, index of each decoder layer that has experts, rising.
        experts: (L,) int64, how many experts each of them has.
        top_k: how many experts a token picks in each.
    """

    corpora: tuple[str, ...]
    tokens: np.ndarray
    layers: np.ndarray
    experts: np.ndarray
    top_k: int

    def __post_init__(self) -> None:
        names, top_k = self.corpora, self.top_k
        if not names or not all(isinstance(name, str) and name for name in names):
            raise SaliencyError(
                f"corpora are named {names!r}; wanted one name or more."
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SaliencyError(f"corpus {twice[0]} is there twice; rename one.")
        for name, length in (
            ("tokens", len(names)),
            ("layers", None),
            ("experts", None),
        ):
            array = getattr(self, name)
            _check_array(
                name, array, (len(self.layers),) if length is None else (length,)
            )
        if not len(self.layers):
            raise SaliencyError("no layer has experts: there is nothing to calibrate.")
        if (self.layers < 0).any() or (np.diff(self.layers) <= 0).any():
            raise SaliencyError(
                f"layers are {self.layers.tolist()}; wanted rising numbers. {REPLACE}"
            )
        if not isinstance(top_k, int) or top_k < 1:
            raise SaliencyError(f"top_k is {top_k!r}; wanted 1 or more. {REPLACE}")
        if (few := self.experts < top_k).any():
            at = int(np.argmax(few))
            raise SaliencyError(
                f"layer {self.layers[at]} has {self.experts[at]} experts but the router "
                f"picks {top_k}. {REPLACE}"
            )
        if (self.tokens < 1).any():
            empty = [n for n, t in zip(names, self.tokens, strict=True) if t < 1]
            raise SaliencyError(
                f"no token of {', '.join(empty)} was calibrated: nothing tells which "
                f"experts of layers {ranges(self.layers)} matter. {AGAIN}"
            )

    @property
    def exists(self) -> np.ndarray:
        """(L, E) bool: which experts are no padding."""
        return np.arange(self.experts.max()) < self.experts[:, None]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, L, E)."""
        return len(self.corpora), len(self.layers), int(self.experts.max())


def check_statistics(outline: Outline, statistics: Mapping[str, np.ndarray]) -> None:
    """Refuse sums that no calibration can give.

    Raises SaliencyError that names statistic, layer, corpus and expert, what was found
    and what was wanted. Also of use for one layer at a time, before the next is run.
    """
    for name, dtype in STATISTICS.items():
        if name not in statistics:
            raise SaliencyError(f"{name} is missing. {REPLACE}")
        _check_array(name, statistics[name], outline.shape, dtype)
    for name, array in statistics.items():
        _refuse(outline, ~np.isfinite(array), name, array, "a finite number")
        _refuse(outline, array < 0, name, array, "0 or more")
        padding = (array != 0) & ~outline.exists
        _refuse(outline, padding, name, array, "0, for the layer has no such expert")
    _check_counts(outline, statistics["count"])
    _check_saliency(outline, statistics)
    _check_agreement(outline, statistics)


def ranges(numbers: Sequence[int] | np.ndarray) -> str:
    """Rising numbers for a reader: 1-3, 7, 9."""
    parts: list[list[int]] = []
    for number in map(int, numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _check_array(
    name: str, array: object, shape: tuple[int, ...], dtype: type = np.int64
) -> None:
    wanted = f"{name} of shape {shape} and type {np.dtype(dtype)}"
    if not isinstance(array, np.ndarray):
        raise SaliencyError(f"{name} is a {type(array).__name__}; wanted {wanted}.")
    if array.shape != shape or array.dtype != dtype:
        raise SaliencyError(
            f"{name} is of shape {array.shape} and type {array.dtype}; wanted {wanted}. "
            f"{REPLACE}"
        )


def _check_counts(outline: Outline, count: np.ndarray) -> None:
    """Every token picks top_k experts in each layer."""
    sums = count.sum(axis=2)  # (C, L)
    wanted = outline.tokens * outline.top_k
    wrong = sums != wanted[:, None]
    if wrong.any():
        c, l = np.argwhere(wrong)[0]
        raise SaliencyError(
            f"layer {outline.layers[l]}, corpus {outline.corpora[c]}: {sums[c, l]} choices "
            f"of experts were counted; wanted {outline.tokens[c]} tokens × "
            f"{outline.top_k} = {wanted[c]}. {REPLACE}"
        )
    most = np.broadcast_to(outline.tokens[:, None, None], count.shape)
    _refuse(outline, count > most, "count", count, "no more than its corpus has tokens")


def _check_saliency(outline: Outline, statistics: Mapping[str, np.ndarray]) -> None:
    """No layer is without saliency: experts could then be dropped by number only."""
    for name in SALIENCIES:
        empty = statistics[name].sum(axis=2) == 0  # (C, L)
        if empty.any():
            of = [n for n, e in zip(outline.corpora, empty, strict=True) if e.any()]
            raise SaliencyError(
                f"{name} of {', '.join(of)} is 0 for every expert of layers "
                f"{ranges(outline.layers[empty.any(axis=0)])}: nothing tells which of them "
                f"matter. {AGAIN}"
            )


def _check_agreement(outline: Outline, statistics: Mapping[str, np.ndarray]) -> None:
    """The statistics of one expert are of the same tokens."""
    count = statistics["count"]
    gate, square = statistics["gate_sum"], statistics["gate_square_sum"]
    reap, largest = statistics["reap_sum"], statistics["contribution_max"]
    for name, array in statistics.items():
        unchosen = (count == 0) & (array != 0)
        _refuse(outline, unchosen, name, array, "0, for no token chose the expert")
    _refuse(
        outline, (count > 0) & (gate == 0), "gate_sum", gate, "more, for it was chosen"
    )
    more = 1 + SLACK
    rules: tuple[tuple[str, np.ndarray, Callable[[], np.ndarray], str], ...] = (
        ("contribution_max", largest, lambda: reap * more, "no more than reap_sum"),
        (
            "reap_sum",
            reap,
            lambda: count * largest * more,
            "≤ count × contribution_max",
        ),
        ("gate_square_sum", square, lambda: gate**2 * more, "no more than gate_sum²"),
        ("gate_sum", gate, lambda: np.sqrt(count * square) * more, "≤ √(count × Σ g²)"),
    )
    for name, array, bound, wanted in rules:
        _refuse(outline, array > bound(), name, array, wanted)


def _refuse(
    outline: Outline, wrong: np.ndarray, name: str, array: np.ndarray, wanted: str
) -> None:
    """Raise for the first entry (c, l, e) of ``array`` that is ``wrong``."""
    if wrong.any():
        c, l, e = np.argwhere(wrong)[0]
        raise SaliencyError(
            f"layer {outline.layers[l]}, expert {e}, corpus {outline.corpora[c]}: "
            f"{name} is {array[c, l, e]}; wanted {wanted}. {REPLACE}"
        )
