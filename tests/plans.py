"""Expert plans to test with, made by no planner, and saliency to plan with."""

from functools import cache
from typing import Any

import numpy as np
from saliency_tables import record, table_of
from tiny_k3 import WIDE_EXPERTS, t1_config

from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.planning.expert_plan import LOW_BITS, ExpertPlan, LayerPlan
from kimi_k3.planning.plan_sizes import SourceSizes


def wide_config(**text: Any) -> dict[str, Any]:
    """``config.json`` of a T1 whose experts are wide enough for a low bank."""
    return t1_config(**WIDE_EXPERTS | text)


@cache
def wide_table(seed: int = 0, **changes: Any) -> SaliencyTable:
    """Saliency of such a T1: code (60 tokens) and python (30), layers 1 to 4."""
    rng = np.random.default_rng(seed)
    layers = {
        layer: [record(rng, tokens, 16, 4) for tokens in (60, 30)]
        for layer in (1, 2, 3, 4)
    }
    return table_of(layers, **{"tokens": (60, 30), "top_k": 4} | changes)


def random_plan(sizes: SourceSizes, seed: int, **about: Any) -> ExpertPlan:
    """Any counts, banks and order in each layer, any width of each class."""
    rng = np.random.default_rng(seed)
    text = sizes.args.text_config
    total, top_k = text.num_experts, text.num_experts_per_token
    layers = {}
    for layer in range(text.num_hidden_layers):
        if text.is_moe_layer(layer):
            kept = rng.permutation(total)[: rng.integers(top_k + 1, total + 1)].tolist()
            # A layer in three has one bank.
            split = (0, len(kept), int(rng.integers(1, len(kept))))[rng.integers(3)]
            layers[layer] = LayerPlan(tuple(kept[:split]), tuple(kept[split:]))
    return ExpertPlan(
        experts=total,
        top_k=top_k,
        layers=layers,
        low_bits=int(rng.choice(LOW_BITS)),
        bits={
            name: int(rng.choice(list(found))) for name, found in sizes.classes.items()
        },
        about=about,
    )
