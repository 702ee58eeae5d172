"""What the builds of benchmarks/quality.py tell: goals, noise, domains, correlations.

Ratios of KL are paired over documents; over seeds (and calibrations) they are of nested
draws: seeds with replacement, of each one calibration where there are several, then
documents within each corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from quality_cases import BUDGET, FIXED, MIDDLE
from quality_subject import KEPT, Case, Subject

from kimi_k3.errors import PlanError
from kimi_k3.evaluation.comparison import Comparison
from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.evaluation.statistics import DRAWS, Bootstrap, interval
from kimi_k3.evaluation.summary import Summary

Row = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """A row of the results, and the evaluation that it is of."""

    row: Row
    evaluation: Evaluation

    @property
    def part(self) -> str:
        return self.row["part"]

    @property
    def seed(self) -> int:
        return self.row["seed"]

    @property
    def kl(self) -> float:
        return self.row["kl"]["value"]


def row_of(subject: Subject, case: Case, more: Row, found: Evaluation) -> Row:
    """Sizes, measures and predictions of one build."""
    summary = Summary.of(found)
    overall, corpora = summary.overall.estimates, summary.groups["corpus"]
    predicted = {}
    for name, way in subject.ways.items():
        try:
            predicted[name] = way.of_plan(case.plan)
        except PlanError:
            continue
    return {
        "part": case.part,
        "seed": subject.seed,
        "size": case.size,
        "plan": case.name,
        **more,
        "build": case.key,
        "bytes": subject.sizes.plan_bytes(case.plan),
        "bytes_per_token": subject.sizes.bytes_per_token(case.plan, subject.frequency),
        "high": sum(len(layer.high) for layer in case.plan.layers.values()),
        "low": sum(len(layer.low) for layer in case.plan.layers.values()),
        "kl": overall["kl"].to_dict(),
        "ppl_ratio": overall["ppl_ratio"].to_dict(),
        "agreement": overall["agreement"].to_dict(),
        "corpora": {
            name: {
                measure: row.estimates[measure].to_dict()
                for measure in ("kl", "ppl_ratio")
            }
            for name, row in corpora.items()
        },
        "predicted": predicted,
    }


def analysed(judged: Sequence[Judged]) -> Row:
    """Everything that is computed of the builds."""
    seeds = sorted({one.seed for one in judged})
    return {
        "goals": goals(judged, seeds),
        "ratios": ratios_at_equal_bytes(judged, seeds),
        "noise": noise(judged, seeds),
        "domains": domains(judged, seeds),
        "quantisers": quantisers(judged, seeds),
        "speed": speed(judged, seeds),
    }


def _find(
    judged: Sequence[Judged], part: str, seed: int, **wanted: Any
) -> list[Judged]:
    """Builds of this part and seed whose rows say what is ``wanted``."""
    return [
        one
        for one in judged
        if (one.part, one.seed) == (part, seed)
        and all(one.row.get(name) == value for name, value in wanted.items())
    ]


def _plans(judged: Sequence[Judged], seed: int, keep: int) -> dict[str, Judged]:
    found = _find(judged, "sizes", seed, size=str(keep))
    return {one.row["plan"]: one for one in found}


def _ratio(of: Judged, to: Judged) -> Row:
    """KL of one build over that of another, paired over documents."""
    comparison = Comparison.of(to.evaluation, of.evaluation)
    return comparison.overall.estimates["kl_ratio"].to_dict()


def goals(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """Budget's KL over that of plans by rule, and what is asked of it."""
    rows = []
    for keep in KEPT:
        for seed in seeds:
            plans = _plans(judged, seed, keep)
            if BUDGET not in plans or not set(FIXED) <= set(plans):
                continue
            best = min(FIXED, key=lambda name: plans[name].kl)
            for against, name, goal in (
                ("graded", "graded", 0.8),
                ("uniform", "uniform", 0.6),
                ("best by rule", best, 1.0),
            ):
                ratio = _ratio(plans[BUDGET], plans[name])
                row = {"size": str(keep), "seed": seed, "against": against}
                row |= {"plan": name, "ratio": ratio, "goal": goal}
                row["met"] = ratio["value"] <= goal
                row["whole_interval"] = ratio["high"] <= goal
                rows.append(row)
    return rows


