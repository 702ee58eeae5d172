"""Summary: what an evaluation says of a build, by corpus, span, language and position.

    OUT/evaluation.json    this value, sealed

Every value is a ratio of sums over predictions, so long documents count more than short
ones; intervals come from drawing documents again (``statistics.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import EvaluationError
from .evaluation import GROUPINGS, Evaluation
from .sealed_json import read_json, write_json
from .states_journal import writing
from .statistics import DRAWS, LEVEL, SEED, Bootstrap, Estimate, interval, ratios

__all__ = ["ESTIMATES", "Estimate", "Row", "Summary"]

FILE_NAME = "evaluation.json"
KIND, VERSION = "the summary of an evaluation", 1

_REMEDY = "Make it again with `kimi-k3 evaluate`."

#: Names of estimates, and what they are. Quantiles have no interval.
ESTIMATES = {
    "teacher_ppl": "perplexity of the teacher: exp of the mean of -log p",
    "build_ppl": "perplexity of the build",
    "ppl_ratio": "build_ppl / teacher_ppl",
    "kl": "mean KL(teacher || build), nats a token",
    "kl_median": "the half of the tokens have less KL",
    "kl_p90": "90 % of the tokens have less",
    "kl_p99": "99 % of the tokens have less",
    "agreement": "share of tokens where both find the same one the likeliest",
    "below_0.01": "share of tokens with KL below 0.01",
    "below_0.1": "share of tokens with KL below 0.1",
}

_QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99}

#: Sums of a group, in the order of their columns; "tokens" are counted.
_SUMS = (
    "tokens",
    "teacher_nll",
    "build_nll",
    "kl",
    "agreement",
    "below_0.01",
    "below_0.1",
)

#: Grouping, and name, of all predictions together.
ALL = ""

#: exp of more than this is not finite.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Row:
    """What is known of a group of predictions.

    Attributes:
        tokens, documents: how many predictions, of how many documents.
        estimates: some of :data:`ESTIMATES`.
    """

    tokens: int
    documents: int
    estimates: Mapping[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "estimates": {name: one.to_dict() for name, one in self.estimates.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave."""
        estimates = content["estimates"].items()
        return cls(
            int(content["tokens"]),
            int(content["documents"]),
            {name: Estimate.from_dict(one) for name, one in estimates},
        )


#: Grouping → name → row.
Groups = Mapping[str, Mapping[str, Row]]


