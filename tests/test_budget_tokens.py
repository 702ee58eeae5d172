"""What a token reads, as a sum and as it is: exact where it must be, never above."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from full_size_saliency import chosen_by_layer
from plans import random_plan, wide_config, wide_table

from kimi_k3.errors import PlanError
from kimi_k3.planning.budget_choice import Choice, Limits
from kimi_k3.planning.budget_plan import budget_plan
from kimi_k3.planning.budget_proof import proven_bound
from kimi_k3.planning.budget_tokens import TokenForm, frequencies
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.matrix_classes import CLASS_BITS
from kimi_k3.planning.plan_sizes import SourceSizes

TABLE, SIZES = wide_table(), SourceSizes.of(wide_config())
TEXT = SIZES.args.text_config
DAMAGE = Damage.of_criterion(TABLE, "reap_sum", None, SIZES)
CHOSEN = chosen_by_layer(TABLE)
WHOLE = SIZES.plan_bytes(ExpertPlan.identity(TEXT))


def test_a_choice_proven_best_by_trying_everything() -> None:
    """Two layers of five experts, two classes: everything, with the ratio as it is."""
    text = {"num_hidden_layers": 3, "num_experts": 5, "num_experts_per_token": 2}
    linear = wide_config()["text_config"]["linear_attn_config"] | {
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
    }
    sizes = SourceSizes.of(wide_config(**text, linear_attn_config=linear))
    args = sizes.args.text_config
    rng = np.random.default_rng(5)
    drop = rng.pareto(1.2, (2, 5)) + 0.01
    named = {"lm_head": (16, 4), "shared_experts.up_proj": (16, 4)}
    fixed = {name: 16 for name in sizes.classes if name not in named}
    damage = replace(
        DAMAGE,
        layers=np.array([1, 2]),
        experts=5,
        drop=drop,
        low=drop * 0.3,
        classes={
            name: dict.fromkeys(found, 0.0) | ({4: 0.4} if name in named else {})
            for name, found in sizes.classes.items()
        },
        criterion="damage",
    )
    frequency = {1: rng.uniform(size=5), 2: rng.uniform(size=5)}
    identity = ExpertPlan.identity(args)
    memory = int(sizes.plan_bytes(identity) * 0.97)
    tokens = int(sizes.bytes_per_token(identity, frequency) * 0.96)
    layers = [
        replace(identity.layers[1], high=high, low=low)
        for states in itertools.product(range(3), repeat=5)
        for high in [tuple(e for e, s in enumerate(states) if s == 2)]
        for low in [tuple(e for e, s in enumerate(states) if s == 1)]
        if len(high + low) >= 2
    ]
    best = math.inf
    parts = {
        n: [
            (
                math.fsum(drop[n - 1, [e for e in range(5) if e not in p.order]])
                + math.fsum(0.3 * drop[n - 1, list(p.low)]),
                replace(identity, layers={**identity.layers, n: p}),
            )
            for p in layers
        ]
        for n in (1, 2)
    }
    bits = [
        dict(zip(named, b, strict=True)) for b in itertools.product(*named.values())
    ]
    costs = {
        n: [
            (
                lost,
                sizes.plan_bytes(plan) - sizes.plan_bytes(identity),
                sizes.bytes_per_token(plan, frequency)
                - sizes.bytes_per_token(identity, frequency),
            )
            for lost, plan in found
        ]
        for n, found in parts.items()
    }
    for chosen in bits:
        plan = replace(identity, bits={n: b for n, b in chosen.items() if b != 16})
        room = memory - sizes.plan_bytes(plan)
        reads = tokens - sizes.bytes_per_token(plan, frequency)
        base = 0.4 * len(plan.bits)
        second = np.array(costs[2])
        for lost, used, read in costs[1]:
            fits = (used + second[:, 1] <= room) & (read + second[:, 2] <= reads - 1)
            best = min(best, base + lost + second[fits, 0].min(initial=math.inf))
    result = budget_plan(
        damage,
        sizes,
        memory=memory,
        bytes_per_token=tokens,
        frequency=frequency,
        allowed_bits=(16, 4),
        fixed_bits=fixed,
        tolerance=0,
    )
    assert sizes.plan_bytes(result.plan) <= memory
    assert sizes.bytes_per_token(result.plan, frequency) <= tokens
    assert result.damage == damage.of_plan(result.plan)
    assert result.bound <= best + 1e-9
    assert best * (1 - 1e-9) <= result.damage <= best * 1.1


def test_what_a_token_reads_as_a_sum() -> None:
    for seed in range(4):
        plan = random_plan(SIZES, seed)
        states = _states_of(plan)
        identity = ExpertPlan.identity(TEXT)
        for chosen in (None, CHOSEN):
            frequency = frequencies(DAMAGE, chosen)
            form = TokenForm.around(states, frequency, SIZES, plan.low_bits)
            read = form.constant + form.use[0][states == 1].sum()
            read += form.use[1][states == 2].sum()
            rest = SIZES.bytes_per_token(identity, chosen) - _experts_of(
                identity, chosen
            )
            classes = SIZES.bytes_per_token(
                replace(identity, bits=plan.bits), chosen
            ) - SIZES.bytes_per_token(identity, chosen)
            exact = SIZES.bytes_per_token(plan, chosen)
            assert read + rest + classes == pytest.approx(exact, abs=2)


@pytest.mark.parametrize("memory", [None, int(WHOLE * 0.6)])
def test_the_proven_bound_at_any_prices(memory: int | None) -> None:
    """It is below damage plus price of every plan, and meets the one that is least."""
    limit = int(0.7 * SIZES.bytes_per_token(ExpertPlan.identity(TEXT)))
    choice = Choice.of(DAMAGE, SIZES, None, None, CLASS_BITS, {})
    limits = Limits(memory, limit, CHOSEN)

    def priced(plan: ExpertPlan, of_memory: float, of_token: float) -> float:
        over = 0 if memory is None else SIZES.plan_bytes(plan) - memory
        read = SIZES.bytes_per_token(plan, CHOSEN) - limit
        return DAMAGE.of_plan(plan) + of_memory * over + of_token * read

    plans = [random_plan(SIZES, seed) for seed in range(40)]
    plans = [plan for plan in plans if plan.low_bits == 2]
    smallest = choice.plan(*choice.smallest(), {})
    whole = ExpertPlan.identity(TEXT)
    assert len(plans) > 5
    for prices in ([0.0, 0.0], [1e-6, 1e-6], [1e-6, 3e-6], [1e-5, 1e-6], [1.0, 1.0]):
        used = np.array(prices if memory is not None else prices[1:])
        by_plan = [priced(plan, *prices) for plan in (*plans, smallest, whole)]
        bound = proven_bound(
            choice, limits, used, choice.states_of(whole), frequencies(DAMAGE, CHOSEN)
        )
        assert bound <= min(by_plan) + 1e-6 * max(prices)
        if prices[0] in (0.0, 1.0):
            # What a token reads is rounded, and this allows for it.
            assert bound == pytest.approx(min(by_plan), rel=1e-9, abs=2 * prices[1])


def test_a_sum_that_is_never_above() -> None:
    for seed in range(6):
        plan = random_plan(SIZES, seed)
        states = _states_of(plan)
        frequency = frequencies(DAMAGE, CHOSEN)
        exact = TokenForm.around(states, frequency, SIZES, plan.low_bits)
        below = TokenForm.below(frequency, SIZES, plan.low_bits)
        read = [
            form.constant
            + form.use[0][states == 1].sum()
            + form.use[1][states == 2].sum()
            for form in (below, exact)
        ]
        assert read[0] <= read[1] + 1e-6
        assert read[0] > 0.5 * read[1]


def _states_of(plan: ExpertPlan) -> np.ndarray:
    states = np.zeros(DAMAGE.drop.shape, np.int8)
    for row, layer in zip(states, DAMAGE.layers.tolist(), strict=True):
        row[list(plan.layers[layer].low)] = 1
        row[list(plan.layers[layer].high)] = 2
    return states


def _experts_of(plan: ExpertPlan, chosen: Any) -> float:
    rows = sum(len(layer.order) for layer in plan.layers.values())
    return sum(SIZES.routed_bytes_per_token(plan, chosen)) + rows * SIZES.router_bytes


def test_frequencies_are_checked() -> None:
    for wrong in (
        {1: np.ones(16)},
        CHOSEN | {3: np.ones(9)},
        CHOSEN | {3: np.zeros(16)},
    ):
        with pytest.raises(PlanError, match=r"layer [23]"):
            frequencies(DAMAGE, wrong)
    assert np.allclose(frequencies(DAMAGE, CHOSEN).sum(axis=1), 1)
