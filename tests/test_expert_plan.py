"""ExpertPlan: what it answers, what its file holds, and what no router can run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_k3 import WIDE_EXPERTS, t1_config

from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.errors import PlanError
from kimi_k3.planning.expert_plan import HIGH, ExpertPlan, LayerPlan


def plan_of(**changes: Any) -> ExpertPlan:
    """Two layers of 8 experts, top-2: one with two banks, one with a low bank only."""
    stated: dict[str, Any] = {
        "experts": 8,
        "top_k": 2,
        "layers": {5: LayerPlan((1, 4), (0, 7, 6)), 3: LayerPlan((), (2, 3))},
        "low_bits": 3,
        "bits": {"kda.o_proj": 8, "lm_head": 6},
        "source": {"fingerprint": "c0ffee"},
        "about": {"kind": "by hand"},
    }
    return ExpertPlan(**stated | changes)


def text_of(**text: Any) -> TextArgs:
    return ModelArgs.from_dict(t1_config(**text)).text_config


def test_what_a_plan_answers():
    plan = plan_of()
    assert list(plan.layers) == [3, 5]
    assert plan.order(5) == (1, 4, 0, 7, 6)
    assert plan.order(3) == (2, 3)
    assert plan.order(0) == ()
    assert [plan.split(layer) for layer in (0, 3, 5)] == [0, 0, 2]
    assert plan.expert_format(3) == plan.low_format == StoredFormat("affine", 3, 64)
    high_only = plan_of(layers={3: LayerPlan((0, 1))})
    assert high_only.expert_format(3) == HIGH == StoredFormat("mxfp4", 4, 32)
    assert high_only.split(3) == 0


def test_identity_keeps_every_expert_in_its_place():
    plan = ExpertPlan.identity(text_of())
    assert list(plan.layers) == [1, 2, 3, 4]
    assert all(plan.order(layer) == tuple(range(16)) for layer in plan.layers)
    assert not any(plan.split(layer) for layer in range(5))
    plan.check_fits(text_of())


# The file


def test_the_file_gives_the_same_plan(tmp_path: Path):
    plan = plan_of()
    path = plan.save(tmp_path / "plan.json")
    assert path == tmp_path / "plan.json"
    assert list(tmp_path.iterdir()) == [path]
    loaded = ExpertPlan.load(path)
    assert loaded == plan
    assert loaded.digest == plan.digest
    assert ExpertPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_digest_is_of_what_a_plan_does():
    plan = plan_of()
    assert plan_of(about={"kind": "else"}).digest == plan.digest
    others = [
        plan_of(layers={3: LayerPlan((), (2, 3)), 5: LayerPlan((4, 1), (0, 7, 6))}),
        plan_of(layers={3: LayerPlan((2, 3)), 5: LayerPlan((1, 4), (0, 7, 6))}),
        plan_of(low_bits=2),
        plan_of(bits={"kda.o_proj": 8}),
        plan_of(source={}),
        plan_of(top_k=1),
        plan_of(experts=9),
        plan_of(groups=1, bits={}),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("kind"), "does not hold a Kimi K3 expert plan"),
        (lambda c: c.update(kind="a saliency table"), "does not hold"),
        (lambda c: c.update(version=2), "format version 2; this version .* version 1"),
        (lambda c: c.pop("layers"), "no whole plan: KeyError: 'layers'"),
        (lambda c: c.pop("bits"), "no whole plan: KeyError: 'bits'"),
        (lambda c: c.update(layers=[1]), "no whole plan: AttributeError"),
        (lambda c: c.update(layers={"x": {}}), "'x' is no layer"),
        (lambda c: c["layers"]["3"].pop("low"), "no whole plan: KeyError: 'low'"),
        (lambda c: c["layers"]["3"].update(low=[2, 3.0]), "3.0 is no whole number"),
        (lambda c: c["layers"]["3"].update(low=[2, True]), "True is no whole number"),
        (lambda c: c["layers"]["3"].update(low=[2, 8]), "layer 3 keeps expert 8, but"),
        (lambda c: c.update(low_bits="2"), "'2' is no whole number"),
        (lambda c: c.update(experts=None), "None is no whole number"),
        (lambda c: c.update(version=True), "format version True; this version"),
        (lambda c: c.update(version=1.0), "format version 1.0; this version"),
        (lambda c: c.update(least=4), "it has the key 'least', which no plan has"),
        (lambda c: c["layers"]["3"].update(mid=[]), "layer 3 has the key 'mid'"),
        (lambda c: c["layers"].update({"03": c["layers"]["3"]}), "'03' is no layer"),
        (lambda c: c["layers"].update({"٣": c["layers"]["3"]}), "'٣' is no layer"),
        (lambda c: c["layers"].update({"-1": c["layers"]["3"]}), "'-1' is no layer"),
        (lambda c: c["layers"].update({"9" * 5000: {}}), "no whole plan: ValueError"),
        (lambda c: c["layers"].update({"3": [1]}), "layer 3 has the key 1"),
        (lambda c: c["layers"].update({"3": 1}), "no whole plan: TypeError"),
        (lambda c: c.update(source=[]), "no whole plan: AttributeError"),
        (lambda c: c.update(about=[]), "no whole plan: AttributeError"),
        (lambda c: c.update(groups=0), "groups is 0; wanted a count, 1 or more"),
        (lambda c: c.update(groups=-8), "groups is -8; wanted a count"),
        (lambda c: c.update(groups=3), "3 router groups do not divide 8 experts"),
        (lambda c: c.update(groups=10**30), "router groups do not divide 8 experts"),
        (lambda c: c.update(experts=0), "experts is 0; wanted a count"),
        (lambda c: c.update(top_k=0), "top_k is 0; wanted a count"),
        (
            lambda c: c.update(groups=10**30, experts=10**30),
            r"layer 3 keeps \[0, 0, .*, …\] experts of its 10+ router groups",
        ),
        (
            lambda c: c["about"].update(gaps=[{"a": float("nan")}]),
            "about.gaps.a is nan, which JSON cannot hold",
        ),
        (lambda c: c["source"].update(size=float("inf")), "source.size is inf"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: Any, message: str):
    content = plan_of().to_dict()
    change(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=message) as caught:
        ExpertPlan.load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", ["", "{", "[1", "\0", '{"kind": ' + "[" * 10**5])
def test_what_is_not_json(tmp_path: Path, content: str):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"plan.json is not JSON"):
        ExpertPlan.load(path)


def test_a_layer_that_the_file_names_twice(tmp_path: Path):
    text = json.dumps(plan_of().to_dict())
    (tmp_path / "plan.json").write_text(text.replace('"5": {', '"3": {'))
    with pytest.raises(PlanError, match="the key '3' is named twice"):
        ExpertPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("content", ["[]", "null", "3", '"plan"'])
def test_json_of_something_else(tmp_path: Path, content: str):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match="does not hold a Kimi K3 expert plan"):
        ExpertPlan.load(tmp_path / "plan.json")


def test_files_that_cannot_be(tmp_path: Path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        ExpertPlan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"cannot be written: No such file.*another"):
        plan_of().save(tmp_path / "absent" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written: Is a directory"):
        plan_of().save(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


# What no router can run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": {}}, "names no layer"),
        (
            {"layers": {1: LayerPlan((0, 8))}},
            "layer 1 keeps expert 8, but the source has the experts 0 to 7",
        ),
        ({"layers": {1: LayerPlan((-1, 2))}}, "layer 1 keeps expert -1, but"),
        ({"layers": {1: LayerPlan((0, 3, 3))}}, "layer 1 keeps expert 3 twice"),
        ({"layers": {1: LayerPlan((0, 3), (3,))}}, "layer 1 keeps expert 3 twice"),
        (
            {"layers": {1: LayerPlan((0, 1)), 2: LayerPlan((0,))}},
            "layer 2 keeps 1 experts but the router picks 2; keep at least as many",
        ),
        ({"layers": {2: LayerPlan(())}}, "layer 2 keeps 0 experts but"),
        ({"low_bits": 4.5}, "low bank has 4.5 bits; wanted one of 2, 3, 4"),
        ({"low_bits": 8}, "low bank has 8 bits"),
        ({"bits": {"lm_head": 7}}, "lm_head has 7 bits; wanted one of 16, 8, 6, 5, 4"),
        ({"bits": {"lm_head": 2}}, "lm_head has 2 bits"),
        (
            {"groups": 2, "layers": {1: LayerPlan((0, 1, 4))}},
            r"layer 1 keeps \[2, 1\] experts of its 2 router groups; wanted as many",
        ),
        (
            {"groups": 2, "layers": {1: LayerPlan((0, 1))}},
            r"layer 1 keeps \[2, 0\] experts",
        ),
        (
            {"groups": 2, "layers": {1: LayerPlan((0, 4, 1, 5))}},
            "layer 1 puts expert 1 behind expert 4 of a later router group",
        ),
        (
            {"groups": 2, "layers": {1: LayerPlan((0, 4), (1, 5))}},
            "layer 1 puts expert 1 behind expert 4",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        plan_of(**changes)


def test_equal_groups_in_order_are_fine():
    layers = {1: LayerPlan((1, 0, 7, 4)), 2: LayerPlan((0, 1), (4, 5))}
    assert plan_of(groups=2, layers=layers).groups == 2


# Whether it fits a checkpoint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 17}, "experts = 17, but this one has 16"),
        ({"top_k": 3}, "top_k = 3, but this one has 4"),
        ({"groups": 2}, "groups = 2, but this one has 1"),
    ],
)
def test_a_plan_for_another_model(changes: dict[str, Any], message: str):
    text = text_of()
    with pytest.raises(PlanError, match=message):
        replace(ExpertPlan.identity(text), **changes).check_fits(text)


def test_a_plan_with_other_layers():
    text = text_of()
    plan = ExpertPlan.identity(text)
    fewer = {n: each for n, each in plan.layers.items() if n != 3}
    with pytest.raises(PlanError, match="lacks layer 3; .* MoE layers are 1 to 4"):
        replace(plan, layers=fewer).check_fits(text)
    more = {**plan.layers, 0: LayerPlan((0, 1, 2, 3))}
    with pytest.raises(PlanError, match="names layer 0; .* MoE layers are 1 to 4"):
        replace(plan, layers=more).check_fits(text)


def test_a_low_bank_that_the_experts_are_too_narrow_for():
    """T1's experts have rows of 32, which groups of 64 do not divide."""
    layers = {n: LayerPlan(tuple(range(16))) for n in (1, 2, 3)}
    layers[4] = LayerPlan((1, 2, 3, 4), (9, 5))
    plan = replace(ExpertPlan.identity(text_of()), layers=layers)
    plan.check_fits(text_of(**WIDE_EXPERTS))
    with pytest.raises(PlanError, match=r"expert 9 of layer 4 in 2 bits.*32 and 32"):
        plan.check_fits(text_of())
