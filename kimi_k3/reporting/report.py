"""``kimi-k3 report``: all that is known of a build as one page that needs nothing else.

FOLDER/report.html    the page, pictures and style inside
FOLDER/*.png          the pictures
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..build.pictures import require_matplotlib
from ..build.saliency import TOOL
from .report_answers import Answers, answers_tables
from .report_facts import BuildFacts
from .report_html import element, joined, page
from .report_limits import limitations
from .report_pictures import draw_build, draw_evaluation
from .report_plan import Calibration, draw_plan, plan_of, plan_shown, saliency_tables
from .report_quality import compared
from .report_results import Judged, Source, load_judged, write_text
from .report_sections import Content, Drawn, glance, glance_html, sections

PAGE = "report.html"


def report(
    build: str | Path,
    out: str | Path,
    *,
    evaluations: Sequence[str | Path] = (),
    generations: Sequence[str | Path] = (),
    calibration: str | Path | None = None,
    plan: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the page and its pictures to the folder ``out``; the page's path.

    Args:
        build: a checkpoint folder.
        evaluations: folders that ``kimi-k3 evaluate`` filled: of this build, and of
            others by the same teacher and samples, to be compared with it.
        generations: folders that ``kimi-k3 generation`` filled.
        calibration: the folder of a calibration, or its saliency.npz.
        plan: the plan's file, where the build itself does not hold it.
        progress: is told what is being done.

    Raises the KimiK3Error that says what is missing, or belongs to another build, before
    anything is written.
    """
    require_matplotlib()
    out = Path(out)
    progress("reading")
    facts = BuildFacts.of(build)
    mine, others = load_judged(evaluations, facts)
    answers = [Answers.load(path, facts) for path in generations]
    planned = plan_of(facts, plan)
    table = None if calibration is None else Calibration.load(calibration)
    shown = None
    if table is not None and planned is not None:
        shown = plan_shown(build, planned, table)
    pairs = [
        (a, b, comparison)
        for b in others
        for a in mine
        if a.judged_like(b) and (comparison := compared(a, b)) is not None
    ]
    content = Content(
        facts=facts,
        judged=mine,
        answers=answers_tables(answers),
        comparisons=pairs,
        saliency=[] if table is None else saliency_tables(shown, planned, table),
        limits=limitations(facts, mine, generated=bool(answers)),
        sources=[*_sources(mine, others, answers), *([table.source] if table else [])],
        tool=TOOL,
    )
    progress("drawing")
    drawn = Drawn(
        build=draw_build(facts, out),
        evaluations=[
            draw_evaluation(one.summary, one.evaluation, out, _prefix(number, mine))
            for number, one in enumerate(mine, 1)
        ],
        saliency=[] if table is None else table.draw(out),
        plan=draw_plan(planned, shown, table, out),
    )
    return write_text(out / PAGE, page_text(replace(content, drawn=drawn)))


def page_text(content: Content) -> str:
    """The whole HTML document."""
    facts = content.facts
    title = f"Build report: {facts.name}"
    parts = sections(content)
    links = [
        element("li", element("a", part.title, href=f"#{part.anchor}"))
        for part in parts
    ]
    body = element(
        "main",
        element("h1", title),
        element(
            "p",
            f"What this build {'of' if facts.is_k3 else 'in the form of'} Kimi K3 is made "
            "of, how far it is from its teacher, and what it says by itself. Numbers come "
            "from the files named beside them.",
        ),
        glance_html(glance(facts, content.judged)),
        element("nav", element("ul", *links), aria_label="Sections"),
        joined(part.html() for part in parts),
    )
    return page(title, f"Sizes, quality and provenance of {facts.name}", body)


def _prefix(number: int, judged: Sequence[Judged]) -> str:
    return "" if len(judged) == 1 else f"{number}-"


def _sources(
    mine: Sequence[Judged], others: Sequence[Judged], answers: Sequence[Answers]
) -> list[Source]:
    found = []
    for one in (*mine, *others):
        found += [one.source, *([one.predictions] if one.predictions else [])]
    return found + [one.source for one in answers]
