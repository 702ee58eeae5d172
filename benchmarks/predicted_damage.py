"""Does predicted damage order builds as their answers do? Plans of nano, judged by KL.

    python benchmarks/predicted_damage.py --out benchmarks/results/predicted_damage.json

The shipped nano is calibrated on one half of the documents of benchmarks/nano/mix.toml and
measured by ``kimi-k3 damage`` with probes. At several limits of memory plans are made by
rule and by ``budget``, the latter by four ways to judge: ``reap_sum`` with the usual errors
of widths, ``errors`` that were measured, and both with ``probes``. Every plan is converted
and judged on the other half: mean KL(source || build) of the next token in nats, float32.

- ``plans``: limit, name, bytes, KL, and what each way predicts.
- ``rank_correlation``: Spearman's, of prediction and KL over all plans of one limit, the
  mean over limits; and over all plans together.

``--page`` puts the table into docs/budget.md. The last line of the output is one JSON
document. A quarter of an hour on two cores. One nano, one calibration: a sample of one,
not a law.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from page_tables import with_table

from kimi_k3 import convert, load
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.sample_rows import Samples
from kimi_k3.build.samples import make_samples
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.planning.budget_plan import budget_plan
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.fixed_plans import global_plan, graded_plan, uniform_plan
from kimi_k3.planning.measure_damage import measure_damage
from kimi_k3.planning.plan_sizes import SourceSizes
from kimi_k3.planning.probe_damage import measure_probes
from kimi_k3.planning.probed_damage import probed

ROOT = Path(__file__).resolve().parent.parent
MIX = ROOT / "benchmarks" / "nano" / "mix.toml"
PAGE = ROOT / "docs" / "budget.md"
RESULTS = ROOT / "benchmarks" / "results" / "predicted_damage.json"

#: Bytes of the build, and whether the widths of other matrices may be chosen.
LIMITS = ((3_200_000, False), (2_900_000, False), (2_500_000, True), (1_800_000, True))

#: Rows of held-out samples that builds are judged by, evenly spread.
JUDGED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.page:
        result = measure()
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result))
    result = json.loads(options.out.read_text("utf-8"))
    page = PAGE.read_text("utf-8")
    PAGE.write_text(filled(page, result), encoding="utf-8")


def measure() -> dict[str, Any]:
    """The results file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table = calibrate(NANO_FOLDER, MIX, folder / "calibration")
        errors = measure_damage(
            NANO_FOLDER, folder / "calibration", experts_per_layer=32
        )
        probes = measure_probes(NANO_FOLDER, folder / "calibration", errors)
        sizes = SourceSizes.of(read_config(NANO_FOLDER))
        ways = {
            "reap_sum": Damage.of_criterion(table, "reap_sum", None, sizes),
            "errors": Damage.of_measured(errors),
        }
        ways |= {f"{n} + probes": probed(way, probes) for n, way in ways.items()}
        judge = _Judge(folder)
        plans = []
        for memory, free in LIMITS:
            for name, plan in _plans(table, sizes, ways, memory, free).items():
                row = {
                    "memory": memory,
                    "widths_chosen": free,
                    "plan": name,
                    "bytes": sizes.plan_bytes(plan),
                    "kl": judge.divergence(plan),
                    "predicted": {n: way.of_plan(plan) for n, way in ways.items()},
                }
                print(json.dumps(row), file=sys.stderr, flush=True)
                plans.append(row)
    return {
        "command": "python benchmarks/predicted_damage.py --out "
        "benchmarks/results/predicted_damage.json",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "mlx": version("mlx"),
        "probe_tokens": int(probes.tokens.sum()),
        "plans": plans,
        "rank_correlation": {name: _correlations(plans, name) for name in ways},
    }


def _plans(
    table: SaliencyTable,
    sizes: SourceSizes,
    ways: dict[str, Damage],
    memory: int,
    free: bool,
) -> dict[str, ExpertPlan]:
    found: dict[str, ExpertPlan] = {}
    fixed = {} if free else dict.fromkeys(sizes.classes, 16)
    # By rule there is no choice of widths; where they are chosen, 8 bits are usual.
    bits = {n: 8 for n, sized in sizes.classes.items() if 8 in sized} if free else {}
    for name, rule in (
        ("uniform", uniform_plan),
        ("global", global_plan),
        ("graded", graded_plan),
    ):
        try:
            found[name] = rule(table, sizes=sizes, memory=memory, bits=bits)
        except ValueError as error:
            print(f"{name} at {memory}: {error}", file=sys.stderr)
    for name, way in ways.items():
        result = budget_plan(way, sizes, memory=memory, fixed_bits=fixed)
        found[f"budget by {name}"] = result.plan
    return found


class _Judge:
    """KL(source ‖ build) on held-out text."""

    def __init__(self, folder: Path):
        self.folder = folder
        samples: Samples = make_samples(MIX, NANO_FOLDER, part="held_out")
        rows = np.linspace(0, len(samples.tokens) - 1, JUDGED).round().astype(int)
        self.tokens, self.labels = samples.tokens[rows], samples.labels[rows]
        self.source = self._log_probabilities(NANO_FOLDER)

    def divergence(self, plan: ExpertPlan) -> float:
        build = self.folder / f"build-{plan.digest[:16]}"
        if not build.exists():
            convert(NANO_FOLDER, build, plan, moments=self.folder / "calibration")
        found = self._log_probabilities(build)
        kl = [
            (np.exp(p) * (p - q)).sum(axis=-1)
            for p, q in zip(self.source, found, strict=True)
        ]
        return float(np.stack(kl)[self.labels >= 0].mean())

    def _log_probabilities(self, folder: Path) -> list[np.ndarray]:
        model, _ = load(folder)
        model.set_dtype(mx.float32)
        found = []
        for row in self.tokens:
            logits = model(mx.array(row)[None])[0]
            found.append(
                np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            )
        return found


def _correlations(plans: list[dict[str, Any]], way: str) -> dict[str, float]:
    groups = [[p for p in plans if p["memory"] == memory] for memory, _ in LIMITS]
    return {
        "within_a_limit": statistics.mean(_spearman(group, way) for group in groups),
        "all": _spearman(plans, way),
    }


def _spearman(plans: list[dict[str, Any]], way: str) -> float:
    """Rank correlation of what ``way`` predicts with the KL."""
    predicted = np.argsort(np.argsort([p["predicted"][way] for p in plans]))
    measured = np.argsort(np.argsort([p["kl"] for p in plans]))
    return float(np.corrcoef(predicted, measured)[0, 1])


def filled(page: str, result: dict[str, Any]) -> str:
    """``page`` with the tables of ``result`` between its marks."""
    return with_table(page, "predicted", _tables(result))


def _tables(result: dict[str, Any]) -> str:
    limits = [memory for memory, _ in LIMITS]
    names = list(dict.fromkeys(p["plan"] for p in result["plans"]))
    kl = {(p["plan"], p["memory"]): p["kl"] for p in result["plans"]}
    heads = [
        f"{memory / 1e6:.1f} MB{', widths too' if free else ''}"
        for memory, free in LIMITS
    ]
    lines = [f"| plan | {' | '.join(heads)} |", f"|---|{'---:|' * len(limits)}"]
    for name in names:
        cells = [
            f"{kl[name, memory]:.4f}" if (name, memory) in kl else "none"
            for memory in limits
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| judged by | within a limit | all plans |", "|---|---:|---:|"]
    for name, found in result["rank_correlation"].items():
        lines.append(f"| {name} | {found['within_a_limit']:.2f} | {found['all']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
