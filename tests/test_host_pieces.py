"""Every piece of mlx, mlx-lm and others that the package uses is there and takes our calls.

The uses are read from the sources, so a new one is held without a word here. A rename
in a host fails with the place, the name and the version, before any model does.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, QuantizedKVCache

import kimi_k3

PACKAGE = Path(kimi_k3.__file__).parent
HOSTS = ("mlx", "mlx_lm", "mlx_vlm", "tiktoken", "tokenizers", "transformers")

#: Names that a host calls private, and why we reach for them all the same.
PRIVATE = {
    "mlx_lm.utils._download": "the one function that knows its users' hubs",
}


@dataclass(frozen=True)
class Use:
    """One host name in the sources, and the call it stands in, if any.

    ``path`` is dotted, with a colon behind a module that names are imported from.
    """

    where: str
    path: str
    call: ast.Call | None = None

    @property
    def name(self) -> str:
        return self.path.replace(":", ".")


class Reader(ast.NodeVisitor):
    """Collects the :class:`Use` s of one file."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.names: dict[str, str] = {}
        self.uses: list[Use] = []
        self.inner: set[ast.expr] = set()

    def add(self, node: ast.AST, path: str, call: ast.Call | None = None) -> None:
        line = getattr(node, "lineno", 0)
        self.uses.append(Use(f"{self.where}:{line}", path, call))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root in HOSTS:
                bound = alias.name if alias.asname else root
                self.names[alias.asname or root] = bound
                self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").partition(".")[0] in HOSTS:
            for alias in node.names:
                path = f"{node.module}:{alias.name}"
                self.names[alias.asname or alias.name] = path
                self.add(node, path)

    def visit_Call(self, node: ast.Call) -> None:
        if name := self.dotted(node.func):
            self.inner.add(node.func)
            self.add(node, name, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        elif node not in self.inner:
            self.add(node, name)

    def dotted(self, node: ast.expr) -> str | None:
        """``mlx.core.fast.metal_kernel`` for ``mx.fast.metal_kernel``, host names only."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and (inside := self.dotted(node.value)):
            return f"{inside}.{node.attr}"
        return None


def uses_in(source: str, where: str) -> list[Use]:
    tree, reader = ast.parse(source), Reader(where)
    # Imports first: a function may stand above the import that it uses.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            reader.visit(node)
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            reader.visit(node)
    return reader.uses


def find(path: str) -> Any:
    """What ``path`` stands for, as Python looks it up; LookupError if nothing does.

    A package may have a function of the same name as one of its modules.
    """
    module, _, rest = path.rpartition(":")
    root, *parts = [module, *rest.split(".")] if module else rest.split(".")
    place = root
    try:
        found = importlib.import_module(root)
    except ImportError:
        raise LookupError(root) from None
    for part in parts:
        place = f"{place}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(place)
            except ImportError:
                raise LookupError(place) from None
    return found


def complaint(use: Use) -> str | None:
    """What is wrong with ``use`` under the installed host, or None."""
    host = use.name.partition(".")[0].replace("_", "-")
    try:
        found = find(use.path)
    except LookupError as missing:
        return (
            f"{use.where} uses {use.name}, but {host} {version(host)} has no "
            f"{missing}; was it renamed?"
        )
    if use.call is None or any(isinstance(a, ast.Starred) for a in use.call.args):
        return None
    keywords = {k.arg: None for k in use.call.keywords if k.arg is not None}
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # compiled functions have none
        return None
    spread = len(keywords) < len(use.call.keywords)
    try:
        bind = signature.bind_partial if spread else signature.bind
        bind(*use.call.args, **keywords)
    except TypeError as error:
        return (
            f"{use.where} calls {ast.unparse(use.call)}, but {use.name} of {host} "
            f"{version(host)} takes {signature}: {error}."
        )
    return None


def all_uses() -> Iterator[Use]:
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE.parent).as_posix()
        yield from uses_in(file.read_text(encoding="utf-8"), where)


def test_every_use_fits_the_installed_hosts():
    uses = list(all_uses())
    assert {u.name.partition(".")[0] for u in uses} >= {"mlx", "mlx_lm", "transformers"}
    assert len([u for u in uses if u.call is not None]) > 100
    complaints = [text for use in uses if (text := complaint(use))]
    assert not complaints, "\n".join(complaints)


def test_only_public_names_are_used():
    private = {
        use.name
        for use in all_uses()
        if any(part.startswith("_") for part in use.name.split("."))
    }
    assert private <= set(PRIVATE), "mlx-lm may change these without a word"


def test_a_module_behind_a_function_of_its_name_is_looked_into():
    source = "from mlx_lm.generate import TextStateMachine as T\nT.split(1, 2)"
    assert [c for use in uses_in(source, "a.py") if (c := complaint(use))] == []
    source = "import mlx_lm\nx = mlx_lm.generate.TextStateMachine"
    (use,) = [use for use in uses_in(source, "a.py") if "Text" in use.name]
    assert "no mlx_lm.generate.TextStateMachine" in str(complaint(use))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("from mlx_lm.generate import TextMachine", "no mlx_lm.generate.TextMachine"),
        ("from mlx_lm.models.cash import KVCache", "no mlx_lm.models.cash; was it"),
        ("from mlx_lm.models.cache import ArraysCash", "no mlx_lm.models.cache.Arrays"),
        ("import mlx_lm.lodders", "no mlx_lm.lodders; was it renamed"),
        (
            "import mlx.core as mx\nx = mx.fast.metal_colonel",
            "no mlx.core.fast.metal_c",
        ),
        ("import mlx.nn as nn\nnn.RMSNorm(8, epsilon=1e-5)", "keyword argument 'epsi"),
        (
            "from mlx_lm.models.switch_layers import SwitchLinear as S\n"
            "def f():\n    return S(1, 2)",
            "missing a required argument: 'num_experts'",
        ),
    ],
)
def test_a_rename_is_seen(source: str, text: str):
    complaints = [c for use in uses_in(source, "a.py") if (c := complaint(use))]
    assert len(complaints) == 1
    assert complaints[0].startswith("a.py:")
    assert text in complaints[0]


def test_what_is_used_of_a_cache_is_there():
    """Attributes that the model reads or sets on caches it is handed."""
    plain, arrays = KVCache(), ArraysCache(size=2)
    batched, quantised = BatchKVCache([1, 0]), QuantizedKVCache(group_size=32, bits=8)
    assert plain.offset == 0
    assert plain.keys is None
    assert (arrays[0], arrays.lengths, arrays.left_padding) == (None, None, None)
    assert isinstance(batched.left_padding, mx.array)
    assert isinstance(batched.offset, mx.array)
    assert (quantised.group_size, quantised.bits) == (32, 8)
    assert not hasattr(plain, "bits")
    for cache in (plain, batched, quantised):
        inspect.signature(cache.update_and_fetch).bind("keys", "values")
    inspect.signature(arrays.advance).bind(3)
