"""``kimi-k3 card``: a card the hub takes, in which every number comes from a file."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from judged_build import (
    make_build,
    save_benchmark,
    save_evaluation,
    save_generation,
)

import kimi_k3
from kimi_k3.answers.generation_measures import MEASURES
from kimi_k3.cli import main
from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation.statistics import Estimate
from kimi_k3.evaluation.summary import ESTIMATES, Row
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.reporting.card import CardContent, card, card_text
from kimi_k3.reporting.card_markdown import plain
from kimi_k3.reporting.report_answers import Answers
from kimi_k3.reporting.report_facts import BuildFacts
from kimi_k3.reporting.report_results import Benchmark, Judged

#: Digits that words may hold: names, file names, and the bounds that measures are named
#: by.
NAMES = re.compile(
    r"Kimi[ -]K3|kimi[-_]k3|K3|SHA-256|mxfp4|95 %|90 %|99 %|0\.01\b|0\.1\b|4-grams|kl_p\d+",
    re.IGNORECASE,
)

#: Modules whose words stand in a card.
PROSE = ("card", "card_markdown", "card_metadata", "report_answers", "report_build")
PROSE += ("report_limits", "report_quality", "report_tables")

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w])")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_build(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def results(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results ``quality``, ``answers`` and ``bench.txt``."""
    folder, facts = tmp_path_factory.mktemp("results"), BuildFacts.of(made)
    save_evaluation(folder / "quality", facts.fingerprint)
    save_generation(folder / "answers", facts.fingerprint)
    save_benchmark(folder / "bench.txt", facts)
    return folder


@pytest.fixture(scope="module")
def content(made: Path, results: Path) -> CardContent:
    facts = BuildFacts.of(made)
    return CardContent(
        facts,
        [Judged.load(results / "quality")],
        [Answers.load(results / "answers", facts)],
        [Benchmark.load(results / "bench.txt", facts)],
    )


def leaves(value: Any) -> Iterator[float]:
    """Every number in plain values, and those that are spelt in texts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(key)
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int | float):
        yield float(value)
    else:
        yield from (float(text.replace(",", "")) for text in NUMBER.findall(str(value)))


def header_leaves(facts: BuildFacts) -> list[float]:
    """What the headers and the config of the build say, and counts of them."""
    assert facts.record is not None
    assert facts.record.plan is not None
    found: list[float | None] = [facts.tensor_bytes, facts.file_bytes]
    found.append(facts.token_bytes)
    found += [facts.source_bytes, facts.file_bytes / (facts.source_bytes or 1)]
    found += [facts.experts, facts.source_experts, facts.shards]
    found += [(facts.source_experts or 0) - facts.experts]
    found += [len(facts.record.source), *leaves(facts.record.tool)]
    found += leaves(facts.sampling)
    for part in facts.parts:
        found += [part.nbytes, part.nbytes / facts.tensor_bytes]
    for stored in facts.expert_formats:
        found.append(sum(layer.banks.get(stored, 0) for layer in facts.layers))
    for layer in facts.layers:
        counts = [*layer.banks.values(), layer.experts, layer.dropped or 0]
        found += [layer.layer, layer.nbytes, *counts]
    bits = list(facts.record.plan.bits.values())
    found += [facts.record.plan.low_bits, 64, *bits, *(bits.count(b) for b in bits), 0]
    return [float(value) for value in found if value is not None]


def traced(text: str, known: list[float]) -> bool:
    """Whether the number ``text`` is one of ``known``, rounded, in some unit."""
    plain_text = text.replace(",", "")
    mantissa, _, exponent = plain_text.partition("e")
    digits = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - digits)
    value = float(plain_text)
    return any(
        abs(one * scale - value) <= 0.5000001 * unit
        for one in known
        for scale in (1, 100, 1e-3, 1e-6, 1e-9)
    )


def untraced(text: str, known: list[float]) -> list[str]:
    """Numbers of a card's text that none of the ``known`` ones explains."""
    text = re.sub(r"`[0-9a-f]{64}`|\b[0-9a-f]{12,}…?", "", text)
    text = NAMES.sub("", text)
    return [found for found in NUMBER.findall(text) if not traced(found, known)]


def test_the_hub_takes_it(made: Path, results: Path, tmp_path: Path):
    file = tmp_path / "new" / "README.md"
    arguments = ["--evaluation", str(results / "quality")]
    arguments += ["--generation", str(results / "answers")]
    arguments += ["--benchmark", str(results / "bench.txt"), "--out", str(file)]
    assert main(["card", str(made), *arguments]) == 0
    loaded = ModelCard.load(file)
    assert loaded.data.to_dict() == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": [
            *("mlx", "kimi-k3", "kimi-k3-mlx", "moe", "pruned"),
            *("2-bit", "4-bit", "6-bit", "8-bit"),
        ],
        "license": "other",
        "license_link": "LICENSE",
    }
    assert str(loaded) == file.read_text()
    assert "--temp 1.0 --top-p 0.95" in loaded.text
    assert "not measured" not in loaded.text
    assert "/home/me" not in loaded.text


def test_the_release_is_named_where_the_build_is_of_it(content: CardContent):
    whole = replace(content, facts=replace(content.facts, is_k3=True, licence=""))
    loaded = ModelCard(card_text(whole))
    stated = loaded.data.to_dict()
    assert stated["base_model"] == "moonshotai/Kimi-K3"
    assert stated["base_model_relation"] == "quantized"
    assert (stated["license"], stated["license_name"]) == ("other", "kimi-k3")
    assert "license_link" not in stated
    assert "those of generation\\_config.json" in loaded.text
    silent = replace(whole, facts=replace(whole.facts, advised=False))
    assert "those that Moonshot advises" in card_text(silent)
    assert "The licence of Kimi K3 holds for these weights" in loaded.text


