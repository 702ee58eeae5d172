"""Imports point one way, and files stay small."""

import ast
from pathlib import Path

import pytest

import kimi_k3

PACKAGE = Path(kimi_k3.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: From the top down: a room may import its own level and those below.
LEVELS = (
    ("cli", "__main__"),
    ("verbs",),
    ("run", "nano"),
    ("run_options",),
    ("reporting",),
    ("answers",),
    ("evaluation",),
    ("build", "planning", "conversion", "machine"),
    ("loading", "folder_check"),
    ("tokenizer", "models"),
    ("checkpoint", "config"),
    ("kernels",),
    ("registration",),
    ("errors", "__version__"),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
LEVEL["__init__"] = 0  # the public names, imported when asked for

#: Fewer lines than these: a file is one idea.
MOST_LINES = 400


def imported_rooms(source: str, inside: tuple[str, ...]) -> set[str]:
    """First parts of what ``source``, the module ``inside`` the package, imports."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) - node.level]
            modules = [node.module] if node.module else [a.name for a in node.names]
            rooms |= {(*base, *module.split("."))[0] for module in modules}
        elif isinstance(node, ast.Import):
            assert not any(a.name.startswith("kimi_k3") for a in node.names)
    return rooms


def wrong_imports(source: str, inside: tuple[str, ...]) -> set[str]:
    here = LEVEL[inside[0]]
    return {room for room in imported_rooms(source, inside) if LEVEL[room] < here}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_file(file: Path):
    source = file.read_text()
    inside = file.relative_to(PACKAGE).with_suffix("").parts
    assert not wrong_imports(source, inside)
    assert len(source.splitlines()) < MOST_LINES, "one idea per file: split it"


def test_the_rule_can_fail():
    assert wrong_imports(
        "from .text import x\nfrom ..cli import main", ("models", "mla")
    )
    assert wrong_imports("def f():\n    from . import models", ("config",)) == {
        "models"
    }
    assert not wrong_imports("from ..kernels.situ import situ", ("models", "mlp"))
