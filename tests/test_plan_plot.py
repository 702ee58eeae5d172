"""Pictures of a plan: what they show is the plan, and any of them can be drawn."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import random_plan, wide_config, wide_table

from kimi_k3.build.pictures import AMBER, BLUE
from kimi_k3.cli import main
from kimi_k3.errors import MissingPackageError, PlanError
from kimi_k3.planning.budget_problem import LARGE, OFF, SMALL
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.plan_plot import (
    build_parts,
    described,
    draw,
    sorted_fates,
    token_parts,
)
from kimi_k3.planning.plan_report import DamageFigures, PlanReport, plan_report
from kimi_k3.planning.plan_sizes import SourceSizes

PICTURES = {"allocation", "layers", "bytes"}


@pytest.fixture(scope="module")
def sizes() -> SourceSizes:
    return SourceSizes.of(wide_config())


@pytest.fixture(scope="module")
def plan(sizes: SourceSizes) -> ExpertPlan:
    return random_plan(sizes, 3, kind="budget", memory=10**6, criterion="gate")


@pytest.fixture(scope="module")
def report(plan: ExpertPlan, sizes: SourceSizes) -> PlanReport:
    return plan_report(plan, sizes, wide_table(), criterion="gate")


def pixels(file: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--out", "plan.json"]], ids=["dry run", "plan"]
)
def test_the_verb_draws_every_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wide_config()))
    wide_table(corpora=("code", "中文")).save(tmp_path)
    pictures = tmp_path / "new" / "pictures"
    options = [o if o != "plan.json" else str(tmp_path / o) for o in options]
    common = ["--source", str(tmp_path), "--plot", str(pictures)]
    asked = ["--kind", "graded", "--high", "3", "--low", "4"]
    assert main(["plan", str(tmp_path), *asked, *common, *options]) == 0
    drawn = [
        Path(line.removeprefix("drawn: "))
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("drawn: ")
    ]
    assert set(drawn) == set(pictures.iterdir())
    assert {file.stem for file in drawn} == PICTURES
    assert all(pixels(file) == (960, 800) for file in drawn)


def test_the_picture_is_the_plan(plan: ExpertPlan) -> None:
    score = wide_table().score("gate")
    fates = sorted_fates(plan, score)
    for row, layer in enumerate(plan.layers.values()):
        best = sorted(range(16), key=lambda e, row=row: (-score[row, e], e))
        wanted = [
            LARGE if e in layer.high else SMALL if e in layer.low else OFF for e in best
        ]
        assert fates[row].tolist() == wanted
    assert sorted_fates(plan, -score).tolist() != fates.tolist()


def test_the_bars_are_the_plan(
    plan: ExpertPlan, report: PlanReport, tmp_path: Path, monkeypatch: Any
) -> None:
    """What is handed to matplotlib: counts and saliency of each layer, bytes of parts."""
    from matplotlib.axes import Axes

    upright, lying = [], []
    bar, barh = Axes.bar, Axes.barh

    def record_bar(axes: Axes, x: Any, height: Any, **settings: Any) -> Any:
        if settings.get("orientation") != "horizontal":
            upright.append((settings["color"], np.array(height).tolist()))
        return bar(axes, x, height, **settings)

    def record_barh(axes: Axes, y: Any, width: Any, **settings: Any) -> Any:
        lying.append(width)
        return barh(axes, y, width, **settings)

    monkeypatch.setattr(Axes, "bar", record_bar)
    monkeypatch.setattr(Axes, "barh", record_barh)
    draw(plan, report, wide_table(), tmp_path)
    layers = list(plan.layers.values())
    assert upright[0] == (BLUE, [len(layer.high) for layer in layers])
    assert upright[1] == (AMBER, [len(layer.low) for layer in layers])
    assert upright[2][1] == [100 * each.saliency_high for each in report.layers]
    assert upright[3][1] == [100 * each.saliency_low for each in report.layers]
    build, token = build_parts(report), token_parts(report)
    rows = [*token, "vision"]
    assert lying[0] == [build.get(name, 0) / 1e6 for name in rows]
    assert lying[1] == report.sizes.low.nbytes / 1e6
    assert lying[2] == [token.get(name, 0) / 1e6 for name in rows]
    assert lying[3] == report.token.low / 1e6


def test_parts_add_up(plan: ExpertPlan, report: PlanReport, sizes: SourceSizes) -> None:
    build, token = build_parts(report), token_parts(report)
    assert sum(build.values()) == report.sizes.total
    assert sum(token.values()) == report.token.total
    assert set(token) == {*build, "routers"} - {"vision"}
    assert token["routed experts"] == report.token.routed
    kept = sum(len(layer.order) for layer in plan.layers.values())
    row = (
        report.sizes.classes["embed_tokens"].nbytes / sizes.args.text_config.vocab_size
    )
    assert token["routers"] == pytest.approx(kept * sizes.router_bytes + row, abs=1)
    assert token["KDA"] == build["KDA"]
    assert token["embedding, head"] == report.sizes.classes["lm_head"].nbytes


def test_what_chose_the_experts_sorts_them(
    plan: ExpertPlan, report: PlanReport, tmp_path: Path, monkeypatch: Any
) -> None:
    from matplotlib.axes import Axes

    shown: list[Any] = []
    named = Axes.set_xlabel
    monkeypatch.setattr(Axes, "imshow", lambda axes, fates, **_: shown.append(fates))
    monkeypatch.setattr(
        Axes, "set_xlabel", lambda axes, text: (shown.append(text), named(axes, text))
    )
    score = wide_table().score("gate", report.weights)
    draw(plan, report, wide_table(), tmp_path)
    assert np.array_equal(shown[0], sorted_fates(plan, score))
    assert shown[1] == "experts, most salient first (gate)"
    shown.clear()
    draw(plan, report, wide_table(), tmp_path, drop=-score)
    assert np.array_equal(shown[0], sorted_fates(plan, -score))
    assert shown[1] == "experts, costliest to drop first"


def test_titles_say_which_plan(report: PlanReport) -> None:
    size = f"{report.sizes.total / 1e6:,.1f} MB of 1.0 MB"
    assert described(report) == (f"budget, {size}, by gate\ncode 67%, python 33%")


def test_titles_of_long_names(plan: ExpertPlan, sizes: SourceSizes) -> None:
    table = wide_table(corpora=("$x" * 30, "y" * 60))
    report = plan_report(plan, sizes, table, criterion="gate")
    _, second = described(report).splitlines()
    assert r"\$x" in second
    assert len(second) <= 54


def test_titles_of_other_sources(plan: ExpertPlan, sizes: SourceSizes) -> None:
    report = plan_report(plan, sizes, wide_table(), assumed="made up")
    assert described(report).endswith("\nsaliency is assumed: nothing was calibrated")
    damage = DamageFigures(1, measured=True, criterion="damage")
    measured = described(replace(report, assumed="", damage=damage))
    assert "by measured damage\ncode" in measured


def test_one_bank_has_no_other_colour(sizes: SourceSizes, tmp_path: Path) -> None:
    identity = ExpertPlan.identity(sizes.args.text_config)
    report = plan_report(identity, sizes, wide_table())
    assert {f.stem for f in draw(identity, report, wide_table(), tmp_path)} == PICTURES


def test_without_matplotlib_or_folder(
    plan: ExpertPlan, report: PlanReport, tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(PlanError, match="file cannot be made a folder: File exists"):
        draw(plan, report, wide_table(), file)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"install 'kimi-k3-mlx\[plot\]'"):
        draw(plan, report, wide_table(), tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize("options", [["--dry-run"], ["--out", "plan.json"]])
def test_without_matplotlib_nothing_is_planned(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide_table().save(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Planning would find that there is no such source.
    asked = ["--memory", "1", "--source", "nowhere", "--plot", "pictures", *options]
    assert main(["plan", str(tmp_path), *asked]) == 2
    assert "drawing needs matplotlib" in capsys.readouterr().err
