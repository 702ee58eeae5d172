"""What a plan is predicted to lose: shares, assumed and measured errors, exact sums."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from plans import random_plan, wide_config, wide_table
from saliency_tables import small_table, with_changed

from kimi_k3.build.saliency import CRITERIA
from kimi_k3.errors import PlanError
from kimi_k3.planning.damage import ASSUMED_ERRORS, Damage
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan
from kimi_k3.planning.matrix_classes import CLASS_BITS
from kimi_k3.planning.plan_sizes import SourceSizes

SIZES = SourceSizes.of(wide_config())
TEXT = SIZES.args.text_config


def damage_of(
    criterion: str = "reap_sum", low_bits: int = 2, **weights: float
) -> Damage:
    return Damage.of_criterion(
        wide_table(), criterion, weights or None, SIZES, low_bits
    )


@dataclass
class Measured:
    """What is read of a measured table."""

    drop: np.ndarray
    low: np.ndarray
    low_bits: tuple[int, ...] = (2, 3)
    layers: np.ndarray = field(default_factory=lambda: np.array([1, 2, 3, 4]))
    experts: np.ndarray = field(default_factory=lambda: np.full(4, 16))
    classes: tuple[str, ...] = ("lm_head", "mla.o_proj")
    bits: tuple[int, ...] = (16, 8)
    classes_damage: np.ndarray = field(
        default_factory=lambda: np.array([[0, 0.5], [0, 0.25]])
    )
    source: dict[str, Any] = field(default_factory=lambda: {"config": "c0ffee"})
    digest: str = "d1"


def measured(seed: int = 0) -> Measured:
    drop = np.random.default_rng(seed).uniform(size=(4, 16))
    return Measured(drop, np.stack([drop / 2, drop / 8]))


def by_hand(damage: Damage, plan: ExpertPlan) -> Fraction:
    total = Fraction(0)
    for at, layer in enumerate(damage.layers.tolist()):
        for expert in range(damage.experts):
            if expert in plan.layers[layer].low:
                total += Fraction(damage.low[at, expert])
            elif expert not in plan.layers[layer].high:
                total += Fraction(damage.drop[at, expert])
    return total + sum(Fraction(damage.classes[n][b]) for n, b in plan.bits.items())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_dropping_costs_the_share_of_the_layer(criterion: str) -> None:
    damage = damage_of(criterion, code=1, python=3)
    score = wide_table().score(criterion, {"code": 1, "python": 3})
    assert np.allclose(damage.drop.sum(axis=1), 1)
    assert np.allclose(damage.drop * score.sum(axis=1, keepdims=True), score)
    assert damage.criterion == criterion
    assert damage.origin["weights"] == {"code": 1, "python": 3}


@pytest.mark.parametrize("low_bits", [2, 3, 4])
def test_widths_cost_what_is_assumed(low_bits: int) -> None:
    damage = damage_of(low_bits=low_bits)
    assert np.allclose(damage.low, damage.drop * 3 * ASSUMED_ERRORS[low_bits])
    assert damage.classes.keys() == SIZES.classes.keys()
    for bits in CLASS_BITS:
        # Layers 0, 1, 2 and 4 are KDA, layer 3 is MLA.
        assert damage.classes["kda.o_proj"][bits] == 4 * ASSUMED_ERRORS[bits]
        assert damage.classes["lm_head"][bits] == ASSUMED_ERRORS[bits]
    assert not damage.measured


def test_a_width_that_changes_nothing_costs_nothing() -> None:
    sizes = SourceSizes.of(wide_config(q_lora_rank=24))
    damage = Damage.of_criterion(wide_table(), "gate", None, sizes)
    assert 8 not in sizes.classes["mla.q_b_proj"]
    assert damage.classes["mla.q_b_proj"] == dict.fromkeys(CLASS_BITS, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_costs_the_exact_sum(seed: int) -> None:
    plan = random_plan(SIZES, seed)
    damage = damage_of(low_bits=plan.low_bits)
    assert damage.of_plan(plan) == float(by_hand(damage, plan))
    turned = {n: replace(p, high=p.high[::-1]) for n, p in plan.layers.items()}
    assert damage.of_plan(replace(plan, layers=turned)) == damage.of_plan(plan)


def test_every_change_of_a_plan_shows() -> None:
    damage, plan = damage_of(), ExpertPlan.identity(TEXT)
    assert damage.of_plan(plan) == 0
    for other in (
        LayerPlan(tuple(range(15))),
        LayerPlan(tuple(range(15)), (15,)),
        LayerPlan((), tuple(range(16))),
    ):
        changed = replace(plan, layers={**plan.layers, 3: other})
        assert damage.of_plan(changed) == float(by_hand(damage, changed)) > 0
    assert damage.of_plan(replace(plan, bits={"lm_head": 4})) == ASSUMED_ERRORS[4]


def test_measured_damage_is_taken_as_it_is() -> None:
    table = measured()
    two, three = Damage.of_measured(table), Damage.of_measured(table, 3)
    assert (two.drop == table.drop).all()
    assert (two.low == table.low[0]).all()
    assert (three.low == table.low[1]).all()
    assert two.classes == {
        "lm_head": {16: 0, 8: 0.5},
        "mla.o_proj": {16: 0, 8: 0.25},
    }
    assert (two.measured, two.criterion, two.origin) == (
        True,
        "damage",
        {"damage_table": "d1"},
    )
    plan = replace(ExpertPlan.identity(TEXT), bits={"lm_head": 8, "mla.o_proj": 8})
    assert two.of_plan(plan) == 0.75


def test_widths_that_were_not_measured() -> None:
    damage = Damage.of_measured(measured())
    plan = ExpertPlan.identity(TEXT)
    with pytest.raises(PlanError, match=r"bank of 4 bits was not measured.*2, 3"):
        Damage.of_measured(measured(), 4)
    with pytest.raises(PlanError, match=r"no damage is known of lm_head at 6 bits"):
        damage.of_plan(replace(plan, bits={"lm_head": 6}))
    with pytest.raises(PlanError, match=r"no damage is known of kda.o_proj at 8 bits"):
        damage.of_plan(replace(plan, bits={"kda.o_proj": 8}))
    low = replace(
        plan, low_bits=3, layers={**plan.layers, 2: LayerPlan((), (*range(5),))}
    )
    with pytest.raises(PlanError, match=r"layer 2 has a low bank of 3 bits.*is for 2"):
        damage.of_plan(low)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (
            "drop",
            math.nan,
            r"layer 3, expert 5: drop is nan by damage, wanted a finite",
        ),
        ("drop", math.inf, r"layer 3, expert 5: drop is inf"),
        ("low", -1.0, r"layer 3, expert 5: low is -1.0 by damage, wanted 0 or more"),
        ("low", 9.0, r"layer 3, expert 5: low is 9.0 by damage, wanted no more than"),
    ],
)
def test_no_table_gives_this(where: str, value: float, says: str) -> None:
    table = measured()
    {"drop": table.drop, "low": table.low[0]}[where][2, 5] = value
    with pytest.raises(PlanError, match=says):
        Damage.of_measured(table)


def test_wrong_damage_of_classes() -> None:
    for row in ([0, -1.0], [0.1, 0.2], [0, math.nan]):
        table = measured()
        table.classes_damage = np.array([[0, 0.5], row])
        with pytest.raises(PlanError, match=r"mla.o_proj at \d+ bits has damage"):
            Damage.of_measured(table)


def test_a_layer_in_which_nothing_matters() -> None:
    table = measured()
    table.drop[1] = table.low[:, 1] = 0
    with pytest.raises(PlanError, match=r"layer 2: .*nothing tells which to keep"):
        Damage.of_measured(table)
    table.drop[1, :3] = 1
    damage = Damage.of_measured(table)
    with pytest.raises(PlanError, match=r"layer 2: .*all but 3 experts .*picks 4"):
        damage.check_alive(4)
    damage.check_alive(3)


def test_too_few_experts_were_chosen() -> None:
    table = wide_table()
    left = with_changed(table)
    for name in ("count", "gate_sum", "gate_square_sum", "reap_sum", "relative_sum"):
        array = getattr(left, name).copy()
        array[:, 1, 3:] = 0
        object.__setattr__(left, name, array)
    with pytest.raises(
        PlanError, match=r"layer 2: reap_sum is 0 for all but 3 experts"
    ):
        Damage.of_criterion(left, "reap_sum", None, SIZES)


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_score_that_is_none(value: float) -> None:
    table = with_changed(wide_table())
    array = table.reap_sum.copy()
    array[0, 2, 7] = value * 1e6
    object.__setattr__(table, "reap_sum", array)
    with pytest.raises(PlanError, match=r"layer 3, expert 7: reap_sum is"):
        Damage.of_criterion(table, "reap_sum", None, SIZES)


def test_saliency_of_another_checkpoint() -> None:
    for text, says in (
        ({"num_experts": 32}, r"experts 16, the config says 32"),
        ({"num_experts_per_token": 3}, r"top-k 4, the config says 3"),
        ({"first_k_dense_replace": 2}, r"MoE layers 1-4, the config says 2-4"),
    ):
        sizes = SourceSizes.of(wide_config(**text))
        with pytest.raises(PlanError, match=says):
            Damage.of_criterion(wide_table(), "reap_sum", None, sizes)
    pruned = small_table()
    with pytest.raises(PlanError, match=r"MoE layers|pruned already"):
        Damage.of_criterion(pruned, "reap_sum", None, SIZES)
    other = ExpertPlan.identity(
        SourceSizes.of(wide_config(num_experts=32)).args.text_config
    )
    with pytest.raises(PlanError, match=r"4 layers of 32 experts"):
        damage_of().of_plan(other)