def test_without_files_every_row_says_so(made: Path, tmp_path: Path):
    text = card(made, tmp_path / "README.md").read_text()
    rows = [line for line in text.splitlines() if "| not measured |" in line]
    assert len(rows) == len(ESTIMATES) + len(MEASURES) + 4
    # Of a build that keeps no record the card still stands.
    nano = ModelCard.load(card(NANO_FOLDER, tmp_path / "nano.md"))
    assert "license" not in nano.data.to_dict()


def test_every_number_is_one_of_a_file(content: CardContent, results: Path):
    known = header_leaves(content.facts)
    for name in ("quality/evaluation.json", "answers/generation.json"):
        known += leaves(json.loads((results / name).read_text()))
    bench = content.benchmarks[0].content
    known += [*leaves(bench), len(bench["runs"])]
    text = ModelCard(card_text(content)).text
    assert len(NUMBER.findall(text)) > 200
    assert untraced(text, known) == []
    # A number that somebody typed is found.
    kl = f"{content.judged[0].summary.overall.estimates['kl'].value:#.3g}"
    assert kl in text
    assert untraced(text.replace(kl, "0.77777"), known)
    assert untraced(f"{text}\nIt reaches 98765 tokens/s.", known)


def changes_of(row: Row) -> Iterator[tuple[str, Row]]:
    """``row`` with one number changed after the other, and what was."""
    yield "tokens", replace(row, tokens=row.tokens + 1)
    yield "documents", replace(row, documents=row.documents + 1)
    for name, found in row.estimates.items():
        others = {**row.estimates, name: replace(found, value=1.7 * found.value)}
        yield name, replace(row, estimates=others)
        if found.low is not None and found.high is not None:
            wider = Estimate(found.value, 0.7 * found.low, 1.3 * found.high)
            yield name, replace(row, estimates={**row.estimates, name: wider})


def test_a_changed_number_changes_the_card(content: CardContent):
    before = card_text(content)
    judged = content.judged[0]
    for name, row in changes_of(judged.summary.overall):
        changed = replace(judged, summary=replace(judged.summary, overall=row))
        assert card_text(replace(content, judged=[changed])) != before, name
    facts = replace(content.facts, tensor_bytes=content.facts.tensor_bytes + 1)
    assert card_text(replace(content, facts=facts)) != before
    one = content.benchmarks[0]
    for name in ("prefill", "decode", "peak_memory", "share_of_bandwidth"):
        other = replace(one, content={**one.content, name: 2 * one.content[name]})
        assert card_text(replace(content, benchmarks=[other])) != before, name


def words_of(module: Path) -> Iterator[str]:
    """Texts in the code of ``module``, without docstrings and formats of numbers."""
    tree = ast.parse(module.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.FormattedValue) and node.format_spec:
            skipped |= {id(inner) for inner in ast.walk(node.format_spec)}
        calls = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("re.compile", ".sub")
        )
        if calls or isinstance(node, ast.Attribute):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # noqa: SIM102
            if id(node) not in skipped:
                yield node.value


@pytest.mark.parametrize("name", PROSE)
def test_words_hold_no_numbers(name: str):
    module = Path(kimi_k3.__file__).parent / "reporting" / f"{name}.py"
    words = [NAMES.sub("", text) for text in words_of(module)]
    assert words
    assert [text for text in words if re.search(r"\d", text)] == []


def test_text_from_files_stays_text(made: Path, tmp_path: Path):
    facts = BuildFacts.of(made)
    corpora = ("a | b", "<script>x</script>", "`*_[x](y)\n# new")
    save_evaluation(tmp_path / "q", facts.fingerprint, corpora=corpora)
    text = card(made, tmp_path / "c.md", evaluations=[tmp_path / "q"]).read_text()
    assert "<script>" not in text
    assert "| a \\| b |" in text
    assert "\\`\\*\\_\\[x\\](y) \\# new" in text
    assert plain("<b>&amp;") == "\\<b\\>&amp;amp;"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda facts: {"bytes_per_token": 2 * facts.token_bytes},
            "is of a build that",
        ),
        (lambda facts: {"decode": None}, "is no benchmark"),
    ],
)
def test_benchmarks_of_others_are_refused(
    made: Path, tmp_path: Path, change: Callable[[BuildFacts], Any], message: str
):
    facts = BuildFacts.of(made)
    file = save_benchmark(tmp_path / "bench.txt", facts, **change(facts))
    with pytest.raises(EvaluationError, match=message):
        card(made, tmp_path / "README.md", benchmarks=[file])
    assert not (tmp_path / "README.md").exists()


def test_a_card_is_of_one_build(made: Path, results: Path, tmp_path: Path):
    save_evaluation(tmp_path / "other", "f" * 32)
    both = [results / "quality", tmp_path / "other"]
    with pytest.raises(EvaluationError, match="a card speaks of one build"):
        card(made, tmp_path / "README.md", evaluations=both)


def test_what_is_there_is_kept(made: Path, tmp_path: Path):
    mine = tmp_path / "README.md"
    mine.write_text("by hand")
    assert main(["card", str(made), "--out", str(mine)]) == 2
    assert mine.read_text() == "by hand"
    with pytest.raises(EvaluationError, match="is a folder"):
        card(made, tmp_path)
    with pytest.raises(EvaluationError, match="cannot be written"):
        card(made, mine / "README.md")
    assert main(["card", str(made), "--out", str(mine), "--force"]) == 0
    assert "by hand" not in mine.read_text()
