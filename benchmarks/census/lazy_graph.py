"""Count the launches of a lazy MLX graph, and the weight bytes it reaches.

The rules, the same for every model class:

- a node is a launch unless it is a view (:data:`VIEWS`); a ``Compiled`` node is one;
- a Metal kernel and every ``mx.fast`` op is one node (:mod:`pretend_gpu`);
- an array without a graph behind it (a parameter, a cache) is no launch;
- a weight is read in full by each node that takes it, directly or through views. Of
  stacked experts, a gather reads one for each routed pair, whatever bank they lie in;
  our expert kernels read an expert's slot in its own bank only.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

#: Primitives that MLX carries out without a launch where the data lies well.
VIEWS = frozenset(
    ("Reshape", "Transpose", "Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze")
    + ("Slice", "Split", "Flatten", "Unflatten", "AsStrided", "View", "StopGradient")
)

#: Primitives that read some rows of their weight: one a routed pair, or one a token.
GATHERS = frozenset(("GatherQMM", "GatherMM", "Gather", "GatherAxis"))

#: How many names MLX's export takes at once, with some to spare.
MOST_NAMES = 1000

_NAME = re.compile(r'"([^"]*)"')
_NODE = re.compile(r'\{ (\d+) \[label ="([^"]*)"')
_EDGE_IN = re.compile(r'"([^"]*)" -> (\d+)')
_EDGE_OUT = re.compile(r'(\d+) -> "([^"]*)"')


@dataclass
class Graph:
    """Nodes by number: their primitive, the arrays they take; and who made an array."""

    labels: dict[int, str] = field(default_factory=dict)
    takes: dict[int, list[str]] = field(default_factory=dict)
    maker: dict[str, int] = field(default_factory=dict)

    def launches(self) -> int:
        return sum(label not in VIEWS for label in self.labels.values())

    def nodes(self) -> int:
        return len(self.labels)

    def primitives(self) -> dict[str, int]:
        """How often each primitive that is a launch occurs."""
        counts: dict[str, int] = {}
        for label in self.labels.values():
            if label not in VIEWS:
                counts[label] = counts.get(label, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def behind_views(self, array: str) -> str:
        """The array that ``array`` is a view of, or ``array`` itself."""
        while (node := self.maker.get(array)) and self.labels[node] in VIEWS:
            array = self.takes[node][0]
        return array


def export(
    outputs: Iterable[mx.array], names: Mapping[str, mx.array]
) -> tuple[Graph, dict[int, str]]:
    """All that is behind ``outputs`` and ``names``, and the name of each by its id.

    Arrays in ``names`` keep theirs.
    """
    name_of = {id(array): name for name, array in names.items()}
    arrays = dict(names)
    for array in outputs:
        if id(array) not in name_of:
            name_of[id(array)] = f"other{len(name_of):06d}"
            arrays[name_of[id(array)]] = array
    return parse(_dot_with_names(arrays)), name_of


def _dot_with_names(arrays: Mapping[str, mx.array]) -> list[str]:
    """The lines that MLX exports for ``arrays``, each under its name.

    One export takes few names, so it is made several times, with some of the names
    each; the lines agree but for these.
    """
    names = list(arrays)
    batches = [names[i : i + MOST_NAMES] for i in range(0, len(names), MOST_NAMES)]
    merged: list[str] = []
    for batch in batches:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "graph.dot"
            named = {name: arrays[name] for name in batch}
            mx.export_to_dot(str(file), list(arrays.values()), **named)
            lines = file.read_text().splitlines()
        merged = merged or lines
        if len(lines) != len(merged):
            raise RuntimeError("two exports of one graph differ")
        for i, line in enumerate(lines):
            found = _NAME.search(line)
            if found and found[1] in named:
                merged[i] = line
    return merged


def parse(dot: Iterable[str]) -> Graph:
    """The graph in the lines MLX exports: each node's primitive, inputs and outputs.

    Calls of one compiled function share the id of their primitive, so that only the
    order of the lines tells them apart.
    """
    graph, node = Graph(), 0
    for line in dot:
        if found := _NODE.search(line):
            node += 1
            graph.labels[node], graph.takes[node] = found[2], []
        elif found := _EDGE_IN.search(line):
            graph.takes[node].append(found[1])
        elif found := _EDGE_OUT.search(line):
            graph.maker[found[2]] = node
    return graph


@dataclass(frozen=True)
class Weight:
    """A parameter as the census sees it.

    ``rows`` is the length of a stack (experts, embedded tokens) of which a step needs
    only some: ``gathered`` by a gather that knows no banks, ``wanted`` in truth.
    """

    nbytes: int
    rows: int = 1
    gathered: int = 1
    wanted: int = 1

    def bytes_of(self, rows: int) -> int:
        return self.nbytes // self.rows * rows


def weight_bytes(
    graph: Graph, weights: Mapping[str, Weight], kernels: Mapping[str, str]
) -> int:
    """Bytes of ``weights`` that the nodes of ``graph`` read.

    Args:
        weights: by array name.
        kernels: array name of a kernel's output → name of the kernel.
    """
    kernel_of = {
        graph.maker[array]: kernel
        for array, kernel in kernels.items()
        if array in graph.maker
    }
    total = 0
    for node, label in graph.labels.items():
        if label in VIEWS:
            continue
        sources = {graph.behind_views(array) for array in graph.takes[node]}
        # A kernel takes a stand-in for what a bank lacks: an array it takes anyway.
        for array in sources & weights.keys():
            total += _read(weights[array], label, kernel_of.get(node, ""))
    return total


def _read(weight: Weight, label: str, kernel: str) -> int:
    if kernel.startswith("kimi_k3_expert_"):
        return weight.bytes_of(weight.wanted)
    return weight.bytes_of(weight.gathered) if label in GATHERS else weight.nbytes


def leaf(shape: Iterable[int], dtype: Any) -> mx.array:
    """Zeros of any shape that take no memory and have no graph behind them."""
    array = mx.broadcast_to(mx.array(0, dtype=dtype), tuple(shape))
    mx.eval(array)
    return array
