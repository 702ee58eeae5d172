"""``kimi-k3 report``: a page that needs nothing, in which text from files stays text."""

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from judged_build import PLAN, fingerprint, make_build, save_evaluation, save_generation
from saliency_tables import small_table

from kimi_k3.checkpoint.headers import read_header
from kimi_k3.cli import main
from kimi_k3.errors import EvaluationError, MissingPackageError
from kimi_k3.evaluation.summary import Summary
from kimi_k3.evaluation.summary_text import FEW_TEXT
from kimi_k3.loading import load
from kimi_k3.machine.bench import bytes_per_token
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.reporting.report import PAGE, report
from kimi_k3.reporting.report_facts import BuildFacts
from kimi_k3.reporting.report_html import Html, element, page
from kimi_k3.reporting.report_results import load_judged

#: Elements that have no end tag.
VOID = ("meta", "img", "br", "wbr")

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Elements, attributes and text of a page; refuses tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def check_page(text: str) -> Page:
    """What holds for every page; returns it."""
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert found.named("html")[0]["lang"] == "en"
    assert len(found.named("title")) == len(found.named("h1")) == 1
    assert "width=device-width" in str(found.named("meta"))
    assert not [tag for tag, _ in found.tags if tag in ("script", "link", "iframe")]
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("data:image/png;base64,", "#")), (tag, target)
    assert "url(" not in text
    assert "@import" not in text
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    steps = zip(levels, levels[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps)
    ids = {attributes.get("id") for _, attributes in found.tags}
    assert {(link["href"] or "")[1:] for link in found.named("a")} <= ids
    assert all(image["alt"] for image in found.named("img"))
    assert all(cell["scope"] in ("row", "col") for cell in found.named("th"))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_build(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def facts(made: Path) -> BuildFacts:
    return BuildFacts.of(made)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and has tests of its own."""
    for name in ("draw_build", "draw_evaluation"):
        monkeypatch.setattr(f"{report.__module__}.{name}", lambda *inputs: [])


def test_facts_are_those_of_the_headers(made: Path, facts: BuildFacts):
    headers = [read_header(path) for path in sorted(made.glob("*.safetensors"))]
    stored = sum(tensor.nbytes for h in headers for tensor in h.tensors.values())
    assert facts.tensor_bytes == stored == sum(part.nbytes for part in facts.parts)
    assert facts.file_bytes == sum(header.nbytes for header in headers)
    kept = {layer.layer: tuple(layer.banks.values()) for layer in facts.layers}
    for layer, plan in PLAN.layers.items():
        counts = [len(bank) for bank in (plan.high, plan.low) if bank]
        assert kept[layer] == tuple(counts)
        assert facts.layers[layer].dropped == PLAN.experts - sum(counts)
    assert facts.experts == sum(len(p.order) for p in PLAN.layers.values())
    assert facts.source_experts == PLAN.experts * len(PLAN.layers)
    formats = {part.name: part.formats for part in facts.parts}
    assert formats["kda.qkv_proj"] == ("affine 8-bit",)
    assert formats["kda.o_proj"] == ("bfloat16",)
    assert facts.licence == "LICENSE"
    assert not facts.is_k3


@pytest.mark.parametrize("folder", ["build", "nano"])
def test_bytes_of_a_token_are_those_of_the_loaded_model(made: Path, folder: str):
    path = made if folder == "build" else NANO_FOLDER
    model, _ = load(path, lazy=True)
    wanted = bytes_per_token(model)
    assert BuildFacts.of(path).token_bytes == pytest.approx(wanted, rel=0.01)


def test_a_build_without_a_record():
    found = BuildFacts.of(NANO_FOLDER)
    assert found.record is None
    assert found.source_experts is None
    parts = {part.name: part.nbytes for part in found.parts}
    # In the source it is one matrix, in the model two.
    assert parts["mla.kv_b_proj"] > 0


def test_the_whole_page(made: Path, facts: BuildFacts, tmp_path: Path):
    evaluation, answers = tmp_path / "quality", tmp_path / "answers"
    save_evaluation(evaluation, facts.fingerprint)
    save_generation(answers, facts.fingerprint)
    arguments = ["--evaluation", str(evaluation), "--generation", str(answers)]
    out = tmp_path / "report"
    assert main(["report", str(made), *arguments, "--out", str(out)]) == 0
    text = (out / PAGE).read_text()
    found = check_page(text)
    assert len(found.named("img")) == len(list(out.glob("*.png"))) == 6
    row = Summary.load(evaluation).overall
    assert f"{row.estimates['kl'].value:#.3g}" in found.text
    assert "KL(teacher || build)" in found.text
    assert "6.2 %" in found.text  # of the answers loop
    assert FEW_TEXT in found.text  # of 24 documents
    assert "in the form of Kimi K3" in found.text
    assert "/home/me" not in text  # folders of whoever measured
    assert "quality/evaluation.json" in found.text
    assert Summary.load(evaluation).predictions not in found.text  # files' own digests
    assert "not measured" not in found.text.replace("was not measured", "")


def test_without_results_nothing_is_measured(made: Path, tmp_path: Path):
    text = report(made, tmp_path).read_text()
    found = check_page(text)
    measured = found.text.count("not measured")
    assert measured > 20
    assert "How far this build is from its source was not measured." in found.text
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "build-experts",
        "build-bytes",
    }


@pytest.mark.usefixtures("undrawn")
def test_text_from_files_stays_text(made: Path, tmp_path: Path):
    folder = tmp_path / "a & <b>"
    shutil.copytree(made, folder)
    results = tmp_path / "<i>"
    corpora = (EVIL, "a & b", "中文")
    save_evaluation(results, fingerprint(folder), corpora=corpora)
    answers = tmp_path / '"onload='
    save_generation(answers, fingerprint(folder), corpus=EVIL)
    out = tmp_path / "out"
    file = report(folder, out, evaluations=[results], generations=[answers])
    found = check_page(file.read_text())
    assert f"Build report: {folder.name}" in found.text
    assert all(name in found.text for name in corpora)


def test_the_check_of_pages_can_fail():
    good = element("h1", EVIL)
    check_page(page("title", "words", good))
    for bad in (
        element("h1", Html(EVIL)),
        Html(f"{good}<img src='x.png' alt='x'>"),
        Html(f"{good}{element('h3', 'a level left out')}"),
        Html(f"{good}<p>"),
        Html(f"{good}{element('a', 'nowhere', href='#nowhere')}"),
    ):
        with pytest.raises(AssertionError):
            check_page(page("title", "words", bad))


@pytest.mark.usefixtures("undrawn")
def test_another_build_is_compared_if_the_teacher_is_the_same(
    made: Path, facts: BuildFacts, tmp_path: Path
):
    mine, other = tmp_path / "mine", tmp_path / "other"
    save_evaluation(mine, facts.fingerprint)
    save_evaluation(other, "f" * 32, seed=1, worse=3.0)
    file = report(made, tmp_path / "out", evaluations=[other, mine])
    found = check_page(file.read_text())
    assert "B = other beside A = mine" in found.text
    assert "A is closer to the teacher" in found.text
    assert "other/predictions.npz" in found.text


def test_results_of_other_builds_are_refused(
    made: Path, facts: BuildFacts, tmp_path: Path
):
    other, answers = tmp_path / "other", tmp_path / "answers"
    save_evaluation(other, "f" * 32)
    with pytest.raises(EvaluationError, match=r"of other \(f+\), not of build"):
        report(made, tmp_path / "out", evaluations=[other])
    save_generation(answers, "f" * 32)
    with pytest.raises(EvaluationError, match=r"is of build \(f+\), not of build"):
        report(made, tmp_path / "out", generations=[answers])
    assert not (tmp_path / "out").exists()


def test_a_summary_of_other_predictions_is_refused(facts: BuildFacts, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    save_evaluation(one, facts.fingerprint)
    save_evaluation(two, facts.fingerprint, seed=1)
    shutil.copy(two / "predictions.npz", one)
    with pytest.raises(EvaluationError, match="is not the summary of"):
        load_judged([one], facts)
    (one / "predictions.npz").unlink()
    assert load_judged([one], facts)[0][0].evaluation is None


@pytest.mark.usefixtures("undrawn")
def test_calibration_and_plan(made: Path, facts: BuildFacts, tmp_path: Path):
    small_table().save(tmp_path / "other")
    with pytest.raises(EvaluationError, match="a calibration of another model"):
        report(made, tmp_path / "out", calibration=tmp_path / "other")
    changed = replace(PLAN, low_bits=3).save(tmp_path / "other.json")
    with pytest.raises(EvaluationError, match="another plan .* holds its own"):
        report(made, tmp_path / "out", plan=changed)
    with pytest.raises(EvaluationError, match="other numbers of experts than"):
        report(NANO_FOLDER, tmp_path / "out", plan=changed)
    same = PLAN.save(tmp_path / "same.json")
    check_page(report(made, tmp_path / "out", plan=same).read_text())


def test_without_matplotlib(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="kimi-k3-mlx"):
        report(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
