"""budget_plan: within its limits, exactly; never worse than a plan by rule; proven."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from full_size_saliency import chosen_by_layer, full_size
from plans import wide_config, wide_table

from kimi_k3.errors import PlanError
from kimi_k3.planning import budget_plan as module
from kimi_k3.planning.budget_plan import BudgetResult, budget_plan
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.fixed_plans import (
    all_classes,
    global_plan,
    graded_plan,
    uniform_plan,
)
from kimi_k3.planning.plan_sizes import SourceSizes

TABLE, SIZES = wide_table(), SourceSizes.of(wide_config())
TEXT = SIZES.args.text_config
DAMAGE = Damage.of_criterion(TABLE, "reap_sum", None, SIZES)
CHOSEN = chosen_by_layer(TABLE)
WHOLE = SIZES.plan_bytes(ExpertPlan.identity(TEXT))
SMALLEST = graded_plan(TABLE, high=0, low=4, bits=all_classes(SIZES, 3))
GB = 1_000_000_000


def random_damage(seed: int) -> Damage:
    """Measured, as it were: the low width costs some experts almost all, some nothing."""
    rng = np.random.default_rng(seed)
    drop = rng.pareto(1.2, (4, 16)) + 1e-3
    classes = {
        name: dict(zip(sorted(found, reverse=True), costs, strict=True))
        for name, found in SIZES.classes.items()
        for costs in [[0, *np.sort(rng.pareto(1.5, len(found) - 1) / 9).tolist()]]
    }
    return replace(
        DAMAGE,
        drop=drop,
        low=drop * rng.choice([0, 0.1, 0.4, 0.99], drop.shape),
        classes=classes,
        measured=True,
        criterion="damage",
        origin={},
    )


def by_rule(memory: int, table: Any, sizes: SourceSizes, own: Any) -> list[ExpertPlan]:
    """Plans by rule that fit, at the classes' bits ``own`` and at one width for all."""
    found = []
    for bits in (own, *(all_classes(sizes, b) for b in (16, 8, 6, 4, 3))):
        common: dict[str, Any] = {"memory": memory, "sizes": sizes, "bits": bits}
        for make in (
            lambda c: uniform_plan(table, **c),
            lambda c: global_plan(table, **c),
            lambda c: graded_plan(table, **c),
            lambda c: graded_plan(table, high_share=0.5, **c),
            lambda c: graded_plan(table, high=0, **c),
        ):
            try:
                found.append(make(common))
            except PlanError:
                continue
    return found


def check(result: BudgetResult, damage: Damage, sizes: SourceSizes) -> None:
    """What holds for every result."""
    assert result.damage == damage.of_plan(result.plan)
    assert result.memory == sizes.plan_bytes(result.plan)
    assert 0 <= result.bound <= result.damage
    assert result.gap == pytest.approx(1 - result.bound / result.damage, abs=1e-12)
    assert all(result.damage <= lost for lost in result.fixed.values())
    assert ExpertPlan.from_dict(json.loads(json.dumps(result.plan.to_dict())))
    for layer in result.plan.layers.values():
        assert list(layer.high) == sorted(layer.high)
        assert list(layer.low) == sorted(layer.low)


@pytest.mark.parametrize("share", [0.35, 0.5, 0.7, 0.9])
def test_within_memory_and_never_worse_than_a_plan_by_rule(share: float) -> None:
    memory = int(WHOLE * share)
    result = budget_plan(DAMAGE, SIZES, memory=memory)
    check(result, DAMAGE, SIZES)
    assert result.memory <= memory
    assert result.gap < 0.01
    rules = by_rule(memory, TABLE, SIZES, result.plan.bits)
    assert rules
    for plan in rules:
        assert result.damage <= DAMAGE.of_plan(plan)
    if share < 0.7:
        assert min(map(DAMAGE.of_plan, rules)) > result.damage * 1.02


@pytest.mark.parametrize("seed", range(3))
def test_measured_damage_and_both_limits(seed: int) -> None:
    damage = random_damage(seed)
    free = budget_plan(damage, SIZES, memory=int(WHOLE * 0.6), frequency=CHOSEN)
    check(free, damage, SIZES)
    for frequency, share in ((None, 0.9), (CHOSEN, 0.8)):
        limit = int(free.bytes_per_token * share)
        result = budget_plan(
            damage,
            SIZES,
            memory=int(WHOLE * 0.6),
            bytes_per_token=limit,
            frequency=frequency,
        )
        check(result, damage, SIZES)
        assert result.memory <= WHOLE * 0.6
        assert SIZES.bytes_per_token(result.plan, frequency) <= limit
        assert result.damage >= free.bound
        assert result.gap < 0.1


