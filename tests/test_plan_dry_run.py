"""``kimi-k3 plan --dry-run``: a plan and its conversion in figures, without weights."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from plans import wide_config, wide_table

from kimi_k3.build.retention import kept_uniformly
from kimi_k3.cli import build_parser, main
from kimi_k3.config import ModelArgs
from kimi_k3.conversion.conversion_cost import DISK_SPEEDS, conversion_cost
from kimi_k3.planning.assumed_saliency import ASSUMED, HELD, TOP, assumed_table
from kimi_k3.verbs.plan_dry_run import DryRun, rehearse

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"

#: A size that fits each kind at T1's size.
KINDS: dict[str, list[str]] = {
    "uniform": ["--keep", "6"],
    "global": ["--keep", "6.5"],
    "graded": ["--high", "3", "--low", "4"],
    "budget": ["--memory", "0.0009"],
}


def rehearsed(*options: str) -> DryRun:
    return rehearse(build_parser().parse_args(["plan", "--dry-run", *options]))


@pytest.fixture(scope="module")
def release() -> DryRun:
    """The command of the page, about the released model."""
    start = time.process_time()
    options = ("--kind", "graded", "--high", "121", "--low", "205", "--bits", "8")
    found = rehearsed(*options)
    assert time.process_time() - start < 30  # of the processor; about 4 s
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(wide_config()))
    return tmp_path


# The assumed curve


@pytest.mark.parametrize(("experts", "top_k"), [(896, 16), (32, 4), (16, 4)])
def test_the_curve_is_the_published_one(experts: int, top_k: int) -> None:
    config = wide_config(num_experts=experts, num_experts_per_token=top_k)
    table = assumed_table(ModelArgs.from_dict(config).text_config)
    for criterion in ("reap_sum", "relative", "frequency", "gate"):
        score = table.score(criterion)
        assert (np.diff(score[0]) <= 0).all()
        assert (score == score[0]).all()
        (held,) = kept_uniformly(score, table.experts, np.array([TOP]))
        assert held == pytest.approx(HELD, abs=0.005 if experts > 100 else 0.03)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (5, 4), (16, 15), (2, 1)])
def test_experts_that_are_chosen_nearly_always(experts: int, top_k: int) -> None:
    """No token chooses one twice, so their shares have a limit."""
    config = wide_config(num_experts=experts, num_experts_per_token=top_k)
    table = assumed_table(ModelArgs.from_dict(config).text_config)
    assert table.count.max() <= table.tokens[0]
    assert (table.count.sum(axis=2) == table.tokens[0] * top_k).all()


# The command


def test_the_release(release: DryRun) -> None:
    report, cost = release.result.report, release.cost
    assert report.assumed == ASSUMED
    assert report.sizes.total == 451_031_139_872
    assert report.weighted.kept == pytest.approx(0.677, abs=0.01)
    assert cost.shards == 95
    assert 0 < cost.written - report.sizes.total < 2e6  # headers
    assert len(cost.estimates) == len(DISK_SPEEDS)
    text = release.text()
    assert "ASSUMED    no calibration: in every layer alike" in text
    assert text.endswith(cost.text())


def test_the_page_shows_what_the_command_prints(release: DryRun) -> None:
    """But for the conversion. If not: run the command, copy again."""
    page = PAGE.read_text(encoding="utf-8")
    shown = page.split("<!-- dry run -->\n```\n")[1].split("```\n")[0]
    assert shown == release.result.report.text() + "\n"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(
    source: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    options = ["--kind", kind, *KINDS[kind], "--source", str(source)]
    before = set(source.iterdir())
    assert main(["plan", "--dry-run", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{kind} plan for 64 experts in 4 layers")
    assert "converting by it" in out
    assert main(["plan", "--dry-run", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["kind"] == kind
    found = rehearsed(*options)
    cost = conversion_cost(wide_config(), found.result.plan)
    assert document["conversion"] == json.loads(json.dumps(cost.to_dict()))
    assert set(source.iterdir()) == before


def test_a_calibration_is_used_if_there_is_one(source: Path) -> None:
    wide_table().save(source)
    options = ("--kind", "uniform", "--keep", "6", "--source", str(source))
    real = rehearsed(str(source), *options, "--weight", "code=1")
    assert real.result.report.assumed == ""
    assert set(real.result.report.retained) == {"code", "python"}
    assert real.result.plan.layers != rehearsed(*options).result.plan.layers


def test_the_disk_speed_is_that_asked_for(source: Path) -> None:
    options = ("--kind", "uniform", "--keep", "6", "--source", str(source))
    found = rehearsed(*options, "--disk-speed", "2.5")
    assert [each.disk for each in found.cost.estimates] == [2.5e9]


def test_no_plan_is_written(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source / "plan.json"
    options = ["--kind", "uniform", "--keep", "6", "--source", str(source)]
    assert main(["plan", "--dry-run", *options, "--out", str(out)]) == 0
    assert capsys.readouterr().err == (
        f"--dry-run writes no plan: {out} is left as it is\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "450", "--disk-speed", "0"], "--disk-speed is 0; wanted more"),
        (["--memory", "450", "--criterion", "damage"], "there is no measured damage"),
        (["--memory", "450", "--weight", "code=1"], "there are no corpora to weigh"),
        (["--kind", "uniform"], "give --keep or --memory."),
        (["--memory", "20"], "nothing keeps to memory of 20,000,000,000 bytes"),
        (["--kind", "uniform", "--keep", "12"], "the router picks 16"),
        (["--memory", "450", "--source", "/nowhere"], "/nowhere holds no config.json"),
    ],
)
def test_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--dry-run", *options]) == 2
    assert message in capsys.readouterr().err
