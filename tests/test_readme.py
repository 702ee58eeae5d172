"""The README says what is: its table, its links, its list of files."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "nano").glob("*.md")),
]


def listed_files(readme: str) -> set[str]:
    """Paths in the file tree of the README, which is indented by two spaces a level."""
    tree = readme.split("## What is where")[1].split("```")[1]
    paths, parents = set(), [""] * 9
    for line in filter(str.strip, tree.splitlines()):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth + 1] = parents[depth] + name
        if not name.endswith("/"):
            paths.add(parents[depth + 1])
    return paths


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    builds = import_module("builds")

    shown = README.split("<!-- builds -->")[1].split("<!-- /builds -->")[0].strip()
    assert shown == builds.table(json.loads(builds.RESULTS.read_text()))


def test_the_tree_lists_every_file_of_the_package() -> None:
    package = (ROOT / "kimi_k3").rglob("*.py")
    real = {str(p.relative_to(ROOT)) for p in package if p.name != "__init__.py"}
    shown = {path for path in listed_files(README) if path.endswith(".py")}
    assert {path for path in shown if not path.endswith("__init__.py")} == real


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_results_file_is_named_in_a_document() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    results = (ROOT / "benchmarks" / "results").glob("*.json")
    assert [path.name for path in results if path.name not in text] == []
