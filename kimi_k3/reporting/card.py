"""``kimi-k3 card``: a model card for the Hugging Face hub, every number from a file.

The words around the numbers hold none: a figure is in a results file, in the build's
headers or in its config, or the row says that it was not measured.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..build.saliency import TOOL
from ..errors import EvaluationError
from .card_markdown import folded, plain, table_markdown
from .card_metadata import RELEASE, metadata
from .report_answers import Answers, overall_answers
from .report_build import (
    headers_of,
    layers_table,
    parts_table,
    provenance_table,
    sizes_table,
)
from .report_facts import BuildFacts
from .report_limits import limitations
from .report_quality import group_tables, level_text, overall_table
from .report_results import Benchmark, Judged, Source, load_judged, write_text
from .report_tables import NOT_MEASURED, Cell, Table, count, number, share, size

#: Where sampling advice of a build lies.
_ADVICE = "generation_config.json"


@dataclass(frozen=True)
class CardContent:
    """All that a card is made from."""

    facts: BuildFacts
    judged: Sequence[Judged]
    answers: Sequence[Answers]
    benchmarks: Sequence[Benchmark]

    @property
    def sources(self) -> list[Source]:
        found = [one.source for one in (*self.judged, *self.answers)]
        return found + [one.source for one in self.benchmarks]


def card(
    build: str | Path,
    out: str | Path,
    *,
    evaluations: Sequence[str | Path] = (),
    generations: Sequence[str | Path] = (),
    benchmarks: Sequence[str | Path] = (),
    replace: bool = False,
) -> Path:
    """Write the model card of ``build`` to the file ``out``; the file.

    Args:
        evaluations, generations: folders that ``kimi-k3 evaluate`` and ``kimi-k3
            generation`` filled, for this build.
        benchmarks: what ``kimi-k3 bench`` printed for it, as files.
        replace: whether a file that is there may be lost.

    Raises the KimiK3Error that says what is missing, or belongs to another build.
    """
    out = Path(out)
    if out.is_dir():
        raise EvaluationError(
            f"{out} is a folder; name a file, as {out / 'README.md'}."
        )
    if out.exists() and not replace:
        raise EvaluationError(
            f"{out} is there already. Name another file, or add --force to replace it."
        )
    facts = BuildFacts.of(build)
    mine, others = load_judged(evaluations, facts)
    if others:
        raise EvaluationError(
            f"{others[0].source.name} is of {others[0].build}, not of {facts.name}; a "
            "card speaks of one build. `kimi-k3 report` compares builds."
        )
    content = CardContent(
        facts,
        mine,
        [Answers.load(path, facts) for path in generations],
        [Benchmark.load(path, facts) for path in benchmarks],
    )
    return write_text(out, card_text(content))


def card_text(content: CardContent) -> str:
    """The whole card: metadata and Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(**metadata(content.facts))
    made = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_body(content)}\n")
    return str(made)


def _body(content: CardContent) -> str:
    facts = content.facts
    parts = [f"# {plain(facts.name)}", _introduction(facts)]
    parts += ["## Use", *_use(facts)]
    parts += ["## Sizes", table_markdown(sizes_table(facts))]
    parts += ["## How it was made", table_markdown(provenance_table(facts))]
    parts.append(
        folded(
            "Every part and every layer",
            f"{table_markdown(parts_table(facts))}\n\n"
            f"{table_markdown(layers_table(facts))}",
        )
    )
    parts += ["## Quality", *_quality(content.judged)]
    parts += ["## What it says by itself"]
    parts += [table_markdown(overall_answers(one)) for one in content.answers or [None]]
    parts += ["## Speed", *map(table_markdown, _speed(content.benchmarks))]
    limits = limitations(facts, content.judged, generated=bool(content.answers))
    parts += ["## Limitations", "\n".join(f"- {plain(one)}" for one in limits)]
    parts += ["## Licence", _licence(facts)]
    parts += ["## Sources of the numbers", _sources(content)]
    return "\n\n".join(parts)


def _introduction(facts: BuildFacts) -> str:
    what = f"A build of {RELEASE}" if facts.is_k3 else "A build in the form of Kimi K3"
    return f"{what} for Apple's MLX, run by stock mlx-lm with kimi-k3-mlx installed."


def _use(facts: BuildFacts) -> list[str]:
    model = shlex.quote(" ".join(f"./{facts.name}".split()))
    temperature, top_p = facts.sampling["temperature"], facts.sampling["top_p"]
    advice = f"of {plain(_ADVICE)}" if facts.advised else "that Moonshot advises"
    sampling = f"--temp {temperature} --top-p {top_p}"
    return [
        "```sh\n"
        "pip install kimi-k3-mlx\n"
        f'mlx_lm.generate --model {model} {sampling} --prompt "Why is the sky blue?"\n'
        f"mlx_lm.server --model {model} {sampling}\n"
        "```",
        f"Temperature and top-p are those {advice}; greedy decoding may repeat itself. "
        f"The weights take {size(facts.tensor_bytes)} of memory, and the cache and "
        f"activations come on top. *Source: {plain(headers_of(facts))}.*",
    ]


def _quality(judged: Sequence[Judged]) -> list[str]:
    if not judged:
        return [table_markdown(overall_table(None))]
    parts = []
    for one in judged:
        parts.append(table_markdown(overall_table(one)))
        parts.append(plain(level_text(one)))
        parts += [table_markdown(table) for table in group_tables(one)]
    return parts


def _speed(benchmarks: Sequence[Benchmark]) -> list[Table]:
    """A table for each benchmark, or one that says that there is none."""
    names = (
        *("prompt processing, tokens/s", "decoding, tokens/s", "peak memory"),
        "share of the memory's speed",
    )
    if not benchmarks:
        rows = tuple((Cell(name), Cell(NOT_MEASURED)) for name in names)
        return [Table("Speed", ("measure", "value"), rows, NOT_MEASURED)]
    tables = []
    for one in benchmarks:
        found = one.content
        values = (
            *(number(found["prefill"]), number(found["decode"])),
            *(size(found["peak_memory"]), share(found["share_of_bandwidth"])),
        )
        tables.append(
            Table(
                f"Speed on {found['device']}",
                ("measure", "value"),
                tuple((Cell(n), Cell(v)) for n, v in zip(names, values, strict=True)),
                str(one.source),
                f"Median of {len(found['runs'])} runs of {count(found['prompt_tokens'])} "
                f"tokens in and {count(found['decoded_tokens'])} out.",
            )
        )
    return tables


def _licence(facts: BuildFacts) -> str:
    if facts.is_k3:
        where = f"the file [{plain(facts.licence)}](./{facts.licence})"
        if not facts.licence:
            where = f"the repository of {RELEASE}; this folder has no copy of it"
        return f"The licence of Kimi K3 holds for these weights: see {where}."
    if facts.licence:
        return f"See the file [{plain(facts.licence)}](./{facts.licence})."
    return "This folder holds no licence file; that of its source holds."


def _sources(content: CardContent) -> str:
    lines = [f"- {plain(one.name)}: SHA-256 `{one.sha256}`" for one in content.sources]
    if not lines:
        lines = ["- none besides the build itself"]
    lines.append(f"- {plain(headers_of(content.facts))}")
    return "\n".join([*lines, "", f"Written by {plain(TOOL)}."])
