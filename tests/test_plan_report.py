"""The figures of a plan's report, against loops, and its words."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import random_plan, wide_config, wide_table
from saliency_tables import big_table

from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.conversion.build_layout import build_layout
from kimi_k3.errors import PlanError, SaliencyError
from kimi_k3.machine.macs import MACS
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import HIGH, ExpertPlan, LayerPlan
from kimi_k3.planning.fixed_plans import all_classes, graded_plan
from kimi_k3.planning.plan_report import LayerFigures, PlanReport, plan_report
from kimi_k3.planning.plan_sizes import SourceSizes
from kimi_k3.planning.plan_text import BAR, DOT, FULL, SHADED, bar

WEIGHTS = {"code": 3, "python": 1}


@pytest.fixture(scope="module")
def sizes() -> SourceSizes:
    return SourceSizes.of(wide_config())


@pytest.fixture(scope="module")
def table() -> SaliencyTable:
    return wide_table()


@pytest.fixture(scope="module")
def plan(sizes: SourceSizes) -> ExpertPlan:
    return random_plan(sizes, 3, kind="random", memory=10**9)


@pytest.fixture(scope="module")
def report(plan: ExpertPlan, sizes: SourceSizes, table: SaliencyTable) -> PlanReport:
    damage = Damage.of_criterion(table, "relative", WEIGHTS, sizes, plan.low_bits)
    return plan_report(
        plan,
        sizes,
        table,
        criterion="relative",
        weights=WEIGHTS,
        damage=damage,
        bound=0.5 * damage.of_plan(plan),
        by_rule={"uniform": 4.0, "graded": 3.5},
    )


@pytest.fixture(scope="module")
def published() -> PlanReport:
    """121 + 205 of 896 experts, everything else in 8 bits."""
    sizes, table = SourceSizes.of(full_size_config()), big_table()
    plan = graded_plan(table, high=121, low=205, bits=all_classes(sizes, 8))
    return plan_report(plan, sizes, table)


# Figures


def test_experts_of_each_layer(plan: ExpertPlan, report: PlanReport) -> None:
    for (layer, each), found in zip(plan.layers.items(), report.layers, strict=True):
        assert (found.layer, found.high, found.low) == (
            layer,
            len(each.high),
            len(each.low),
        )
        assert found.high + found.low + found.dropped == 16


def retained(
    plan: ExpertPlan, table: SaliencyTable, weights: dict[str, float]
) -> dict[str, Any]:
    """By a loop over layers, banks and experts."""
    score = table.score("relative", weights)
    shares: dict[str, list[float]] = {"high": [], "low": []}
    for row, layer in enumerate(table.layers.tolist()):
        total = sum(score[row].tolist())
        for bank, held in shares.items():
            kept = getattr(plan.layers[layer], bank)
            held.append(sum(score[row, expert] for expert in kept) / total)
    both = np.add(shares["high"], shares["low"]).tolist()
    return {
        "high": np.mean(shares["high"]),
        "low": np.mean(shares["low"]),
        "least": min(both),
        "least_layer": table.layers[both.index(min(both))],
        "by_layer": shares,
    }


def test_saliency_kept_is_that_of_a_loop(
    plan: ExpertPlan, table: SaliencyTable, report: PlanReport
) -> None:
    weighted = retained(plan, table, {"code": 0.75, "python": 0.25})
    for bank in ("high", "low"):
        of_layers = [getattr(each, f"saliency_{bank}") for each in report.layers]
        assert of_layers == pytest.approx(weighted["by_layer"][bank])
    wanted = {name: retained(plan, table, {name: 1}) for name in table.corpora}
    for name, found in {**report.retained, "": report.weighted}.items():
        mine = wanted.get(name, weighted)
        for figure in ("high", "low", "least", "least_layer"):
            assert getattr(found, figure) == pytest.approx(mine[figure])
        assert found.kept == pytest.approx(mine["high"] + mine["low"])
    assert report.retained["code"].kept != pytest.approx(report.retained["python"].kept)


def test_a_swapped_expert_is_seen(
    plan: ExpertPlan, sizes: SourceSizes, table: SaliencyTable, report: PlanReport
) -> None:
    """The broken twin: another expert in one bank changes what is kept."""
    layer = next(n for n, each in plan.layers.items() if each.high)
    order = plan.layers[layer].high
    other = next(e for e in range(16) if e not in plan.order(layer))
    changed = LayerPlan((other, *order[1:]), plan.layers[layer].low)
    swapped = replace(plan, layers={**plan.layers, layer: changed})
    found = plan_report(swapped, sizes, table, criterion="relative", weights=WEIGHTS)
    assert found.weighted.high != pytest.approx(report.weighted.high)
    assert found.sizes.total == report.sizes.total


def test_a_corpus_that_leaves_a_layer_cold_loses_nothing_there(
    plan: ExpertPlan, sizes: SourceSizes, table: SaliencyTable
) -> None:
    """No table can be so by its sums, but an average may come out as 0."""
    report = plan_report(plan, sizes, _Cold(table))  # type: ignore[arg-type]
    assert report.layers[1].saliency_high == 1
    assert report.layers[1].saliency_low == 0
    assert np.isfinite(report.weighted.kept)


class _Cold:
    """A table whose second layer has no score."""

    def __init__(self, table: SaliencyTable) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def score(self, *arguments: Any) -> np.ndarray:
        score = self.table.score(*arguments).copy()
        score[1] = 0
        return score


def test_sizes_are_those_of_the_build(
    plan: ExpertPlan, sizes: SourceSizes, report: PlanReport
) -> None:
    found = report.sizes
    layout = build_layout(wide_config(), plan)
    assert found.total == layout.nbytes
    assert found.source == sizes.plan_bytes(ExpertPlan.identity(sizes.args.text_config))
    assert found.vision == layout.shards[-1].nbytes
    assert found.high.bytes_each == sizes.expert_bytes(HIGH)
    parts = found.high.nbytes + found.low.nbytes + found.rest + found.vision
    parts += sum(each.nbytes for each in found.classes.values())
    assert parts == found.total
    of_class = sum(
        tensor.nbytes
        for shard in layout.shards
        for tensor in shard.tensors
        if ".shared_experts.up_proj." in tensor.name
    )
    assert found.classes["shared_experts.up_proj"].nbytes == of_class
    bits = {name: each.bits for name, each in found.classes.items()}
    assert bits == plan.bits


def test_a_token_reads_what_the_sizes_say(
    plan: ExpertPlan, sizes: SourceSizes, table: SaliencyTable, report: PlanReport
) -> None:
    chosen = table.score("frequency", {"code": 0.75, "python": 0.25})
    frequency = dict(zip(table.layers.tolist(), chosen, strict=True))
    assert report.token.total == sizes.bytes_per_token(plan, frequency)
    assert report.token.total != sizes.bytes_per_token(plan)
    high, low = sizes.routed_bytes_per_token(plan, frequency)
    assert (report.token.high, report.token.low) == (round(high), round(low))


def test_damage_bound_and_gap(report: PlanReport) -> None:
    assert report.damage is not None
    assert report.damage.damage > 0
    assert report.damage.bound == pytest.approx(report.damage.damage / 2)
    assert report.damage.gap == pytest.approx(0.5)
    assert (report.damage.measured, report.damage.criterion) == (False, "relative")


def test_the_document_is_plain_and_adds_up(report: PlanReport) -> None:
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["kind"] == "random"
    for sum_ in document["arithmetic"].values():
        left, right = sum_.split(" = ")
        total = 0
        for term in re.sub(r"\(.*?\)", "", left).split(" + "):
            total += np.prod([int(factor) for factor in term.split("×")])
        assert total == int(right.removesuffix(" bytes"))
    assert document["token"]["total"] == report.token.total
    assert document["sizes"]["high"]["nbytes"] == report.sizes.high.nbytes
    assert document["weighted"]["kept"] == report.weighted.kept
    assert [each["name"] for each in document["machines"]] == [m.label for m in MACS]


def test_a_plan_for_something_else(sizes: SourceSizes, table: SaliencyTable) -> None:
    plan = ExpertPlan(8, 4, {n: LayerPlan((0, 1, 2, 3)) for n in (1, 2, 3, 4)})
    with pytest.raises(PlanError, match="experts = 8, but this one has 16"):
        plan_report(plan, sizes, table)
    identity = ExpertPlan.identity(sizes.args.text_config)
    with pytest.raises(SaliencyError, match="no corpus german"):
        plan_report(identity, sizes, table, weights={"german": 1})


def test_identity_keeps_everything(sizes: SourceSizes, table: SaliencyTable) -> None:
    plan = ExpertPlan.identity(sizes.args.text_config)
    report = plan_report(plan, sizes, table)
    assert report.weighted.kept == pytest.approx(1)
    assert report.sizes.total == report.sizes.source
    text = report.text()
    assert "experts kept    64 of 64 (100.0%): 64 mxfp4\n" in text
    assert "damage" not in text
    assert "tokens/s are not predicted: memory does not bound a build this" in text
    assert "100.0% of the checkpoint" in text


# Words


def test_the_published_build(published: PlanReport) -> None:
    """451 GB; what is read of it is told in docs/planning.md."""
    text = published.text()
    for part in (
        "graded plan for 82,432 experts in 92 layers, of which the router picks 16\n",
        "  11,132 experts × 17,561,604        mxfp4     195,495,775,728    195.50 GB\n",
        "build                                          451,031,139,872    451.03 GB\n",
        "experts kept    29,992 of 82,432 (36.4%): 11,132 mxfp4 + 18,860 in 2 bits\n",
        "a layer keeps   326; mxfp4 121\n",
        "M3 Ultra, 256 GB            257.7 GB  193.3 GB short\n",
        "M3 Ultra, 512 GB            515.4 GB  64.4 GB left ",
        "58% of it, as published for 242 of 896 experts on an M3 Ultra (5.51",
    ):
        assert part in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.endswith("·" * 19) for line in lines) == len(layer_lines(published))
    assert not any(line.endswith(" ") for line in lines)


def test_the_words_of_a_mixed_plan(report: PlanReport) -> None:
    text = report.text()
    assert report.damage is not None
    for part in (
        "random plan for 64 experts in 4 layers, of which the router picks 4\n",
        "corpora    code 75.0%, python 25.0%\n",
        "limits     memory 1,000,000,000 bytes\n",
        "as weighted  ",
        f"damage          {report.damage.damage:.4g}, from relative and the usual",
        "(gap 50.00%)\n                best rule at these widths: graded, 3.5\n",
        "vision, as it is",
        f"{report.sizes.total:,} bytes, ",
        " on average; mxfp4 ",
    ):
        assert part in text


def layer_lines(report: PlanReport) -> list[str]:
    """Number and counts of the table of layers."""
    table = report.text().split("\n\n")[1].splitlines()[1:]
    return [" ".join(line.split()[:4]) for line in table]


def test_equal_layers_are_one_line(report: PlanReport) -> None:
    def of(*numbers_and_high: tuple[int, int]) -> PlanReport:
        layers = [LayerFigures(n, h, 4, 12 - h, 0.5, 0.1) for n, h in numbers_and_high]
        return replace(report, layers=tuple(layers))

    alike = of((1, 3), (2, 3), (3, 5), (4, 3), (5, 3), (7, 3))
    assert layer_lines(alike) == [
        "1-2 3 4 9",
        "3 5 4 7",
        "4-5 3 4 9",
        "7 3 4 9",
    ]
    first, *others = alike.layers
    unlike = replace(alike, layers=(replace(first, saliency_low=0.2), *others))
    assert layer_lines(unlike)[:2] == ["1 3 4 9", "2 3 4 9"]


def test_assumed_errors_are_called_so(report: PlanReport) -> None:
    words = "class widths by assumed errors: `kimi-k3 damage` measures them\n"
    about = {**report.about, "kind": "budget"}
    assert words in replace(report, about=about).text()
    assert words not in report.text()  # no budget: nothing was chosen by them
    assert report.damage is not None
    for known in ({"measured": True}, {"nats": True}):
        damage = replace(report.damage, **known)
        assert words not in replace(report, about=about, damage=damage).text()


def test_assumed_saliency_is_called_so(
    plan: ExpertPlan, sizes: SourceSizes, table: SaliencyTable
) -> None:
    words = "nothing was calibrated, " * 5
    text = plan_report(plan, sizes, table, assumed=words).text()
    assert "ASSUMED    nothing was calibrated, nothing" in text
    assert "corpora" not in text.split("\n\n")[0]
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 80


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [
        ((896, 0, 0), FULL * 32),
        ((0, 896, 0), SHADED * 32),
        ((224, 224, 448), FULL * 8 + SHADED * 8 + DOT * 16),
        ((1, 0, 895), FULL + DOT * 31),
        ((1, 1, 894), FULL + SHADED + DOT * 30),
        ((894, 1, 1), FULL * 30 + SHADED + DOT),
        ((2, 0, 2), FULL * 16 + DOT * 16),
    ],
)
def test_bars(counts: tuple[int, int, int], drawn: str) -> None:
    assert bar(LayerFigures(1, *counts, 0, 0)) == drawn


def test_every_bar_has_its_width() -> None:
    rng = np.random.default_rng(0)
    for high, low, dropped in rng.multinomial(896, [0.1, 0.3, 0.6], 200).tolist():
        assert len(bar(LayerFigures(1, high, low, dropped, 0, 0))) == BAR