def test_bytes_per_token_alone() -> None:
    whole = SIZES.bytes_per_token(ExpertPlan.identity(TEXT))
    result = budget_plan(DAMAGE, SIZES, bytes_per_token=int(0.8 * whole))
    check(result, DAMAGE, SIZES)
    assert SIZES.bytes_per_token(result.plan) <= 0.8 * whole
    assert result.gap < 0.05
    # A row of the router costs little: hardly an expert is dropped.
    assert sum(len(layer.order) for layer in result.plan.layers.values()) > 55


def test_full_size_within_memory() -> None:
    table, sizes = full_size()
    damage = Damage.of_criterion(table, "reap_sum", None, sizes)
    result = budget_plan(damage, sizes, memory=450 * GB)
    check(result, damage, sizes)
    assert 450 * GB - 20_000_000 < result.memory <= 450 * GB
    assert result.gap < 1e-4
    for plan in (
        uniform_plan(table, memory=450 * GB, sizes=sizes, bits=result.plan.bits),
        global_plan(table, memory=450 * GB, sizes=sizes, bits=all_classes(sizes, 8)),
        graded_plan(table, memory=450 * GB, sizes=sizes, bits=result.plan.bits),
    ):
        assert result.damage < damage.of_plan(plan)
    again = budget_plan(damage, sizes, memory=450 * GB)
    assert again.plan == result.plan
    assert again.bound == result.bound


def test_full_size_within_both() -> None:
    table, sizes = full_size()
    damage = Damage.of_criterion(table, "reap_sum", None, sizes)
    chosen = chosen_by_layer(table)
    result = budget_plan(
        damage, sizes, memory=450 * GB, bytes_per_token=52 * GB, frequency=chosen
    )
    check(result, damage, sizes)
    assert result.memory <= 450 * GB
    assert 51.9 * GB < sizes.bytes_per_token(result.plan, chosen) <= 52 * GB
    assert result.solver_gap < 1e-3
    assert result.gap < 0.01


def test_more_memory_never_loses_more() -> None:
    lost = [
        budget_plan(DAMAGE, SIZES, memory=int(WHOLE * share))
        for share in np.linspace(0.3, 1.0, 8)
    ]
    for less, more in itertools.pairwise(lost):
        assert more.bound <= less.bound * (1 + 1e-9)
        assert more.damage <= less.damage * (1 + less.gap + 1e-9)
    assert lost[-1].damage == 0
    assert lost[-1].plan.layers == ExpertPlan.identity(TEXT).layers


def test_nothing_keeps_to_the_limits() -> None:
    needs, reads = SIZES.plan_bytes(SMALLEST), SIZES.bytes_per_token(SMALLEST)
    least = rf"has {needs:,} bytes and reads {reads:,} a token"
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"memory": needs - 1}, "memory of"),
        ({"bytes_per_token": reads - 1}, "bytes per token of"),
        ({"memory": needs, "bytes_per_token": reads - 1}, "bytes per token of"),
        ({"memory": 9, "bytes_per_token": 9}, "memory of 9 bytes and bytes per token"),
    )
    for limits, says in cases:
        with pytest.raises(PlanError, match=rf"keeps to {says}.*{least}"):
            budget_plan(DAMAGE, SIZES, **limits)
    exactly = budget_plan(DAMAGE, SIZES, memory=needs, bytes_per_token=reads)
    assert exactly.memory == needs
    assert exactly.bytes_per_token == reads


@pytest.mark.parametrize("more", [0, 1_500, 30_000])
def test_just_above_the_least(more: int) -> None:
    needs = SIZES.plan_bytes(SMALLEST) + more
    reads = SIZES.bytes_per_token(SMALLEST) + more
    cases: list[dict[str, Any]] = [{"memory": needs}, {"bytes_per_token": reads}]
    for limits in cases:
        result = budget_plan(DAMAGE, SIZES, **limits)
        check(result, DAMAGE, SIZES)
        assert result.gap < 0.05
        assert (result.damage < DAMAGE.of_plan(SMALLEST) - 0.01) == (more > 0)


