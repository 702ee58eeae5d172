"""One nano of benchmarks/quality.py: its calibrations, ways to judge plans, and builds.

Everything is kept in a folder, so that a run that is killed goes on:

    FOLDER/calibration/     on the calibration half, with errors of widths and probes
    FOLDER/draw1/ ...       further calibrations, of fewer tokens in another order
    FOLDER/teacher/         final hidden states of the source on held-out text
    FOLDER/judged/NAME/     the evaluation of one build; the build itself is discarded
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from quantizer import plain_quantizer

from kimi_k3 import convert
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.mix_file import find_mix
from kimi_k3.build.saliency import CRITERIA, SaliencyTable
from kimi_k3.build.sample_rows import Samples
from kimi_k3.build.samples import make_samples
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.evaluation.evaluate import evaluate, make_teacher
from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.planning.budget_plan import BudgetResult, budget_plan
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.fixed_plans import uniform_plan
from kimi_k3.planning.measure_damage import measure_damage
from kimi_k3.planning.plan_sizes import SourceSizes
from kimi_k3.planning.probe_damage import measure_probes
from kimi_k3.planning.probe_table import ProbeTable
from kimi_k3.planning.probed_damage import probed

NANO = Path(__file__).resolve().parent / "nano"
MIX = NANO / "mix.toml"

#: Held-out text that builds are judged by: windows from the start of documents.
WINDOWS, LENGTH = 40, 128

#: Tokens of a further calibration.
DRAW_TOKENS = 8192

#: Tokens that a seed's probes are of: the tool's usual number for the nano that is
#: shipped, a quarter of it for the others, because probes are most of the work.
PROBE_TOKENS = {0: 4096, 1: 1024, 2: 1024}

#: Experts of a layer of 32 that a uniform plan keeps; its bytes are the limit of a size.
KEPT = (23, 16, 10)

ERRORS, BOTH, PROBES = "errors", "mean of both", " + probes"

#: By what `kimi-k3 damage` measures, and what `kimi-k3 plan` takes if it is there.
BEST_WAY = ERRORS + PROBES


@dataclass(frozen=True)
class Case:
    """A build to judge.

    Attributes:
        part: of the benchmark. size: experts that set the limit, or a label.
        name: what is told of the plan.
        calibration: folder with the moments that it is quantised with.
        plain: quantise as ``mx.quantize`` does.
    """

    part: str
    size: str
    name: str
    plan: ExpertPlan
    calibration: str = "calibration"
    plain: bool = False

    @cached_property
    def key(self) -> str:
        """Name of the folder: of what is done to the checkpoint, not of why."""
        done = {k: v for k, v in self.plan.to_dict().items() if k != "about"}
        low = any(layer.low for layer in self.plan.layers.values())
        how: list[Any] = [done]
        if low or self.plan.bits:
            how += [self.calibration, self.plain]
        text = json.dumps(how, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Subject:
    """A nano, calibrated. With ``judges`` False only what is there already is used."""

    def __init__(self, seed: int, source: Path, folder: Path, judges: bool):
        self.seed, self.source, self.folder, self.judges = seed, source, folder, judges
        self.sizes = SourceSizes.of(read_config(source))
        self.table, self.errors = self.calibrated("calibration")
        self.probes: ProbeTable = measure_probes(
            source,
            folder / "calibration",
            self.errors,
            tokens=PROBE_TOKENS[seed],
        )
        chosen = self.table.score("frequency")
        self.frequency = dict(zip(self.table.layers.tolist(), chosen, strict=True))
        #: No choice of other matrices' widths: all bytes are the experts'.
        self.wide = dict.fromkeys(self.sizes.classes, 16)
        self.limits = {
            keep: self.sizes.plan_bytes(uniform_plan(self.table, keep=keep))
            for keep in KEPT
        }
        self._evaluations: dict[str, Evaluation] = {}

    def calibrated(self, name: str) -> tuple[SaliencyTable, DamageTable]:
        """Saliency and errors of ``calibration``, or of ``draw1`` and so on."""
        folder = self.folder / name
        if not self.judges and not (folder / "damage.npz").is_file():
            raise FileNotFoundError(folder)
        mix = find_mix(MIX)
        if name != "calibration":
            number = int(name.removeprefix("draw"))
            mix = replace(mix, seed=number, tokens=DRAW_TOKENS)
        samples: Any = MIX if name == "calibration" else make_samples(mix, self.source)
        table = calibrate(self.source, samples, folder)
        return table, measure_damage(self.source, folder, experts_per_layer=32)

    @cached_property
    def ways(self) -> dict[str, Damage]:
        """Every way to predict damage, by name."""
        found = {
            name: Damage.of_criterion(self.table, name, None, self.sizes)
            for name in CRITERIA
        }
        found[ERRORS] = Damage.of_measured(self.errors)
        found[BOTH] = mean_of(found[ERRORS], found["reap_sum"])
        return found | {n + PROBES: probed(d, self.probes) for n, d in found.items()}

    @cached_property
    def held_out(self) -> Samples:
        mix = replace(
            find_mix(MIX), length=LENGTH, tokens=WINDOWS * LENGTH, packing="window"
        )
        return make_samples(mix, self.source, part="held_out")

    @cached_property
    def teacher(self) -> Path:
        made = make_teacher(
            self.source,
            self.held_out,
            self.folder / "teacher",
            float32=True,
            rows_per_step=WINDOWS,
        )
        return made.folder

    def budget(self, way: Damage, memory: int, **limits: Any) -> BudgetResult:
        limits = {"fixed_bits": self.wide, **limits}
        return budget_plan(way, self.sizes, memory=memory, **limits)

    def judge(self, case: Case) -> Evaluation | None:
        """What the build says, or None if it was not judged yet and need not be."""
        if case.key in self._evaluations:
            return self._evaluations[case.key]
        out = self.folder / "judged" / case.key
        if (out / "predictions.npz").is_file():
            found = Evaluation.load(out)
        elif self.judges:
            found = self._made(case, out)
        else:
            return None
        self._evaluations[case.key] = found
        return found

    def _made(self, case: Case, out: Path) -> Evaluation:
        build = self.folder / "builds" / case.key
        calibration = self.folder / case.calibration
        # Of a run that was killed; what it was judged by so far is kept.
        shutil.rmtree(build, ignore_errors=True)
        with plain_quantizer() if case.plain else nullcontext():
            convert(
                self.source,
                build,
                case.plan,
                moments=None if case.plain else calibration,
            )
        found = evaluate(build, self.teacher, out, calibration=calibration)
        shutil.rmtree(build)
        said = f"seed {self.seed}, {case.part}, {case.size}, {case.name}"
        print(f"{said}: KL {found.kl.mean():.4f}", file=sys.stderr, flush=True)
        return found

    def assert_best(self, result: BudgetResult, way: Damage, memory: int) -> None:
        """Budget's plan against every fixed one, in the unit it is chosen by; exactly.

        Raises AssertionError; a budget plan that predicts worse is a defect.
        """
        from quality_cases import fixed_plans

        least = self.table.top_k
        if result.damage != way.of_plan(result.plan):
            raise AssertionError("budget's damage is not that of its plan")
        if self.sizes.plan_bytes(result.plan) > memory:
            raise AssertionError("budget's plan does not keep to the limit")
        for name, plan in fixed_plans(self, memory).items():
            inside = (
                self.sizes.plan_bytes(plan) <= memory
                and all(len(layer.order) >= least for layer in plan.layers.values())
                and all(bits == 16 for bits in plan.bits.values())
                and plan.low_bits == result.plan.low_bits
            )
            if not inside:
                raise AssertionError(f"{name} is not in budget's search space")
            if not result.damage <= way.of_plan(plan):
                raise AssertionError(
                    f"seed {self.seed}, {memory:,} bytes: budget by {way.criterion} "
                    f"predicts {result.damage}, {name} {way.of_plan(plan)}"
                )


def subjects(
    work: Path, seeds: Iterator[int] | list[int], judges: bool
) -> Iterator[Subject]:
    """The nanos of ``seeds``, one after the other."""
    from kimi_k3.nano import NANO_FOLDER

    for seed in seeds:
        source = NANO_FOLDER if seed == 0 else NANO / f"seed{seed}"
        folder = work / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        yield Subject(seed, Path(source), folder, judges)


def mean_of(errors: Damage, saliency: Damage) -> Damage:
    """Experts worth the mean of two shares of their layer; low banks as measured."""
    drop = (errors.drop + saliency.drop) / 2
    ratio = np.divide(
        errors.low, errors.drop, out=np.ones_like(drop), where=errors.drop > 0
    )
    return replace(errors, drop=drop, low=ratio * drop)


def random_layers(plan: ExpertPlan, seed: int, number: int) -> ExpertPlan:
    """As many experts of each layer as ``plan`` keeps, drawn at random."""
    random = np.random.default_rng([seed, number])
    layers = {
        layer: replace(
            found,
            high=tuple(
                sorted(
                    random.choice(plan.experts, len(found.high), replace=False).tolist()
                )
            ),
        )
        for layer, found in plan.layers.items()
    }
    return replace(plan, layers=layers, about={"kind": "random", "number": number})
