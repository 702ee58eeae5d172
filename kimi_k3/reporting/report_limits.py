"""What a report does not tell: limitations, as they follow from what was measured."""

from collections.abc import Iterator, Sequence

from ..evaluation.summary_text import FEW_TEXT, documents_text, is_of_few
from .report_facts import VISION, BuildFacts
from .report_quality import overlap_text
from .report_results import Judged
from .report_tables import count


def limitations(
    facts: BuildFacts, judged: Sequence[Judged], *, generated: bool
) -> list[str]:
    """Sentences for a reader who decides whether to trust the numbers."""
    found = list(_of_build(facts))
    if not judged:
        found.append("How far this build is from its source was not measured.")
    for one in judged:
        found += _of_evaluation(one)
    if not generated:
        found.append(
            "What the build says by itself (loops, stops, tool calls) was not measured: "
            "a low KL on given text does not show it."
        )
    else:
        found.append(
            "Answers are judged by form (loops, ends, tool calls, language), not by "
            "whether they are right."
        )
    found.append("No task or benchmark of abilities was run for this page.")
    return found


def _of_build(facts: BuildFacts) -> Iterator[str]:
    if not facts.is_k3:
        yield (
            "This build does not have the sizes of the released Kimi K3, so nothing here "
            "speaks of it."
        )
    before = facts.source_experts
    if before is not None and before > facts.experts:
        yield (
            f"{before - facts.experts:,} of {before:,} routed experts were dropped. What "
            "the calibration text did not ask for may have gone with them."
        )
    elif facts.record is None:
        yield "How this build was made is not recorded in it."
    if any(part.name == VISION for part in facts.parts):
        yield "Images and video were not part of any measurement."


def _of_evaluation(judged: Judged) -> Iterator[str]:
    row = judged.summary.overall
    corpora = ", ".join(judged.summary.groups.get("corpus", {}))
    yield (
        f"{judged.source.name} speaks of {count(row.tokens)} tokens of "
        f"{documents_text(row.documents)} ({corpora}). Its intervals cover other "
        "documents of these kinds, not other kinds of text."
    )
    if is_of_few(judged.summary):
        yield FEW_TEXT
    yield (
        "KL and perplexity are of given text, token by token, each after what really "
        "came before."
    )
    yield overlap_text(judged.summary.about)