def test_widths_that_are_allowed_or_fixed() -> None:
    memory = int(WHOLE * 0.6)
    result = budget_plan(
        DAMAGE,
        SIZES,
        memory=memory,
        allowed_bits=(16, 8),
        fixed_bits={"lm_head": 6, "embed_tokens": 16},
    )
    check(result, DAMAGE, SIZES)
    assert result.plan.bits["lm_head"] == 6
    assert "embed_tokens" not in result.plan.bits
    others = {bits for name, bits in result.plan.bits.items() if name != "lm_head"}
    assert others <= {8}
    every = budget_plan(DAMAGE, SIZES, memory=memory, allowed_bits=(8,))
    assert every.plan.bits == all_classes(SIZES, 8)
    for options, says in (
        ({"allowed_bits": (7,)}, r"classes may have \[7\] bits"),
        ({"allowed_bits": ()}, r"classes may have \[\] bits"),
        ({"fixed_bits": {"head": 8}}, r"no class of matrices is called 'head'"),
        ({"fixed_bits": {"lm_head": 2}}, r"'lm_head': 2"),
        ({"least": 3}, r"at least 3 experts.*layer 1; wanted 4"),
        ({"least": 17}, r"at least 17 experts.*16"),
        ({"low_bits": 3}, r"bank of 3 bits is asked for, the damage is for 2"),
        ({"memory": None}, r"needs a limit"),
        ({"frequency": {1: np.ones(16)}}, r"frequencies of layer 2 are not given"),
    ):
        given: dict[str, Any] = {"memory": memory} | options
        with pytest.raises(PlanError, match=says):
            budget_plan(DAMAGE, SIZES, **given)


def test_every_layer_keeps_the_least() -> None:
    memory = int(SIZES.plan_bytes(SMALLEST) * 1.15)
    free = budget_plan(DAMAGE, SIZES, memory=memory)
    held = budget_plan(DAMAGE, SIZES, memory=memory, least=7)
    assert min(len(layer.order) for layer in free.plan.layers.values()) < 7
    assert min(len(layer.order) for layer in held.plan.layers.values()) == 7
    assert held.damage > free.damage


def test_experts_that_cost_nothing_go_first() -> None:
    drop = DAMAGE.drop.copy()
    drop[1, 3:12] = 0
    damage = replace(DAMAGE, drop=drop, low=drop / 3)
    result = budget_plan(damage, SIZES, memory=int(WHOLE * 0.8))
    assert not set(result.plan.order(2)) & set(range(3, 12))
    drop[1, 3:] = 0
    with pytest.raises(PlanError, match=r"layer 2: .*all but 3 experts"):
        budget_plan(replace(damage, drop=drop, low=drop / 3), SIZES, memory=WHOLE)


def test_a_low_width_that_is_larger_is_never_taken() -> None:
    damage = Damage.of_criterion(TABLE, "reap_sum", None, SIZES, low_bits=4)
    result = budget_plan(damage, SIZES, memory=int(WHOLE * 0.7))
    assert not any(layer.low for layer in result.plan.layers.values())


def test_router_groups_and_other_checkpoints() -> None:
    grouped = SourceSizes.of(wide_config(num_expert_group=2, topk_group=1))
    with pytest.raises(PlanError, match=r"layer 1 has 2 router groups.*Plan uniform"):
        budget_plan(DAMAGE, grouped, memory=WHOLE)
    other = SourceSizes.of(wide_config(num_experts=32))
    with pytest.raises(PlanError, match=r"4 layers of 32 experts"):
        budget_plan(DAMAGE, other, memory=WHOLE)


def test_a_poor_search_still_meets_the_plans_by_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = int(WHOLE * 0.55)
    good = budget_plan(DAMAGE, SIZES, memory=memory)

    def poor(problem: Any, **_: Any) -> Any:
        solution = module_solve(problem)
        assert solution is not None
        states, bits = solution.states.copy(), solution.picked
        states[:, 4:] = 0
        states[:, :4] = 1
        return replace(solution, states=states, picked=bits, bound=0.0)

    module_solve = module.solve
    monkeypatch.setattr(module, "solve", poor)
    result = budget_plan(DAMAGE, SIZES, memory=memory)
    check(result, DAMAGE, SIZES)
    assert result.damage > good.damage
    for plan in by_rule(memory, TABLE, SIZES, result.plan.bits):
        assert result.damage <= DAMAGE.of_plan(plan)
    given = budget_plan(DAMAGE, SIZES, memory=memory, candidates=[good.plan])
    assert given.damage == good.damage
    too_large = ExpertPlan.identity(TEXT)
    unmoved = budget_plan(DAMAGE, SIZES, memory=memory, candidates=[too_large])
    assert unmoved.damage == result.damage


def test_the_record_of_a_plan() -> None:
    result = budget_plan(DAMAGE, SIZES, memory=WHOLE // 2, bytes_per_token=10**7)
    about = result.plan.about
    assert about["kind"] == "budget"
    assert about["criterion"] == "reap_sum"
    assert about["measured"] is False
    assert about["saliency"] == TABLE.digest
    assert (about["memory"], about["bytes_per_token"]) == (WHOLE // 2, 10**7)
    assert about["damage"] == result.damage
    assert about["bound"] == result.bound
    assert result.plan.source == TABLE.source
