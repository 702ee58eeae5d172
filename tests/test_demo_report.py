"""``kimi-k3 demo --report``: its steps in order, told, and both pages; nothing is run."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from judged_build import make_build, save_benchmark, save_evaluation, save_generation

from kimi_k3.answers.generation_prompts import read_prompts
from kimi_k3.build.samples import load_tokenizer
from kimi_k3.cli import main
from kimi_k3.errors import EvaluationError, MissingPackageError
from kimi_k3.nano import NANO_FOLDER, demo_report
from kimi_k3.nano.cache import DemoFolders
from kimi_k3.nano.demo_report import QUESTIONS, report_demo
from kimi_k3.reporting.report_facts import BuildFacts


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Steps that take minutes leave made-up results; what was asked of them."""
    made = make_build(tmp_path / "cache")
    facts = BuildFacts.of(made)
    found: list[tuple[str, Any]] = []

    def step(name: str, do: Callable[..., Any]) -> None:
        def run(*given: Any, **named: Any) -> Any:
            found.append((name, named.get("restart", False)))
            return do(*given)

        monkeypatch.setattr(demo_report, name, run)

    def evaluate(build: Path, teacher: Path, out: Path) -> Any:
        if out.exists():
            raise EvaluationError("holds another evaluation")
        return save_evaluation(out, facts.fingerprint)

    def bench(build: Path) -> Any:
        file = save_benchmark(tmp_path / "bench.txt", facts)
        content = demo_report.json.loads(file.read_text().splitlines()[-1])
        return SimpleNamespace(to_dict=lambda: content)

    folders = DemoFolders(NANO_FOLDER, made, made=True)
    step("demo_folders", lambda cache: folders)
    step("make_teacher", lambda source, samples, out: len(samples.tokens))
    step("evaluate", evaluate)
    step("generation", lambda b, p, out: save_generation(out, facts.fingerprint))
    step("bench", bench)
    return found


def test_both_pages(
    asked: list[tuple[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "pages"
    assert main(["demo", "--report", str(out)]) == 0
    names = ["demo_folders", "make_teacher", "evaluate", "generation", "bench"]
    assert [name for name, _ in asked] == names
    told = capsys.readouterr().out
    assert all(f"{number} of 6 " in told for number in range(1, 7))
    assert str(out / "report.html") in told
    text = ModelCard.load(out / "README.md").text
    assert "not measured" not in text
    assert "31.4" in text
    assert "<title>Build report: build</title>" in (out / "report.html").read_text()


def test_what_an_earlier_copy_left_is_discarded(
    asked: list[tuple[str, Any]], tmp_path: Path
):
    (tmp_path / "pages" / "work" / "evaluation").mkdir(parents=True)
    with pytest.raises(EvaluationError, match="holds another"):
        report_demo(tmp_path / "pages", tmp_path, lambda line: None)
    assert asked[-2:] == [("evaluate", False), ("evaluate", True)]


def test_what_is_missing_is_said_first(
    asked: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingPackageError, match="jsonschema"):
        report_demo(tmp_path / "pages", tmp_path, lambda line: None)
    assert asked == []
    assert not (tmp_path / "pages").exists()


def test_the_questions_can_be_asked():
    found = read_prompts(QUESTIONS, load_tokenizer(NANO_FOLDER))
    assert len(found.prompts) == len(QUESTIONS.read_text().splitlines())
    assert found.notes == ()