@dataclass(frozen=True)
class Summary:
    """The numbers of one build against one teacher.

    Attributes:
        about: what was compared, as in :class:`Evaluation`.
        predictions: digest of the evaluation that this is of.
        level: how often an interval holds the true value.
        draws, seed: of the bootstrap.
        overall: of all predictions.
        groups: grouping ("corpus", "span", "language", "position") → name → row.
    """

    about: Mapping[str, Any]
    predictions: str
    level: float
    draws: int
    seed: int
    overall: Row
    groups: Groups

    @classmethod
    def of(
        cls, evaluation: Evaluation, draws: int = DRAWS, seed: int = SEED
    ) -> "Summary":
        """Sum ``evaluation`` up. The same for any order of its predictions."""
        kl = evaluation.kl
        columns = (
            evaluation.teacher_nll,
            evaluation.build_nll,
            kl,
            evaluation.agrees,
            kl < 0.01,
            kl < 0.1,
        )
        bootstrap = Bootstrap(evaluation.document, evaluation.corpus, draws, seed)
        rows = rows_by_group(evaluation, bootstrap, columns, _values)
        for (grouping, name), which in masks_of(evaluation).items():
            row = rows[grouping][name]
            found = np.quantile(kl[which], list(_QUANTILES.values()))
            quantiles = dict(
                zip(_QUANTILES, map(Estimate, found.tolist()), strict=True)
            )
            both = {**row.estimates, **quantiles}
            estimates = {key: both[key] for key in ESTIMATES}
            rows[grouping][name] = replace(row, estimates=estimates)
        overall = rows.pop(ALL)[ALL]
        return cls(
            dict(evaluation.about),
            evaluation.digest,
            LEVEL,
            draws,
            seed,
            overall,
            rows,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "predictions": self.predictions,
            "level": self.level,
            "draws": self.draws,
            "seed": self.seed,
            "overall": self.overall.to_dict(),
            "groups": groups_dict(self.groups),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Summary":
        """What :meth:`to_dict` gave; EvaluationError for anything else."""
        try:
            return cls(
                dict(content["about"]),
                str(content["predictions"]),
                float(content["level"]),
                int(content["draws"]),
                int(content["seed"]),
                Row.from_dict(content["overall"]),
                {
                    grouping: {name: Row.from_dict(row) for name, row in rows.items()}
                    for grouping, rows in content["groups"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"a summary lacks {error}. {_REMEDY}") from error

    def save(self, folder: str | Path) -> None:
        """Write ``folder/evaluation.json``, whole or not at all."""
        with writing(Path(folder)):
            write_json(Path(folder) / FILE_NAME, KIND, VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Summary":
        """What :meth:`save` wrote: its folder or file. EvaluationError otherwise."""
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        return cls.from_dict(read_json(path, KIND, VERSION, _REMEDY))

    def text(self) -> str:
        """Tables for a terminal of 80 columns."""
        from .summary_text import summary_text

        return summary_text(self)


def perplexity(nll: np.ndarray) -> np.ndarray:
    """exp, of what may be large."""
    return np.exp(np.minimum(nll, _LARGEST_EXPONENT))


def masks_of(evaluation: Evaluation) -> dict[tuple[str, str], np.ndarray]:
    """Grouping and name → which predictions (N,) bool; first :data:`ALL`, of all."""
    masks = {(ALL, ALL): np.ones(len(evaluation.kl), bool)}
    for grouping in GROUPINGS:
        for name, which in evaluation.groups(grouping).items():
            masks[grouping, name] = which
    return masks


def rows_by_group(
    evaluation: Evaluation,
    bootstrap: Bootstrap,
    columns: Sequence[np.ndarray],
    values: Callable[[np.ndarray], dict[str, np.ndarray]],
) -> dict[str, dict[str, Row]]:
    """Grouping → name → row, of every group of ``evaluation``, all from the same draws.

    Args:
        columns: M values of each prediction, (N,).
        values: estimates (·,) by name, of sums (·, 1 + M): how many predictions, and the
            sums of ``columns`` over them. What is NaN or infinite of a group is left out
            there.
    """
    masks = masks_of(evaluation)
    totals = [
        np.stack([bootstrap.totals(one, which) for one in (None, *columns)], axis=1)
        for which in masks.values()
    ]
    drawn = np.split(
        bootstrap.drawn(np.concatenate(totals, axis=1)), len(masks), axis=1
    )
    rows: dict[str, dict[str, Row]] = {}
    for (grouping, name), mine, spread in zip(masks, totals, drawn, strict=True):
        found = {
            key: value[0]
            for key, value in values(mine.sum(axis=0)[None]).items()
            if np.isfinite(value[0])
        }
        if bootstrap.varies(mine[:, 0]):
            ends = values(spread)
            estimates = {key: interval(one, ends[key]) for key, one in found.items()}
        else:
            estimates = {key: Estimate(float(one)) for key, one in found.items()}
        rows.setdefault(grouping, {})[name] = Row(
            tokens=int(mine[:, 0].sum()),
            documents=int((mine[:, 0] > 0).sum()),
            estimates=estimates,
        )
    return rows


def groups_dict(groups: Groups) -> dict[str, dict[str, Any]]:
    """Plain values of rows by grouping and name."""
    return {
        grouping: {name: row.to_dict() for name, row in rows.items()}
        for grouping, rows in groups.items()
    }


def _values(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Each estimate but quantiles, (·,), of sums (·, :data:`_SUMS`)."""
    columns = dict(zip(_SUMS, sums.T, strict=True))
    tokens = columns.pop("tokens")
    mean = {name: ratios(column, tokens) for name, column in columns.items()}
    teacher, build = mean.pop("teacher_nll"), mean.pop("build_nll")
    return {
        "teacher_ppl": perplexity(teacher),
        "build_ppl": perplexity(build),
        "ppl_ratio": perplexity(build - teacher),
        **mean,
    }
