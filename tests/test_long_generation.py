"""Report B06: what a cache counts must not pile up lazily while tokens are decoded."""

import io
import re
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from tiny_k3 import t0_model

from kimi_k3.models import text

#: Eleven layers, nine of them KDA, as the report asks for.
DEEP: dict[str, Any] = {
    "num_hidden_layers": 11,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
        "full_attn_layers": [4, 8],
    },
}


def decode(model: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
    """Decode ``tokens`` tokens a row and return the live batch caches."""
    generator = BatchGenerator(model, max_tokens=tokens + 1)
    generator.insert(prompts)
    left = tokens
    while left:
        left -= bool(generator.next_generated())
    return generator._generation_batch.prompt_cache


def pending_nodes(cache: Any) -> int:
    """Unevaluated operations behind the padding, length and offset of a cache."""
    total = 0
    for name in ("left_padding", "lengths", "offset"):
        value = getattr(cache, name, None)
        if isinstance(value, mx.array):
            dot = io.StringIO()
            mx.export_to_dot(dot, value)
            total += len(re.findall(r"->", dot.getvalue()))
    return total


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[5, 6, 7], [8]]], ids=["one", "two"])
def test_counts_of_the_caches_stay_evaluated(prompts: list[list[int]]) -> None:
    model = t0_model(**DEEP)
    after = {n: max(map(pending_nodes, decode(model, prompts, n))) for n in (10, 40)}
    assert after[40] <= after[10] <= 20


def test_without_the_tie_the_counts_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_with_cache_metadata", lambda h, caches: h)
    model = t0_model(**DEEP)
    after = {
        n: max(map(pending_nodes, decode(model, [[1, 2, 3]], n))) for n in (10, 40)
    }
    assert after[40] > 2 * after[10]
