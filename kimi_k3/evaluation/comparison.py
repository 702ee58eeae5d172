"""Comparison: what lies between two builds that the same teacher judged.

Differences are paired: each draw takes the same documents for both, so that what makes a
document hard for both does not count as uncertainty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EvaluationError
from .evaluation import Evaluation
from .statistics import DRAWS, LEVEL, SEED, Bootstrap, Estimate, ratios
from .summary import ALL, Groups, Row, groups_dict, rows_by_group

#: Names of estimates, and what they are, for builds A and B. Of a group where A has no
#: KL there is no "kl_ratio".
DIFFERENCES = {
    "kl": "mean KL of B less that of A, nats a token",
    "kl_ratio": "mean KL of B over that of A",
    "log_ppl": "log perplexity of B less that of A, nats a token",
    "agreement": "top token as the teacher's: share of B less share of A",
}

#: What must be the teacher's in two evaluations to compare them, and what it is called.
SHARED = {
    "checkpoint": "another teacher",
    "values": "a teacher of other values",
    "samples": "other samples",
    "tokenizer": "another tokenizer",
    "dtype": "another type to compute in",
}

#: What merely changes roundings.
_ROUNDINGS = ("rows_per_step", "tool", "mlx", "device")

_ARRAYS = ("corpus", "document", "span", "language", "position")


@dataclass(frozen=True)
class Comparison:
    """What build B is beside build A.

    Attributes:
        teacher: of both.
        a, b: the builds, as ``about["build"]`` of their evaluations.
        notes: what makes the comparison less sure than its intervals.
        level, draws, seed: as in :class:`~kimi_k3.evaluation.summary.Summary`.
        overall, groups: as there, with :data:`DIFFERENCES` as estimates.
    """

    teacher: Mapping[str, Any]
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    notes: tuple[str, ...]
    level: float
    draws: int
    seed: int
    overall: Row
    groups: Groups

    @classmethod
    def of(
        cls, a: Evaluation, b: Evaluation, draws: int = DRAWS, seed: int = SEED
    ) -> "Comparison":
        """Compare ``b`` with ``a``.

        Raises EvaluationError, naming what differs, unless the same teacher judged both
        by the same predictions, computed in the same type.
        """
        _refuse_others(a, b)
        bootstrap = Bootstrap(a.document, a.corpus, draws, seed)
        pairs = ((a.kl, b.kl), (a.build_nll, b.build_nll), (a.agrees, b.agrees))
        columns = [column for pair in pairs for column in pair]
        rows = rows_by_group(a, bootstrap, columns, _values)
        overall = rows.pop(ALL)[ALL]
        return cls(
            teacher=dict(a.about.get("teacher", {})),
            a=dict(a.about.get("build", {})),
            b=dict(b.about.get("build", {})),
            notes=_notes(a, b),
            level=LEVEL,
            draws=draws,
            seed=seed,
            overall=overall,
            groups=rows,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "teacher": dict(self.teacher),
            "a": dict(self.a),
            "b": dict(self.b),
            "notes": list(self.notes),
            "level": self.level,
            "draws": self.draws,
            "seed": self.seed,
            "overall": self.overall.to_dict(),
            "groups": groups_dict(self.groups),
        }

    def text(self) -> str:
        """Tables and a verdict for a terminal of 80 columns."""
        from .comparison_text import comparison_text

        return comparison_text(self)


def excludes_zero(estimate: Estimate) -> bool | None:
    """Whether 0 lies outside the interval; None without one."""
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low > 0 or estimate.high < 0


def _refuse_others(a: Evaluation, b: Evaluation) -> None:
    differ = []
    mine, theirs = (one.about.get("teacher", {}) for one in (a, b))
    builds = [one.about.get("build", {}) for one in (a, b)]
    for key, other in SHARED.items():
        if mine.get(key) != theirs.get(key):
            shown = (str(side.get(key, "unknown"))[:12] for side in (mine, theirs))
            differ.append(f"{other} ({' and '.join(shown)})")
    if builds[0].get("dtype") != builds[1].get("dtype"):
        shown = (str(side.get("dtype", "unknown")) for side in builds)
        differ.append(f"builds computed in another type ({' and '.join(shown)})")
    directions = [one.about.get("direction") for one in (a, b)]
    if directions[0] != directions[1]:
        differ.append(f"another direction ({' and '.join(map(str, directions))})")
    if not differ:
        same = a.corpora == b.corpora and a.languages == b.languages
        same = same and all(
            np.array_equal(getattr(a, name), getattr(b, name)) for name in _ARRAYS
        )
        differ = [] if same else ["other predictions"]
    if differ:
        raise EvaluationError(
            f"these evaluations cannot be compared: {'; '.join(differ)}. Judge both "
            "builds by one teacher: `kimi-k3 teacher`, then `kimi-k3 evaluate BUILD "
            "--against TEACHER`."
        )


def _notes(a: Evaluation, b: Evaluation) -> tuple[str, ...]:
    notes = []
    for side in ("teacher", "build"):
        mine, theirs = (one.about.get(side, {}) for one in (a, b))
        for key in _ROUNDINGS:
            if mine.get(key) != theirs.get(key):
                notes.append(
                    f"{side}: {key} was {mine.get(key)} for A and {theirs.get(key)} "
                    "for B, which changes roundings"
                )
    apart = float(np.abs(a.teacher_nll - b.teacher_nll).max())
    if apart:
        notes.append(f"the teacher's own -log p differs by up to {apart:.1e} nats")
    return tuple(notes)


def _values(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Each of :data:`DIFFERENCES`, (·,), of sums (·, 7) of :func:`rows_by_group`."""
    tokens, kl_a, kl_b, nll_a, nll_b, agrees_a, agrees_b = sums.T
    return {
        "kl": ratios(kl_b - kl_a, tokens),
        "kl_ratio": ratios(kl_b, kl_a),
        "log_ppl": ratios(nll_b - nll_a, tokens),
        "agreement": ratios(agrees_b - agrees_a, tokens),
    }
