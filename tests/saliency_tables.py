"""Saliency tables to test with: small ones recorded token by token, and one like K3's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.saliency_checks import STATISTICS

SOURCE = {"config": "c0ffee", "weights": "beef"}
CORPORA = ("code", "python", "english", "chinese", "german")

Sums = dict[str, np.ndarray]


def samples_of(*documents: str, tokenizer: str = "tok") -> dict[str, Any]:
    return {
        "fingerprint": f"of {' '.join(documents)}",
        "tokenizer": tokenizer,
        "document_hashes": list(documents),
    }


def record(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> Sums:
    """Sums over random tokens of one corpus, (E,), by a loop over tokens.

    Values are multiples of a power of two, so that sums of them have no rounding.
    """
    sums = {name: np.zeros(experts, dtype) for name, dtype in STATISTICS.items()}
    favour = rng.normal(size=experts)
    for _ in range(tokens):
        chosen = np.argsort(favour + rng.normal(size=experts))[-top_k:]
        for expert, gate, norm in zip(
            chosen,
            rng.integers(1, 64, top_k) / 64,
            rng.integers(1, 64, top_k) / 16,
            strict=True,
        ):
            sums["count"][expert] += 1
            sums["gate_sum"][expert] += gate
            sums["gate_square_sum"][expert] += gate**2
            sums["reap_sum"][expert] += gate * norm
            sums["relative_sum"][expert] += norm / 64
            largest = max(sums["contribution_max"][expert], gate * norm)
            sums["contribution_max"][expert] = largest
    return sums


def stack(layers: Mapping[int, Sequence[Sums]]) -> dict[int, Sums]:
    """Layer → one corpus' sums each → layer → statistic → (C, E)."""
    return {
        layer: {name: np.stack([c[name] for c in corpora]) for name in STATISTICS}
        for layer, corpora in layers.items()
    }


def table_of(layers: Mapping[int, Sequence[Sums]], **changes: Any) -> SaliencyTable:
    """A table of recorded sums; ``tokens`` must be among the changes."""
    first = next(iter(layers.values()))
    stated = {
        "corpora": CORPORA[: len(first)],
        "top_k": 2,
        "source": SOURCE,
        "samples": samples_of("a", "b"),
    }
    return SaliencyTable.from_layers(stack(layers), **stated | changes)


def small_table(seed: int = 0, **changes: Any) -> SaliencyTable:
    """Two corpora (40 and 20 tokens), layers 1, 2 and 4 of 8, 6 and 8 experts, top-2."""
    rng = np.random.default_rng(seed)
    layers = {
        layer: [record(rng, tokens, experts, 2) for tokens in (40, 20)]
        for layer, experts in ((1, 8), (2, 6), (4, 8))
    }
    return table_of(layers, **{"tokens": (40, 20)} | changes)


def with_changed(table: SaliencyTable, **changes: Any) -> SaliencyTable:
    """``table`` with other values of some attributes."""
    values = {name: getattr(table, name) for name in SaliencyTable.__dataclass_fields__}
    return SaliencyTable(**values | changes)


def big_table(
    layers: int = 92, experts: int = 896, top_k: int = 16, tokens: int = 131_072
) -> SaliencyTable:
    """A table of K3's size, its concentration and its overlaps as published.

    Decoder layer 4 is flat, and layer 6 never chooses its experts 7, 11 and 12.
    """
    rng = np.random.default_rng(7)
    axes = (layers, experts)
    common, code, words = (rng.normal(size=axes) for _ in range(3))
    own = rng.normal(size=(len(CORPORA), *axes))
    # Loadings on a common taste, one for code against text, one for Latin against Han.
    loads = np.array(
        [[0.4, 0.9, 0], [0.4, 0.9, 0], [0.5, 0, 0.8], [0.4, -0.6, -0.5], [0.4, -0.1, 1]]
    )
    taste = np.einsum("ck,kle->cle", loads, np.stack([common, code, words]))
    taste = rng.uniform(0.8, 1.4, (layers, 1)) * (taste + 0.7 * own)
    taste[:, 3] *= 0.05
    if layers > 5:
        taste[:, 5, [7, 11, 12]] = -np.inf
    each = tokens // len(CORPORA)
    chance = np.exp(taste)
    chance /= chance.sum(axis=2, keepdims=True)
    chance = np.minimum(chance, 0.5 / top_k)  # no token chooses an expert twice
    chance /= chance.sum(axis=2, keepdims=True)
    count = rng.multinomial(each * top_k, chance).astype(np.int64)
    assert count.max() <= each
    gate = count * rng.uniform(0.05, 0.1, axes)
    norm = (
        np.exp(rng.normal(scale=0.15, size=axes)) * np.linspace(1, 9, layers)[:, None]
    )
    gate[:, 3], norm[3] = 0.07 * count[:, 3], 1
    reap = gate * norm
    return SaliencyTable(
        corpora=CORPORA,
        tokens=np.full(len(CORPORA), each, np.int64),
        layers=np.arange(1, layers + 1),
        experts=np.full(layers, experts, np.int64),
        top_k=top_k,
        count=count,
        gate_sum=gate,
        gate_square_sum=gate**2 / np.maximum(count, 1) ** 0.95,
        reap_sum=reap,
        relative_sum=gate * 2,
        contribution_max=reap / np.maximum(count, 1) ** 0.95,
        source=SOURCE,
        samples=samples_of(*(f"{n:064x}" for n in range(3000))),
    )
