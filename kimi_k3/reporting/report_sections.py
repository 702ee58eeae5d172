"""The sections of a report's page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..evaluation.comparison import Comparison
from .report_build import (
    kept_text,
    layers_table,
    parts_table,
    provenance_table,
    sizes_table,
)
from .report_facts import BuildFacts
from .report_html import Html, element, joined, picture_html, table_html
from .report_pictures import Picture
from .report_quality import (
    comparison_table,
    group_tables,
    level_text,
    overall_table,
    overlap_text,
)
from .report_results import Judged, Source
from .report_tables import NOT_MEASURED, QUALITY, Cell, Table, estimate_cell, size

_BY_NAME = {column.name: column for column in QUALITY}


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that can be linked to."""

    anchor: str
    title: str
    content: Html

    def html(self) -> Html:
        return element(
            "section",
            element("h2", self.title, id=self.anchor),
            self.content,
        )


@dataclass(frozen=True)
class Drawn:
    """Pictures by the section that shows them; evaluations in the order of theirs."""

    build: Sequence[Picture] = ()
    evaluations: Sequence[Sequence[Picture]] = ()
    saliency: Sequence[Picture] = ()
    plan: Sequence[Picture] = ()


@dataclass(frozen=True)
class Content:
    """All that a page shows.

    Attributes:
        answers: tables of what the build says by itself.
        comparisons: evaluations of this build and another, and what lies between them.
        saliency: tables of a calibration and a plan.
        limits: sentences.
        sources: every file that numbers came from.
    """

    facts: BuildFacts
    judged: Sequence[Judged]
    answers: Sequence[Table]
    comparisons: Sequence[tuple[Judged, Judged, Comparison]]
    saliency: Sequence[Table]
    limits: Sequence[str]
    sources: Sequence[Source]
    tool: str
    drawn: Drawn = field(default_factory=Drawn)


def sections(content: Content) -> list[Section]:
    """The page, from what matters most to where it came from."""
    found = [_build(content), _quality(content), _answers(content)]
    if content.comparisons:
        found.append(_comparisons(content))
    if content.saliency or content.drawn.saliency or content.drawn.plan:
        found.append(_saliency(content))
    return [*found, _limits(content), _sources(content)]


def glance(facts: BuildFacts, judged: Sequence[Judged]) -> list[tuple[str, Cell]]:
    """What most readers look for: name and figure."""
    found = [
        ("weights in memory", Cell(size(facts.tensor_bytes))),
        ("routed experts", Cell(kept_text(facts))),
        ("read for a token", Cell(size(facts.token_bytes))),
    ]
    estimates = judged[0].summary.overall.estimates if judged else {}
    for name, heading in (
        ("kl", "mean KL, nats a token"),
        ("ppl_ratio", "perplexity ratio"),
        ("agreement", "same top token"),
    ):
        cell = estimate_cell(estimates, _BY_NAME[name], NOT_MEASURED)
        found.append((heading, cell))
    return found


def glance_html(figures: Iterable[tuple[str, Cell]]) -> Html:
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element(
                    "dd",
                    cell.text,
                    element("small", cell.note) if cell.note else "",
                ),
            )
            for name, cell in figures
        ),
        class_="figures",
    )


def _build(content: Content) -> Section:
    facts = content.facts
    tables = (
        sizes_table(facts),
        parts_table(facts),
        layers_table(facts),
        provenance_table(facts),
    )
    inside = [
        pictures_html(content.drawn.build),
        *map(table_html, tables),
    ]
    return Section("build", "The build", joined(inside))


def _quality(content: Content) -> Section:
    inside: list[Html] = []
    if not content.judged:
        inside = [table_html(overall_table(None)), *_how("evaluate")]
    for number, judged in enumerate(content.judged):
        if len(content.judged) > 1:
            inside.append(element("h3", f"Judged on {judged.folder.name}"))
        inside += _evaluation(judged)
        if number < len(content.drawn.evaluations):
            inside.append(pictures_html(content.drawn.evaluations[number]))
        inside += map(table_html, group_tables(judged))
    return Section("quality", "Distance from the teacher", joined(inside))


def _evaluation(judged: Judged) -> list[Html]:
    inside = [
        element("p", overlap_text(judged.summary.about)),
        table_html(overall_table(judged)),
        element("p", level_text(judged), class_="soft"),
    ]
    if judged.evaluation is None:
        inside.append(
            element(
                "p", "No predictions.npz lies beside it, so no distribution is drawn."
            )
        )
    return inside


def _answers(content: Content) -> Section:
    inside = [table_html(table) for table in content.answers]
    if any(table.source == NOT_MEASURED for table in content.answers):
        inside += _how("generation")
    return Section("answers", "What it says by itself", joined(inside))


def _how(verb: str) -> list[Html]:
    words = (
        f"It can be: kimi-k3 {verb} --help tells how, and kimi-k3 report with what it "
        "writes makes this page whole."
    )
    return [element("p", words)]


def _comparisons(content: Content) -> Section:
    inside = [
        table_html(comparison_table(comparison, a, b))
        for a, b, comparison in content.comparisons
    ]
    return Section("comparison", "Beside other builds", joined(inside))


def _saliency(content: Content) -> Section:
    drawn = content.drawn
    inside = [
        *map(table_html, content.saliency),
        pictures_html([*drawn.plan, *drawn.saliency]),
    ]
    return Section("saliency", "Calibration and plan", joined(inside))


def _limits(content: Content) -> Section:
    items = [element("li", sentence) for sentence in content.limits]
    return Section("limits", "Limitations", element("ul", *items))


def _sources(content: Content) -> Section:
    rows = tuple((Cell(one.name), Cell(one.sha256)) for one in content.sources)
    table = Table(
        "Files that this page is made from",
        ("file", "SHA-256"),
        rows or ((Cell("none besides the build"), Cell("–")),),
        "the files themselves; sha256sum shows the same",
        words=True,
    )
    inside = [
        table_html(table),
        element(
            "p",
            f"Made by {content.tool}. Nothing on this page was typed by hand.",
            class_="soft",
        ),
    ]
    return Section("sources", "Sources", joined(inside))


def pictures_html(pictures: Iterable[Picture]) -> Html:
    return element(
        "div",
        *(picture_html(p.path, p.alternative, p.caption) for p in pictures),
        class_="pictures",
    )
