"""Scores of experts that a plan can be made from, and who comes first."""

import numpy as np

from ..build.saliency import SaliencyTable
from ..build.saliency_checks import ranges
from ..config import TextArgs
from ..errors import PlanError

#: The criterion that is no score of a calibration: errors that were measured.
DAMAGE = "damage"


def checked_scores(
    table: SaliencyTable, criterion: str, weights: dict[str, float] | None = None
) -> np.ndarray:
    """(L, E) float64: :meth:`SaliencyTable.score`, if it tells experts apart.

    Raises PlanError for a table whose layers differ in size, and for scores that
    :func:`check_scores` refuses.
    """
    if len(set(table.experts.tolist())) > 1:
        most = int(table.experts.max())
        odd = int(np.argmax(table.experts < most))
        raise PlanError(
            f"layer {table.layers[odd]} of the calibrated checkpoint has "
            f"{table.experts[odd]} experts and others have {most}: it is pruned already. "
            "Plan with a calibration of the source."
        )
    scores = table.score(criterion, weights)
    check_scores(scores, table.layers, table.top_k, criterion)
    return scores


def check_scores(
    scores: np.ndarray, layers: np.ndarray, top_k: int, criterion: str
) -> None:
    """Raise PlanError, naming layer and expert, for scores (L, E) that rank nothing.

    Those are: not a number, infinite, below 0, and a layer with fewer than ``top_k``
    experts above 0 (the last of those it must keep would be there by number only).
    """
    for wrong, wanted in ((~np.isfinite(scores), "finite"), (scores < 0, "0 or more")):
        if wrong.any():
            at, expert = np.argwhere(wrong)[0]
            raise PlanError(
                f"layer {layers[at]}, expert {expert}: {criterion} is "
                f"{scores[at, expert]}, wanted {wanted}. Calibrate again."
            )
    alive = (scores > 0).sum(axis=1)
    if (alive < top_k).any():
        at = int(np.argmax(alive < top_k))
        dead = np.flatnonzero(scores[at] == 0)
        raise PlanError(
            f"layer {layers[at]}: {criterion} is 0 for all but {alive[at]} experts (not "
            f"for {ranges(dead[:3])}{' …' if len(dead) > 3 else ''}), but the router "
            f"picks {top_k}: nothing tells which to keep. Calibrate on more text, or give "
            "weight to more corpora."
        )


def check_source(table: SaliencyTable, text: TextArgs) -> None:
    """Raise PlanError if ``table`` was not recorded on a checkpoint of these sizes."""
    moe = text.moe_layers
    for what, mine, theirs in (
        ("MoE layers", table.layers.tolist(), moe),
        ("experts", int(table.experts.max()), text.num_experts),
        ("top-k", table.top_k, text.num_experts_per_token),
    ):
        if mine != theirs:
            raise PlanError(
                f"the saliency is of a checkpoint with {what} {_short(mine)}, the config "
                f"says {_short(theirs)}. Plan with a calibration of this checkpoint."
            )


def ranking(scores: np.ndarray) -> np.ndarray:
    """Indices along the last axis, the best first; ties by number."""
    return np.argsort(-scores, axis=-1, kind="stable")


def _short(value: int | list[int]) -> str:
    return ranges(value) if isinstance(value, list) else str(value)
