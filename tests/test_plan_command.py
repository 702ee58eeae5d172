"""``kimi_k3.plan`` and ``kimi-k3 plan``: what they make, say, refuse and leave alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import wide_config, wide_table
from saliency_tables import big_table

import kimi_k3
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.saliency_checks import STATISTICS
from kimi_k3.cli import main
from kimi_k3.errors import ConfigError, PlanError
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.expert_plan import LOW_BITS, ExpertPlan
from kimi_k3.planning.matrix_classes import CLASS_BITS
from kimi_k3.planning.plan_request import PlanRequest
from kimi_k3.planning.plan_sizes import SourceSizes

#: A size that fits each kind: the whole checkpoint has 1.3 MB.
KINDS: dict[str, list[Any]] = {
    "uniform": ["--keep", 6, "--bits", 8],
    "global": ["--keep", 6.5, "--least", 5],
    "graded": ["--high", 3, "--low", 4, "--low-bits", 3],
    "budget": ["--memory", 0.0009],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A calibration, and beside it the config of what was calibrated."""
    folder = tmp_path / "calibration"
    folder.mkdir()
    wide_table().save(folder)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(wide_config()))
    return folder


@pytest.fixture
def sizes() -> SourceSizes:
    return SourceSizes.of(wide_config())


class Command:
    """``kimi-k3 plan`` on the fixture's calibration."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.out = folder.parent / "plan.json"
        self.source = folder.parent / "source"

    def __call__(self, *options: Any, source: bool = True) -> tuple[object, str, str]:
        arguments = [self.folder, "--out", self.out, *options]
        if source:
            arguments += ["--source", self.source]
        code = main(["plan", *map(str, arguments)])
        out, err = self.capsys.readouterr()
        return code, out, err

    def refused(self, *options: Any, source: bool = True) -> str:
        """The one line of an error, after which no file is there."""
        code, out, err = self(*options, source=source)
        assert (code, out) == (2, "")
        assert not self.out.exists()
        (line,) = err.splitlines()
        return line.removeprefix("error: ")


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(folder, capsys)


# What it makes


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(command: Command, sizes: SourceSizes, kind: str) -> None:
    code, out, err = command("--kind", kind, *KINDS[kind])
    assert (code, err) == (0, f"written: {command.out}\n")
    plan = ExpertPlan.load(command.out)
    plan.check_fits(sizes.args.text_config)
    assert plan.about["kind"] == kind
    assert plan.source == wide_table().source
    assert out.startswith(f"{kind} plan for 64 experts in 4 layers")
    assert f"size            {sizes.plan_bytes(plan):,} bytes" in out


def test_the_numbers_asked_for(command: Command, sizes: SourceSizes) -> None:
    def planned(*options: Any) -> ExpertPlan:
        assert command(*options, "--force")[0] == 0
        return ExpertPlan.load(command.out)

    uniform = planned("--kind", "uniform", "--keep", 6, "--bits", 8)
    assert {len(each.high) for each in uniform.layers.values()} == {6}
    assert set(uniform.bits) == {n for n, b in sizes.classes.items() if 8 in b}
    assert set(uniform.bits.values()) == {8}
    mean = planned("--kind", "global", "--keep", 6.5, "--least", 5)
    counts = [len(each.high) for each in mean.layers.values()]
    assert (sum(counts), min(counts) >= 5) == (26, True)
    graded = planned("--kind", "graded", "--high", 3, "--low", 4, "--low-bits", 3)
    assert graded.low_bits == 3
    assert {(len(e.high), len(e.low)) for e in graded.layers.values()} == {(3, 4)}
    budget = planned(
        *("--memory", 0.0009, "--per-token", 0.0005, "--least", 5, "--low-bits", 4),
        *("--bits", "lm_head=6", "--allow-bits", 8, 4),
    )
    assert sizes.plan_bytes(budget) <= 900_000
    assert budget.about["bytes_per_token"] == 500_000
    assert {len(e.order) >= 5 for e in budget.layers.values()} == {True}
    assert budget.low_bits == 4
    assert budget.bits["lm_head"] == 6
    free = {b for name, b in budget.bits.items() if name != "lm_head"}
    assert free <= {8, 4}


def test_widths_for_all_and_for_one(command: Command, sizes: SourceSizes) -> None:
    options = ("--bits", 8, "--bits", "kda.o_proj=16", "--bits", "lm_head=4")
    assert command("--kind", "uniform", "--keep", 6, *options)[0] == 0
    bits = ExpertPlan.load(command.out).bits
    assert (bits["lm_head"], bits["kda.o_proj"]) == (4, 16)
    assert all(b == 8 for n, b in bits.items() if n not in ("lm_head", "kda.o_proj"))


def test_memory_is_filled(command: Command, sizes: SourceSizes) -> None:
    code, _, _ = command("--kind", "uniform", "--memory", 0.0009, "--bits", 8)
    assert code == 0
    plan = ExpertPlan.load(command.out)
    room = 900_000 - sizes.plan_bytes(plan)
    assert 0 <= room < 4 * sizes.expert_bytes(plan.expert_format(1))


def test_weights_change_the_plan(command: Command) -> None:
    options = ("--kind", "uniform", "--keep", 6)
    command(*options, "--weight", "code=1")
    code = ExpertPlan.load(command.out)
    command(*options, "--weight", "python=1", "--force")
    assert ExpertPlan.load(command.out).layers != code.layers
    assert code.about["weights"] == {"code": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_does_what_the_verb_does(command: Command, kind: str) -> None:
    asked: dict[str, dict[str, Any]] = {
        "uniform": {"keep": 6, "bits": 8},
        "global": {"keep": 6.5, "least": 5},
        "graded": {"high": 3, "low": 4, "low_bits": 3},
        "budget": {"memory": 900_000},
    }
    _, out, _ = command("--kind", kind, *KINDS[kind], "--json")
    result = kimi_k3.plan(command.folder, wide_config(), kind, **asked[kind])
    assert result.plan.digest == ExpertPlan.load(command.out).digest
    assert json.loads(out) == json.loads(json.dumps(result.report.to_dict()))
    again = kimi_k3.plan(wide_table(), command.source, kind, **asked[kind])
    assert again.plan.digest == result.plan.digest
    file = command.source / "config.json"
    third = kimi_k3.plan(command.folder / "saliency.npz", file, kind, **asked[kind])
    assert third.plan.digest == result.plan.digest


def test_the_release_is_planned_without_its_folder() -> None:
    """At full size, in seconds: 92 layers of 896 experts."""
    result = kimi_k3.plan(big_table(), kind="graded", high=121, low=205, bits=8)
    assert result.report.sizes.total == 451_031_139_872
    assert set(map(len, (e.order for e in result.plan.layers.values()))) == {326}


# Measured damage


def measured(table: SaliencyTable, **changes: Any) -> DamageTable:
    """Damage that ranks the experts of each layer by number, the last first."""
    layers, experts = len(table.layers), int(table.experts.max())
    drop = np.tile(np.arange(1.0, experts + 1), (layers, 1))
    drop /= drop.sum(axis=1, keepdims=True)
    classes = tuple(SourceSizes.of(wide_config()).classes)
    of_class = np.tile(
        [0, *(0.01 * 4.0**-b for b in CLASS_BITS[1:])], (len(classes), 1)
    )
    stated: dict[str, Any] = {
        "source": table.source,
        "layers": table.layers,
        "experts": table.experts,
        "low_bits": LOW_BITS,
        "drop": drop,
        "low": np.stack([drop / 4**bits for bits in LOW_BITS]),
        "classes": classes,
        "bits": CLASS_BITS,
        "classes_damage": of_class,
        "sampled_experts": np.zeros((layers, 1), np.int64),
        "settings": {},
    }
    return DamageTable(**stated | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_measured_damage_chooses(command: Command, kind: str) -> None:
    measured(wide_table()).save(command.folder)
    code, out, _ = command("--kind", kind, *KINDS[kind], "--criterion", "damage")
    assert code == 0
    assert "from measured errors" in out
    assert "saliency kept (reap_sum)" in out
    for each in ExpertPlan.load(command.out).layers.values():
        assert set(each.order) == set(range(16 - len(each.order), 16))


def test_damage_that_was_not_measured(command: Command) -> None:
    line = command.refused("--memory", 0.0009, "--criterion", "damage")
    assert f"{command.folder} has no damage.npz: no damage was measured" in line
    assert f"`kimi-k3 damage SOURCE {command.folder}`" in line
    with pytest.raises(PlanError, match="`kimi-k3 damage SOURCE CALIBRATION`"):
        kimi_k3.plan(wide_table(), wide_config(), memory=900_000, criterion="damage")


def test_damage_of_another_checkpoint(command: Command) -> None:
    measured(wide_table(), source={"fingerprint": "else"}).save(command.folder)
    line = command.refused("--memory", 0.0009, "--criterion", "damage")
    assert "on another checkpoint than the saliency: their source differ" in line


def test_a_low_width_that_was_not_measured(command: Command) -> None:
    table = measured(wide_table())
    replace(table, low_bits=(2,), low=table.low[:1]).save(command.folder)
    options = ("--criterion", "damage", "--memory", 0.0009)
    assert "low bank of 4 bits was not measured" in command.refused(
        *options, "--low-bits", 4
    )


# What it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Too few, too small
        (["--kind", "uniform", "--keep", 3], "layer 1 for one, but the router picks 4"),
        (["--kind", "graded", "--high", 1, "--low", 2], "layer 1 for one, but the rou"),
        (["--kind", "global", "--keep", 3], "wanted 4 (the least in every layer)"),
        (["--kind", "uniform", "--keep", 17], "but layer 1 has 16; keep no more"),
        (["--kind", "uniform", "--keep", 6.5], "6.5 experts; wanted a whole number"),
        (["--memory", 0.0001], "nothing keeps to memory of 100,000 bytes: the least"),
        (["--kind", "uniform", "--memory", 0.0001], "the limit is 100,000"),
        (["--kind", "graded", "--memory", 0.0001], "the limit is 100,000"),
        (["--kind", "global", "--memory", 0.0001], "the limit is 100,000"),
        (["--per-token", 0.00001], "nothing keeps to bytes per token of 10,000 bytes"),
        (["--memory", 0], "--memory is 0 GB; wanted more than 0"),
        (["--memory", "nan"], "--memory is nan GB"),
        (["--memory", 1, "--per-token", -1], "--per-token is -1 GB"),
        (["--memory", 1, "--least", 17], "at least 17 experts are to stay in layer 1"),
        (["--memory", 1, "--least", 3], "at least 3 experts are to stay in layer 1"),
        # What is asked contradicts itself
        (
            [],
            "a budget plan needs to know how large it may be: give --memory or --per-",
        ),
        (["--kind", "uniform"], "give --keep or --memory."),
        (
            ["--kind", "uniform", "--keep", 6, "--memory", 1],
            "--keep and --memory each tell",
        ),
        (
            ["--kind", "graded", "--high", 2, "--low", 4, "--memory", 1],
            "--high and --low and --memory each tell",
        ),
        (
            ["--kind", "uniform", "--keep", 6, "--high", 3],
            "a uniform plan takes no --high; it takes --keep, --memory.",
        ),
        (
            ["--memory", 1, "--keep", 6],
            "a budget plan takes no --keep; it takes --allow-bits,",
        ),
        (["--kind", "graded", "--keep", 6], "a graded plan takes no --keep"),
        (["--kind", "global", "--keep", 6, "--low-bits", 2], "takes no --low-bits"),
        (["--kind", "best"], "no kind of plan is called 'best'; there are uniform,"),
        # Corpora, criteria, classes, widths
        (["--memory", 1, "--weight", "german=1"], "no corpus german; it has code, pyt"),
        (["--memory", 1, "--weight", "code=0"], "wanted 0 or more, and not 0 for all"),
        (
            ["--memory", 1, "--weight", "code=1", "--weight", "code=2"],
            "--weight names a corpus twice",
        ),
        (
            ["--memory", 1, "--criterion", "reap"],
            "no criterion is called 'reap'; there",
        ),
        (
            ["--memory", 1, "--bits", "kda.q_proj=8"],
            "no class of matrices is called 'k",
        ),
        (
            ["--memory", 1, "--bits", 7],
            "a class of matrices is asked to have 7 bits; it",
        ),
        (
            ["--memory", 1, "--bits", "lm_head=2"],
            "is asked to have 2 bits; it can have",
        ),
        (
            ["--memory", 1, "--bits", 8, "--bits", 4],
            "--bits names a class twice: all, ",
        ),
        (["--memory", 1, "--allow-bits", 8, 9], "is asked to have 9 bits"),
        (["--memory", 1, "--low-bits", 5], "low bank is asked to have 5 bits; it can"),
    ],
)
def test_refused_before_work(
    command: Command, options: list[Any], message: str
) -> None:
    assert message in command.refused(*options)


def test_a_class_that_has_no_such_width(command: Command) -> None:
    """Rows of 48 are in no groups."""
    odd = json.dumps(wide_config(hidden_size=48))
    (command.source / "config.json").write_text(odd)
    options = ("--kind", "uniform", "--keep", 6)
    line = command.refused(*options, "--bits", "kda.qkv_proj=8")
    assert "kda.qkv_proj cannot have 8 bits: no group size divides its rows" in line
    assert command(*options, "--bits", 8)[0] == 0
    assert "kda.qkv_proj" not in ExpertPlan.load(command.out).bits


def test_experts_too_narrow_for_a_low_bank(command: Command) -> None:
    narrow = wide_config(moe_intermediate_size=32)
    (command.source / "config.json").write_text(json.dumps(narrow))
    assert "32" in command.refused("--kind", "graded", "--high", 3, "--low", 3)
    assert command("--kind", "uniform", "--keep", 6)[0] == 0
    assert command("--kind", "uniform", "--memory", 0.0011, "--force")[0] == 0


def test_another_checkpoint_asks_for_its_source(command: Command) -> None:
    line = command.refused("--memory", 1, source=False)
    assert "not of the released Kimi K3" in line
    assert "Name its folder as the source (--source)." in line
    (command.source / "config.json").write_text(json.dumps(wide_config(num_experts=32)))
    line = command.refused("--memory", 1)
    assert "a checkpoint with experts 16, the config says 32" in line
    assert "--source" not in line


def test_a_source_without_a_config(command: Command) -> None:
    (command.source / "config.json").unlink()
    assert "holds no config.json" in command.refused("--memory", 1)
    with pytest.raises(ConfigError, match="holds no config.json"):
        kimi_k3.plan(command.folder, command.source / "config.json", memory=10**9)


def test_router_groups(command: Command) -> None:
    grouped = wide_config(num_expert_group=2, topk_group=2)
    (command.source / "config.json").write_text(json.dumps(grouped))
    message = "layer 1 has 2 router groups, of which a build must keep equal parts"
    for kind in ("global", "graded", "budget"):
        assert message in command.refused("--kind", kind, *KINDS[kind])
    assert "its 2 router groups cannot share; take 6 or 8" in command.refused(
        "--kind", "uniform", "--keep", 7
    )
    assert command("--kind", "uniform", "--keep", 6)[0] == 0
    for each in ExpertPlan.load(command.out).layers.values():
        assert sum(expert < 8 for expert in each.order) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_table_of_no_numbers(command: Command, value: float) -> None:
    """It cannot be made, so the file is written as if it were intact."""
    from kimi_k3.build.saliency import FILE_NAME, KIND, VERSION
    from kimi_k3.build.sealed_npz import write_sealed

    table = wide_table()
    reap = table.reap_sum.copy()
    reap[0, 2, 5] = value
    arrays = table._arrays() | {"reap_sum": reap}
    write_sealed(command.folder / FILE_NAME, KIND, VERSION, arrays)
    line = command.refused("--memory", 0.0009)
    assert "layer 3, expert 5, corpus code: reap_sum is" in line


def test_a_layer_that_almost_nothing_chose(command: Command) -> None:
    """All tokens of layer 2 chose the same four experts: no fifth can be ranked."""
    table = wide_table()
    changed = {name: array.copy() for name, array in table.statistics.items()}
    for name in STATISTICS:
        changed[name][:, 1] = 0
    changed["count"][:, 1, :3] = np.array([[60], [30]])
    changed["count"][:, 1, 3:5] = np.array([[30], [15]])
    for name in ("gate_sum", "gate_square_sum", "reap_sum", "relative_sum"):
        changed[name][:, 1] = changed["count"][:, 1]
    changed["reap_sum"][:, 1, 3:5] = 0
    changed["contribution_max"][:, 1, :3] = 1
    replace(table, **changed).save(command.folder)
    for kind in KINDS:
        line = command.refused("--kind", kind, *KINDS[kind])
        assert "layer 2: " in line
        assert "reap_sum" in line
        assert "all but 3" in line
        assert "the router picks 4" in line
    assert command("--memory", 0.0009, "--criterion", "gate")[0] == 0


def test_a_calibration_that_is_not_finished(command: Command) -> None:
    from kimi_k3.build.journal import RUN

    (command.folder / "saliency.npz").unlink()
    assert "saliency.npz is not there" in command.refused("--memory", 1)
    (command.folder / RUN).write_text("{}")
    assert "calibration that is not finished" in command.refused("--memory", 1)


# Files


def test_a_plan_is_not_replaced(command: Command, tmp_path: Path) -> None:
    options = ("--kind", "uniform", "--keep", 6)
    command.out.write_text("mine")
    code, _, err = command(*options)
    assert (code, command.out.read_text()) == (2, "mine")
    assert err.endswith("Name another file, or add --force to replace it.\n")
    assert command(*options, "--force")[0] == 0
    assert ExpertPlan.load(command.out)
    command.out.unlink()
    command.out.mkdir()
    code, _, err = command(*options, "--force")
    assert code == 2
    assert f"is a folder; name a file, as {command.out / 'plan.json'}" in err


def test_what_must_be_named(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--memory", "1", "--out", str(command.out)]) == 2
    assert "name the folder of a calibration, or use --dry-run" in (
        capsys.readouterr().err
    )
    assert main(["plan", str(command.folder), "--memory", "1"]) == 2
    assert "name a file for the plan with --out" in capsys.readouterr().err


def test_the_function_names_what_it_does_not_know(command: Command) -> None:
    with pytest.raises(TypeError, match="kept"):
        kimi_k3.plan(wide_table(), wide_config(), kept=6)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    for example in ("--memory 450 --out plan.json", "--dry-run", "kimi-k3 convert"):
        assert example in text


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("budget", {"memory": "2"}),
        ("budget", {"memory": True}),
        ("budget", {"memory": float("nan")}),
        ("budget", {"memory": 1e300}),
        ("budget", {"memory": 400_000, "least": 4.5}),
        ("graded", {"high": 1.5, "low": 8}),
        ("uniform", {"keep": "8"}),
    ],
)
def test_what_is_no_number_is_named(kind: str, option: dict[str, Any]) -> None:
    name = next(n for n, v in option.items() if not isinstance(v, int) or v is True)
    with pytest.raises(PlanError, match=f"{name} is .*; wanted a"):
        PlanRequest(kind=kind, **option)


def test_sizes_may_be_written_as_powers_of_ten() -> None:
    assert PlanRequest(memory=450e9).memory == 450_000_000_000  # type: ignore[arg-type]
