"""Tables of what a build says by itself, from generation.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..answers.generation_measures import MEASURES
from ..answers.generation_report import FILE_NAME, Generation, GRow
from ..errors import EvaluationError
from .report_facts import BuildFacts
from .report_results import Source, folder_name
from .report_tables import (
    GENERATION,
    NOT_MEASURED,
    Cell,
    Column,
    Table,
    count,
    estimate_cell,
)

_NOTHING = "– stands where no answer gave anything to measure."

_COLUMNS = tuple(column for columns in GENERATION.values() for column in columns)


@dataclass(frozen=True)
class Answers:
    """What ``kimi-k3 generation`` counted, and the file."""

    generation: Generation
    source: Source

    @classmethod
    def load(cls, path: str | Path, facts: BuildFacts) -> Self:
        """From the folder that ``kimi-k3 generation`` filled, or its generation.json.

        Raises EvaluationError for anything else, and for another build's.
        """
        path = Path(path)
        file = path / FILE_NAME if path.is_dir() else path
        found = Generation.load(file)
        fingerprint = found.about.get("build", {}).get("checkpoint")
        if fingerprint != facts.fingerprint:
            raise EvaluationError(
                f"{file} is of {folder_name(found.about, 'build')} ({fingerprint}), not "
                f"of {facts.name} ({facts.fingerprint}). Let this build answer with "
                "`kimi-k3 generation`."
            )
        return cls(found, Source.of(file))

    @property
    def rows(self) -> dict[str, dict[str, GRow]]:
        """Setting → group → row; "all" first, if there are several corpora."""
        return {
            name: dict(rows.corpus)
            if len(rows.corpus) == 1
            else {"all": rows.overall, **rows.corpus}
            for name, rows in self.generation.settings.items()
        }


def answers_tables(answers: Sequence[Answers]) -> list[Table]:
    """Two tables for each setting: groups of answers and every measure that there is."""
    tables = [
        table
        for one in answers
        for setting, rows in one.rows.items()
        for title, columns in GENERATION.items()
        if (table := _table(one, f"{title}, {setting}", setting, rows, columns))
    ]
    return tables or [overall_answers(None)]


def overall_answers(answers: Answers | None) -> Table:
    """Each measure over all answers, a column a setting."""
    title = "Answers"
    named = [
        (column, Cell(column.heading, MEASURES[column.name])) for column in _COLUMNS
    ]
    if answers is None:
        rows = tuple((name, Cell(NOT_MEASURED)) for _, name in named)
        return Table(title, ("measure", "value"), rows, NOT_MEASURED)
    settings = answers.generation.settings
    overall = [rows.overall for rows in settings.values()]
    counted = [Cell(count(row.answers), f"{row.prompts:,} prompts") for row in overall]
    rows = [
        (name, *(estimate_cell(row.estimates, column) for row in overall))
        for column, name in named
    ]
    return Table(
        title,
        ("measure", *settings),
        ((Cell("answers"), *counted), *rows),
        str(answers.source),
        f"{'; '.join(setting_text(answers, name) for name in settings)}. {_NOTHING}",
    )


def setting_text(answers: Answers, name: str) -> str:
    """How answers of the setting ``name`` were drawn."""
    about = answers.generation.about
    setting = about.get("settings", {}).get(name, {})
    words = [f"{key.replace('_', '-')} {value}" for key, value in setting.items()]
    words += [f"at most {about.get('max_tokens')} tokens", f"seed {about.get('seed')}"]
    return f"{name}: {', '.join(words)}"


def _table(
    answers: Answers,
    title: str,
    setting: str,
    rows: Mapping[str, GRow],
    wanted: tuple[Column, ...],
) -> Table | None:
    """The measures ``wanted`` of all groups; None where there is none of them."""
    columns = [
        column
        for column in wanted
        if any(column.name in row.estimates for row in rows.values())
    ]
    if not columns:
        return None
    return Table(
        title,
        ("corpus", "answers", *(column.heading for column in columns)),
        tuple(
            (
                Cell(group),
                Cell(count(row.answers), f"{row.prompts:,} prompts"),
                *(estimate_cell(row.estimates, column) for column in columns),
            )
            for group, row in rows.items()
        ),
        str(answers.source),
        f"{setting_text(answers, setting)}. {_NOTHING}",
    )
