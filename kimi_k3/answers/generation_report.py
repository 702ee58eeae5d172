"""Generation: what a build says by itself, counted over its answers.

    OUT/generation.json    this value, sealed

Intervals come from drawing prompts again, all their answers with them, within each corpus
(``statistics.py``). A share of 0 or of all has no spread to draw from: its interval ends
at the share p for which so many prompts would all be alike in 1 of 40 runs, pⁿ = 0.025.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import EvaluationError
from ..evaluation.sealed_json import read_json, write_json
from ..evaluation.statistics import DRAWS, LEVEL, SEED, Bootstrap, Estimate
from .generation_measures import MEASURES, NO_SHARES, Measured

FILE_NAME = "generation.json"
KIND, VERSION = "answers of a build, counted", 1

_REMEDY = "Make it again with `kimi-k3 generation`."


@dataclass(frozen=True)
class GRow:
    """What is known of some answers.

    Attributes:
        answers, prompts: how many, of how many.
        tokens: ids of all answers.
        estimates: those of :data:`~kimi_k3.answers.generation_measures.MEASURES` that
            there is something to say of.
        stops: what answers ended on → how many.
        counts: how many answers ``loop``, how many of these only ``count`` on, how many
            ``call`` tools, and how many ``calls`` these are.
    """

    answers: int
    prompts: int
    tokens: int
    estimates: Mapping[str, Estimate]
    stops: Mapping[str, int]
    counts: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        estimates = {name: one.to_dict() for name, one in self.estimates.items()}
        return {**asdict(self), "estimates": estimates}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave."""
        estimates = content["estimates"].items()
        return cls(
            answers=int(content["answers"]),
            prompts=int(content["prompts"]),
            tokens=int(content["tokens"]),
            estimates={name: Estimate.from_dict(one) for name, one in estimates},
            stops=dict(content["stops"]),
            counts=dict(content["counts"]),
        )


@dataclass(frozen=True)
class SettingRows:
    """Of one sampling setting: all answers, and those of each corpus."""

    overall: GRow
    corpus: Mapping[str, GRow]


@dataclass(frozen=True)
class Judged:
    """One answer, measured; ``prompt`` is its prompt's number in its corpus."""

    corpus: str
    prompt: int
    setting: str
    tokens: int
    measured: Measured


@dataclass(frozen=True)
class Generation:
    """The numbers of one build.

    Attributes:
        about: the build, the prompts, seed, settings and versions.
        level: how often an interval holds the true value.
        draws, seed: of the bootstrap.
        settings: setting → rows.
    """

    about: Mapping[str, Any]
    level: float
    draws: int
    seed: int
    settings: Mapping[str, SettingRows]

    @classmethod
    def of(
        cls,
        judged: Sequence[Judged],
        about: Mapping[str, Any],
        draws: int = DRAWS,
        seed: int = SEED,
    ) -> "Generation":
        """Count ``judged`` answers, at least one. Settings and corpora keep their order."""
        names = dict.fromkeys(one.setting for one in judged)
        settings = {
            name: _rows([one for one in judged if one.setting == name], draws, seed)
            for name in names
        }
        return cls(dict(about), LEVEL, draws, seed, settings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "level": self.level,
            "draws": self.draws,
            "seed": self.seed,
            "settings": {
                name: {
                    "overall": rows.overall.to_dict(),
                    "corpus": {key: row.to_dict() for key, row in rows.corpus.items()},
                }
                for name, rows in self.settings.items()
            },
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Generation":
        """What :meth:`to_dict` gave; EvaluationError for anything else."""
        try:
            return cls(
                dict(content["about"]),
                float(content["level"]),
                int(content["draws"]),
                int(content["seed"]),
                {
                    name: SettingRows(
                        GRow.from_dict(rows["overall"]),
                        {key: GRow.from_dict(r) for key, r in rows["corpus"].items()},
                    )
                    for name, rows in content["settings"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"counted answers lack {error}. {_REMEDY}") from error

    def save(self, folder: str | Path) -> None:
        """Write ``folder/generation.json``, whole or not at all."""
        write_json(Path(folder) / FILE_NAME, KIND, VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Generation":
        """What :meth:`save` wrote: its folder or file. EvaluationError otherwise."""
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        return cls.from_dict(read_json(path, KIND, VERSION, _REMEDY))

    def text(self) -> str:
        """Tables for a terminal of 80 columns."""
        from .generation_text import generation_text

        return generation_text(self)


def _rows(judged: Sequence[Judged], draws: int, seed: int) -> SettingRows:
    """Of the answers of one setting."""
    corpora = list(dict.fromkeys(one.corpus for one in judged))
    strata = np.array([corpora.index(one.corpus) for one in judged])
    numbers = np.array([one.prompt for one in judged])
    bootstrap = Bootstrap(numbers, strata, draws, seed)
    everything = np.ones(len(judged), bool)
    return SettingRows(
        _row(judged, bootstrap, everything),
        {
            name: _row(judged, bootstrap, strata == number)
            for number, name in enumerate(corpora)
        },
    )


def _row(judged: Sequence[Judged], bootstrap: Bootstrap, which: np.ndarray) -> GRow:
    chosen = [one for one, mine in zip(judged, which, strict=True) if mine]
    estimates = {}
    for name in MEASURES:
        pairs = [one.measured.pairs.get(name, (0.0, 0.0)) for one in judged]
        above, below = np.array(pairs, np.float64).T
        totals = np.stack(
            [bootstrap.totals(above, which), bootstrap.totals(below, which)], axis=1
        )
        if totals[:, 1].any():
            estimate = bootstrap.ratio(totals)
            if name not in NO_SHARES:
                estimate = _not_too_sure(estimate, int((totals[:, 1] > 0).sum()))
            estimates[name] = estimate
    stops = Counter(one.measured.stop.reason for one in chosen)
    loops = [one.measured.loop for one in chosen if one.measured.loop]
    calls = [one.measured.calls.began for one in chosen if one.measured.calls.began]
    return GRow(
        answers=len(chosen),
        prompts=len({(one.corpus, one.prompt) for one in chosen}),
        tokens=sum(one.tokens for one in chosen),
        estimates=estimates,
        stops=dict(sorted(stops.items())),
        counts={
            "loop": len(loops),
            "count": sum(loop.counts for loop in loops),
            "call": len(calls),
            "calls": sum(calls),
        },
    )


def _not_too_sure(estimate: Estimate, prompts: int) -> Estimate:
    """A share of 0 or 1 with the interval that so many prompts allow."""
    if estimate.low is None or estimate.value not in (0.0, 1.0):
        return estimate
    room = 1 - ((1 - LEVEL) / 2) ** (1 / prompts)
    if estimate.value == 0.0:
        return Estimate(0.0, 0.0, room)
    return Estimate(1.0, 1 - room, 1.0)
