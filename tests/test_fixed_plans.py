"""Plans by rule: who stays, how many fit, and what no plan can be."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from full_size_saliency import full_size
from plans import wide_config, wide_table
from saliency_tables import small_table, with_changed

from kimi_k3.errors import PlanError, SaliencyError
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import HIGH, ExpertPlan
from kimi_k3.planning.fixed_plans import (
    all_classes,
    global_plan,
    graded_plan,
    uniform_plan,
)
from kimi_k3.planning.plan_sizes import SourceSizes

TABLE, SIZES = wide_table(), SourceSizes.of(wide_config())
LAYERS = TABLE.layers.tolist()
HIGH_BYTES = SIZES.expert_bytes(HIGH)
Planner = Callable[..., ExpertPlan]


def best(layer: int, criterion: str = "reap_sum", **weights: float) -> list[int]:
    """Experts of ``layer``, the best first."""
    score = TABLE.score(criterion, weights or None)[LAYERS.index(layer)]
    return sorted(range(16), key=lambda expert: (-score[expert], expert))


def test_uniform_keeps_the_best_of_each_layer() -> None:
    plan = uniform_plan(
        TABLE, keep=6, criterion="frequency", weights={"python": 2}, bits={"lm_head": 8}
    )
    for layer in LAYERS:
        assert plan.order(layer) == tuple(
            sorted(best(layer, "frequency", python=2)[:6])
        )
        assert plan.layers[layer].low == ()
    assert plan.bits == {"lm_head": 8}
    assert plan.source == TABLE.source
    assert plan.about["weights"] == {"python": 2}
    assert plan.about["saliency"] == TABLE.digest
    assert (plan.about["kind"], plan.about["keep"]) == ("uniform", 6)
    assert ExpertPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_damage_ranks_in_place_of_a_criterion() -> None:
    """As it is: layers whose loss costs more keep more, which shares would not see."""
    of_table = Damage.of_criterion(TABLE, "reap_sum", None, SIZES)
    scale = np.array([[1.0], [1.0], [1.0], [100.0]])
    reverse = of_table.drop.max() - of_table.drop + 1e-3
    damage = replace(of_table, drop=reverse * scale, low=reverse * 0, measured=True)
    for plan in (
        uniform_plan(TABLE, keep=6, damage=damage),
        graded_plan(TABLE, high=2, low=4, damage=damage),
    ):
        for layer in LAYERS:
            worst = sorted(best(layer), key=lambda e: -best(layer).index(e))
            assert set(plan.order(layer)) == set(worst[:6])
    plan = global_plan(TABLE, keep=7, damage=damage)
    assert len(plan.order(LAYERS[3])) >= 15  # by shares: half as many
    for at, layer in enumerate(LAYERS):
        kept = plan.order(layer)
        lost = [e for e in range(16) if e not in kept]
        row = damage.drop[at]
        assert not lost or row[list(kept)].min() >= row[lost].max()
    assert plan.about["measured"] is True
    other = replace(damage, layers=damage.layers + 1)
    with pytest.raises(PlanError, match="the plan is for 4 layers of 16 experts"):
        uniform_plan(TABLE, keep=6, damage=other)


def test_global_keeps_the_best_shares_of_all_layers() -> None:
    score = TABLE.score("reap_sum")
    shares = score / score.sum(axis=1, keepdims=True)
    plan = global_plan(TABLE, keep=7.5, least=5)
    kept = [(at, e) for at, layer in enumerate(LAYERS) for e in plan.order(layer)]
    assert len(kept) == 30
    assert min(len(plan.order(layer)) for layer in LAYERS) >= 5
    first = {(at, e) for at, layer in enumerate(LAYERS) for e in best(layer)[:5]}
    assert first <= set(kept)
    others = {(at, e) for at in range(4) for e in range(16)} - first
    chosen = set(kept) - first
    worst = min(shares[at, e] for at, e in chosen)
    assert all(shares[at, e] <= worst for at, e in others - chosen)
    assert global_plan(TABLE, keep=4).layers == uniform_plan(TABLE, keep=4).layers


def test_graded_puts_the_best_first() -> None:
    plan = graded_plan(TABLE, high=3, low=5, low_bits=3)
    for layer in LAYERS:
        assert plan.layers[layer].high == tuple(sorted(best(layer)[:3]))
        assert plan.layers[layer].low == tuple(sorted(best(layer)[3:8]))
    assert plan.low_bits == 3
    assert graded_plan(TABLE, high=0, low=4).split(1) == 0
    assert (
        graded_plan(TABLE, high=6, low=0).layers == uniform_plan(TABLE, keep=6).layers
    )


def test_ties_go_by_number() -> None:
    one = np.ones((2, 4, 16))
    flat = with_changed(
        TABLE,
        count=np.full((2, 4, 16), [[[15]], [[10]]], np.int64),
        tokens=np.array([60, 40]),
        reap_sum=one * 8,
        gate_sum=one * 3,
        gate_square_sum=one,
        relative_sum=one,
        contribution_max=one,
    )
    assert uniform_plan(flat, keep=5).order(2) == (0, 1, 2, 3, 4)
    plan = global_plan(flat, keep=5)
    assert [len(plan.order(layer)) for layer in LAYERS] == [8, 4, 4, 4]
    assert plan.order(1) == tuple(range(8))
    assert graded_plan(flat, high=4, low=1).layers[1].low == (4,)


@pytest.mark.parametrize("experts", [4, 5, 9, 15, 16])
def test_the_largest_that_fits(experts: int) -> None:
    bits = all_classes(SIZES, 6, except_=["lm_head"])
    exactly = SIZES.plan_bytes(uniform_plan(TABLE, keep=experts, bits=bits))

    def kept(planner: Planner, memory: int, **options: Any) -> int:
        plan = planner(TABLE, memory=memory, sizes=SIZES, bits=bits, **options)
        assert SIZES.plan_bytes(plan) <= memory
        return sum(len(plan.order(layer)) for layer in LAYERS)

    assert kept(uniform_plan, exactly) == 4 * experts
    assert kept(global_plan, exactly) == 4 * experts
    assert kept(uniform_plan, exactly + HIGH_BYTES) == 4 * experts
    if experts < 16:
        assert kept(global_plan, exactly + HIGH_BYTES) == 4 * experts + 1
    if experts > 4:
        assert kept(uniform_plan, exactly - 1) == 4 * (experts - 1)
        assert kept(global_plan, exactly - 1) == 4 * experts - 1


@pytest.mark.parametrize(
    "given", [{}, {"high": 0}, {"high": 3}, {"low": 6}, {"high_share": 0.5}]
)
def test_graded_fills_the_memory(given: dict[str, Any]) -> None:
    for memory in range(1_125_000, 1_460_000, 30_000):
        plan = graded_plan(TABLE, memory=memory, sizes=SIZES, **given)
        high, low = plan.about["high"], plan.about["low"]
        assert SIZES.plan_bytes(plan) <= memory
        assert given.get("high", high) == high
        assert given.get("low", low) == low
        more = high + (high < 16 and "high" not in given), low + ("low" not in given)
        if high + low < 16:
            step = [(more[0], low), (high, more[1])]
            larger = [
                SIZES.plan_bytes(graded_plan(TABLE, high=h, low=l))
                for h, l in step
                if (h, l) != (high, low)
            ]
            assert max(larger) > memory


def test_full_size() -> None:
    table, sizes = full_size()
    bits = all_classes(sizes, 8, except_=["embed_tokens"])
    memory = 450_000_000_000
    for planner in (uniform_plan, global_plan, graded_plan):
        plan = planner(table, memory=memory, sizes=sizes, bits=bits)
        used = sizes.plan_bytes(plan)
        assert memory - 92 * sizes.expert_bytes(HIGH) < used <= memory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: uniform_plan(TABLE, keep=3), r"layer 1 .*picks 4; keep at least"),
        (lambda: uniform_plan(TABLE, keep=17), r"keeps 17 .*layer 1 has 16; keep no"),
        (lambda: uniform_plan(TABLE), r"neither how many"),
        (lambda: global_plan(TABLE), r"neither how many"),
        (lambda: graded_plan(TABLE, high=4), r"neither how many"),
        (lambda: uniform_plan(TABLE, memory=10**9), r"needs the sizes"),
        (lambda: global_plan(TABLE, keep=3), r"keeps 3 experts a layer; wanted 4 .*16"),
        (lambda: global_plan(TABLE, keep=16.3), r"keeps 16.3 experts a layer"),
        (lambda: global_plan(TABLE, keep=9, least=3), r"least 3 experts .*picks 4"),
        (lambda: global_plan(TABLE, keep=6, least=7), r"wanted 7"),
        (lambda: graded_plan(TABLE, high=2, low=1), r"2 \+ 1 experts .*picks 4"),
        (lambda: graded_plan(TABLE, high=9, low=8), r"9 \+ 8 experts .*layer 1 has 16"),
        (lambda: graded_plan(TABLE, high=-1, low=8), r"-1 \+ 8 experts"),
        (
            lambda: graded_plan(TABLE, high_share=1.5, memory=1, sizes=SIZES),
            r"1.5; want",
        ),
        (lambda: graded_plan(TABLE, high=4, low=4, low_bits=5), r"low bank has 5 bits"),
        (
            lambda: uniform_plan(TABLE, keep=5, bits={"lm_head": 7}),
            r"lm_head has 7 bits",
        ),
        (
            lambda: uniform_plan(TABLE, keep=5, sizes=SIZES, bits={"head": 8}),
            r"no class of matrices is called 'head'; there are dense.down_proj",
        ),
        (lambda: all_classes(SIZES, 8, ["head"]), r"no class of matrices .*'head'"),
        (
            lambda: graded_plan(TABLE, high=17, memory=10**9, sizes=SIZES),
            r"17 experts .*layer 1 has 16",
        ),
        (lambda: uniform_plan(small_table(), keep=5), r"layer 2 .*pruned already"),
    ],
)
def test_what_no_plan_can_be(make: Callable[[], ExpertPlan], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()


def test_criteria_and_corpora_are_checked() -> None:
    with pytest.raises(SaliencyError, match=r"no criterion is called 'best'"):
        uniform_plan(TABLE, keep=5, criterion="best")
    with pytest.raises(SaliencyError, match=r"no corpus polish"):
        uniform_plan(TABLE, keep=5, weights={"polish": 1})


@pytest.mark.parametrize(
    ("planner", "smallest"),
    [
        (uniform_plan, uniform_plan(TABLE, keep=4)),
        (global_plan, uniform_plan(TABLE, keep=4)),
        (graded_plan, graded_plan(TABLE, high=1, low=3)),
    ],
)
def test_memory_for_less_than_top_k(planner: Planner, smallest: ExpertPlan) -> None:
    least = SIZES.plan_bytes(smallest)
    with pytest.raises(
        PlanError, match=rf"4 experts in every layer.*needs {least:,} bytes"
    ):
        planner(TABLE, memory=least - 1, sizes=SIZES)
    assert planner(TABLE, memory=least, sizes=SIZES).layers == smallest.layers


def test_a_number_that_does_not_fit_its_memory() -> None:
    needed = SIZES.plan_bytes(uniform_plan(TABLE, keep=9))
    assert uniform_plan(TABLE, keep=9, memory=needed, sizes=SIZES)
    with pytest.raises(PlanError, match=rf"needs {needed:,} bytes, the limit is"):
        uniform_plan(TABLE, keep=9, memory=needed - 1, sizes=SIZES)


def test_router_groups_keep_equal_parts() -> None:
    sizes = SourceSizes.of(wide_config(num_expert_group=2, topk_group=1))
    plan = uniform_plan(TABLE, keep=6, sizes=sizes)
    for layer in LAYERS:
        order = plan.order(layer)
        for group in (range(8), range(8, 16)):
            ranked = [expert for expert in best(layer) if expert in group]
            assert {e for e in order if e in group} == set(ranked[:3])
    assert plan.groups == 2
    with pytest.raises(PlanError, match=r"2 router groups cannot share; take 6 or 8"):
        uniform_plan(TABLE, keep=7, sizes=sizes)
    memory = sizes.plan_bytes(plan) + 5 * HIGH_BYTES
    assert uniform_plan(TABLE, memory=memory, sizes=sizes).layers == plan.layers
    for planner in (global_plan, graded_plan):
        with pytest.raises(
            PlanError, match=r"layer 1 has 2 router groups.*Plan uniform"
        ):
            planner(TABLE, memory=memory, sizes=sizes)


def test_groups_that_are_more_than_top_k_keep_one_each() -> None:
    sizes = SourceSizes.of(wide_config(num_expert_group=8, topk_group=4))
    plan = uniform_plan(TABLE, keep=8, sizes=sizes)
    least = sizes.plan_bytes(plan)
    assert uniform_plan(TABLE, memory=least, sizes=sizes).layers == plan.layers
    with pytest.raises(PlanError, match=r"8 experts in every layer"):
        uniform_plan(TABLE, memory=least - 1, sizes=sizes)