def ratios_at_equal_bytes(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """Ratios of KL over all seeds, with intervals of nested draws."""
    rows = []
    pairs = [(BUDGET, name) for name in FIXED] + [("graded", "uniform")]
    pairs += [("all low", "graded"), ("global", "uniform")]
    for keep in KEPT:
        by_seed = [_plans(judged, seed, keep) for seed in seeds]
        for of, to in pairs:
            there = [[(p[of], p[to])] for p in by_seed if of in p and to in p]
            if there:
                row: Row = {"size": str(keep), "of": of, "to": to, "calibrations": 1}
                rows.append(row | {"seeds": len(there), "ratio": _nested(there)})
    for of, to in ((BUDGET, "graded"), (BUDGET, "uniform"), ("graded", "uniform")):
        groups = [_with_draws(judged, seed, of, to) for seed in seeds]
        there = [group for group in groups if len(group) > 1]
        if there:
            row: Row = {"size": str(MIDDLE), "of": of, "to": to}
            row["calibrations"] = min(len(group) for group in there)
            rows.append(row | {"seeds": len(there), "ratio": _nested(there)})
    return rows


def _with_draws(
    judged: Sequence[Judged], seed: int, of: str, to: str
) -> list[tuple[Judged, Judged]]:
    """The pair by the first calibration, then by the others."""
    plans = _plans(judged, seed, MIDDLE)
    pairs = [(plans[of], plans[to])] if of in plans and to in plans else []
    numbers = sorted({one.row["draw"] for one in _find(judged, "draws", seed)})
    for number in numbers:
        found = _find(judged, "draws", seed, draw=number)
        named = {one.row["plan"]: one for one in found}
        if of in named and to in named:
            pairs.append((named[of], named[to]))
    return pairs


def _nested(groups: list[list[tuple[Judged, Judged]]]) -> Row:
    """Σ KL over Σ KL: of each seed's group of pairs the mean; draws of all that varies."""
    drawn, values = [], []
    for number, pairs in enumerate(groups):
        first = pairs[0][0].evaluation
        bootstrap = Bootstrap(first.document, first.corpus, DRAWS, number)
        tokens = bootstrap.sums(None)
        sums = [
            [bootstrap.sums(one.evaluation.kl) / tokens for one in pair]
            for pair in pairs
        ]
        drawn.append(np.array(sums))  # (pairs, 2, draws)
        values.append(np.mean([[one.kl for one in pair] for pair in pairs], axis=0))
    random = np.random.default_rng(0)
    total = np.zeros((2, DRAWS))
    every = np.arange(DRAWS)
    for seed in random.integers(0, len(drawn), (len(drawn), DRAWS)):
        pair = random.integers(0, [len(drawn[s]) for s in seed])
        # The documents of one draw are other ones each time that a seed is drawn.
        place = random.permutation(every)
        picked = zip(seed, pair, place, strict=True)
        total += np.array([drawn[s][p, :, at] for s, p, at in picked]).T
    of, to = np.sum(values, axis=0)
    return interval(of / to, total[0] / total[1]).to_dict()


def noise(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """How far KL moves, at one size, by what nobody chooses."""
    rows = []
    for seed in seeds:
        plans = _plans(judged, seed, MIDDLE)
        random = [one.kl for one in _find(judged, "random", seed)]
        row: Row = {"seed": seed, "size": str(MIDDLE)}
        if random and "uniform" in plans:
            row["random"] = {
                "plans": len(random),
                "mean": float(np.mean(random)),
                "deviation": float(np.std(random, ddof=1)),
                "least": min(random),
                "most": max(random),
                "better_than_uniform": sum(kl < plans["uniform"].kl for kl in random),
            }
        row["calibrations"] = {}
        for name in ("uniform", "graded", BUDGET):
            found = [one.kl for one in _find(judged, "draws", seed, plan=name)]
            if found and name in plans:
                kl = plans[name].row["kl"]
                row["calibrations"][name] = {
                    "first": kl["value"],
                    "others": found,
                    "deviation": float(np.std([kl["value"], *found], ddof=1)),
                    "documents": (kl["high"] - kl["low"]) / 3.92,
                }
        rows.append(row)
    return rows


def domains(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """Each plan for a domain beside the same kind of plan for all text, by corpus."""
    rows = []
    for seed in seeds:
        general = _plans(judged, seed, MIDDLE)
        for one in _find(judged, "domains", seed):
            if one.row["kind"] not in general:
                continue
            other = general[one.row["kind"]]
            groups = Comparison.of(other.evaluation, one.evaluation).groups["corpus"]
            corpora = {}
            for name, found in groups.items():
                mine, theirs = one.row["corpora"][name], other.row["corpora"][name]
                corpora[name] = {
                    "kl": mine["kl"]["value"],
                    "ppl_ratio": mine["ppl_ratio"]["value"],
                    "general_kl": theirs["kl"]["value"],
                    "general_ppl_ratio": theirs["ppl_ratio"]["value"],
                    "kl_ratio": found.estimates["kl_ratio"].to_dict(),
                }
            row = {"seed": seed, "kind": one.row["kind"], "domain": one.row["domain"]}
            rows.append(row | {"corpora": corpora})
    return rows


def quantisers(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """Builds with a low bank: our quantiser over ``mx.quantize``."""
    rows = []
    for seed in seeds:
        for one in _find(judged, "quantisers", seed):
            ours = _plans(judged, seed, int(one.row["size"])).get(one.row["plan"])
            if ours is not None:
                row = {"seed": seed, "size": one.row["size"], "plan": one.row["plan"]}
                row |= {"plain": one.kl, "ours": ours.kl, "ratio": _ratio(ours, one)}
                rows.append(row)
    return rows


def speed(judged: Sequence[Judged], seeds: Sequence[int]) -> list[Row]:
    """The fewest bytes a token that no more KL than the reference's was measured at."""
    rows = []
    for seed in seeds:
        references = _find(judged, "speed", seed, plan="graded")
        tried = _find(judged, "speed", seed, plan=BUDGET)
        if not references or not tried:
            continue
        reference = references[0]
        good = [one for one in tried if one.kl <= reference.kl]
        row: Row = {"seed": seed, "goal": 0.7, "tried": len(tried)}
        row |= {
            "reference_kl": reference.kl,
            "reference_bytes_per_token": reference.row["bytes_per_token"],
            "reference_bytes": reference.row["bytes"],
        }
        if good:
            best = min(good, key=lambda one: one.row["bytes_per_token"])
            share = best.row["bytes_per_token"] / reference.row["bytes_per_token"]
            row |= {
                "kl": best.kl,
                "bytes_per_token": best.row["bytes_per_token"],
                "bytes": best.row["bytes"],
                "share": share,
                "kl_ratio": _ratio(best, reference),
            }
        row["met"] = bool(good) and row["share"] <= row["goal"]
        rows.append(row)
    return rows
