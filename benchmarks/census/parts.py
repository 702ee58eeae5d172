"""Cut a forward pass into parts, so that the launches of each can be counted alone.

A wrapped call gets fresh arrays without a graph for its inputs and gives such arrays on:
the graph of each part then ends where the part does. Walking from the outputs back over
the cuts finds each node once, in the part that made it, and no node that nobody needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from lazy_graph import Graph, export, leaf

#: Objects that carry arrays from call to call and are cut like their arrays.
HOLDERS = ("ResidualStack", "ResidualBlocks")


class Cutter:
    """Remembers what was cut: the array that goes on, what it stands for, whose it is.

    ``keep`` holds ids of arrays that pass uncut: parameters. ``expert_ids`` makes the
    routed ids that go on behind the router: some code reads them on the host.
    """

    def __init__(self, keep: set[int], expert_ids: Callable[[Any], mx.array]):
        self.keep = keep
        self.expert_ids = expert_ids
        self.cuts: list[tuple[mx.array, mx.array, str]] = []
        self.roots: list[tuple[mx.array, str]] = []
        self.open: list[str] = ["rest"]

    def cut(self, value: Any, part: str) -> Any:
        """``value``, made by ``part``, with its arrays replaced by leaves."""
        if type(value) in (tuple, list):
            return type(value)(self.cut(item, part) for item in value)
        if isinstance(value, mx.array) and id(value) not in self.keep:
            ids = part == "router" and value.dtype == mx.uint32
            shape = value.shape
            new = self.expert_ids(shape) if ids else leaf(shape, value.dtype)
            self.cuts.append((new, value, part))
            return new
        if type(value).__name__ in HOLDERS:
            for name, held in vars(value).items():
                setattr(value, name, self.cut(held, part))
        return value

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose launches count for ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer = self.open[-1]
            args = tuple(self.cut(value, outer) for value in args)
            kwargs = {name: self.cut(value, outer) for name, value in kwargs.items()}
            self.open.append(part)
            try:
                result = function(*args, **kwargs)
            finally:
                self.open.pop()
            for value in (*args, *kwargs.values()):
                self.roots += [(array, part) for array in cache_arrays(value)]
                if type(value).__name__ in HOLDERS:
                    self.cut(value, part)
            return self.cut(result, part)

        return call

    @contextmanager
    def wrapped(self, targets: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Wrap (owner, attribute, part) for the time of the block."""
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
        try:
            for owner, name, part in targets:
                setattr(owner, name, self.wrap(part, getattr(owner, name)))
            yield
        finally:
            for owner, name, function in reversed(kept):
                setattr(owner, name, function)


def cache_arrays(cache: Any) -> list[mx.array]:
    """The arrays in one of mlx-lm's caches; none for anything else."""
    if hasattr(cache, "cache"):
        return [array for array in cache.cache if array is not None]
    if hasattr(cache, "update_and_fetch") and cache.keys is not None:
        return [cache.keys, cache.values]
    return []


def split_graph(cutter: Cutter, names: Mapping[str, mx.array]) -> dict[str, Graph]:
    """The graph behind the cutter's roots, by part; arrays in ``names`` keep theirs."""
    arrays = [array for array, _ in cutter.roots]
    arrays += [array for cut in cutter.cuts for array in cut[:2]]
    whole, name_of = export(arrays, names)
    behind = {name_of[id(new)]: (name_of[id(old)], p) for new, old, p in cutter.cuts}
    roots = [(name_of[id(array)], part) for array, part in cutter.roots]
    return walk(whole, roots, behind)


def walk(
    whole: Graph,
    roots: Iterable[tuple[str, str]],
    behind: Mapping[str, tuple[str, str]],
) -> dict[str, Graph]:
    """What ``roots``, (array, part) pairs, depend on, by part.

    ``behind`` gives for an array that was put in for another that other and its part.
    """
    parts: dict[str, Graph] = {}
    seen: set[str] = set()
    taken: set[int] = set()
    waiting = list(roots)
    while waiting:
        array, part = waiting.pop()
        if array in seen:
            continue
        seen.add(array)
        if array in behind:
            waiting.append(behind[array])
            continue
        node = whole.maker.get(array)
        if node is None:
            continue
        graph = parts.setdefault(part, Graph())
        graph.maker[array] = node
        if node not in taken:
            taken.add(node)
            graph.labels[node], graph.takes[node] = (
                whole.labels[node],
                whole.takes[node],
            )
            waiting += [(taken_array, part) for taken_array in whole.takes[node]]
    return parts
