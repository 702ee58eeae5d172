"""Rank correlations of predicted damage and measured KL, by way to predict and seed."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np
from quality_subject import KEPT

#: Of Student's distribution: 97.5 % lie below, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303}

#: Groups of builds within which ways are compared.
SCOPES = {
    "within a size": "plans by rule and budget's at one size; mean over sizes",
    "random": "uniform counts, experts drawn at random",
    "all": "sizes, random and speed together",
}


def rank_correlations(builds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Way → scope → each seed's correlation, their mean, and its 95 % interval."""
    seeds = sorted({row["seed"] for row in builds})
    ways = list(builds[0]["predicted"])
    found: dict[str, Any] = {"scopes": SCOPES, "ways": {}}
    for way in ways:
        found["ways"][way] = {}
        for scope in SCOPES:
            values = [
                _of_seed([r for r in builds if r["seed"] == seed], way, scope)
                for seed in seeds
            ]
            known = [value for value in values if value is not None]
            if known:
                found["ways"][way][scope] = _over_seeds(known)
    return found


def _of_seed(builds: Sequence[Mapping[str, Any]], way: str, scope: str) -> float | None:
    parts = {"all": ("sizes", "random", "speed"), "random": ("random",)}
    if scope in parts:
        return _spearman([r for r in builds if r["part"] in parts[scope]], way)
    values = [
        _spearman(
            [r for r in builds if (r["part"], r["size"]) == ("sizes", str(keep))], way
        )
        for keep in KEPT
    ]
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _over_seeds(values: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {"seeds": values, "mean": mean(values)}
    if len(values) > 1:
        half = _STUDENT[len(values) - 1] * stdev(values) / len(values) ** 0.5
        result["low"] = max(-1.0, result["mean"] - half)
        result["high"] = min(1.0, result["mean"] + half)
    return result


def _spearman(builds: Sequence[Mapping[str, Any]], way: str) -> float | None:
    """Spearman's correlation of prediction and KL; None for too few builds."""
    # Ways may have made the same build, which counts once.
    once = {row["build"]: row for row in builds if way in row["predicted"]}
    predicted = _ranks([row["predicted"][way] for row in once.values()])
    measured = _ranks([row["kl"]["value"] for row in once.values()])
    if len(once) < 4 or not predicted.std() or not measured.std():
        return None
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0 on; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]
