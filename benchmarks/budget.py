"""How good budget plans are, how good they can be, and how long they take.

    python benchmarks/budget.py --nano CALIBRATION --out benchmarks/results/budget.json

Plans, no weights. Two subjects: Kimi K3's size with made-up saliency
(tests/saliency_tables.py: 92 layers of 896 experts, whose top 27 % hold about 58 %), and
nano with the calibration in the folder CALIBRATION (docs/calibrating.md makes one in a
minute); if that holds measured damage, by it too. For every limit:

- ``damage``, ``bound``, ``gap``: of the budget plan, and what no plan can be below.
- ``solver_gap``: of the solver's last problem, see docs/budget.md.
- ``nodes``, ``evaluations``, ``seconds``, ``cpu_seconds``: what the search took, all of it.
- ``by_rule``: damage of plans by rule within the same limits at the same widths of the
  other matrices; ``at_8_bits``: the same with 8 bits for all of them.

``--page`` puts the figures of the results file into docs/budget.md. The last line of the
output is one JSON document. A minute on two cores.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from page_tables import with_table
from saliency_tables import big_table

from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.errors import PlanError
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.planning.budget_plan import budget_plan
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.damage_table import FILE_NAME, DamageTable
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.fixed_plans import (
    all_classes,
    global_plan,
    graded_plan,
    uniform_plan,
)
from kimi_k3.planning.plan_sizes import SourceSizes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "budget.md"
RESULTS = ROOT / "benchmarks" / "results" / "budget.json"

GB = 1e9

#: Memory, and bytes per token (None: not limited), at K3's size.
LIMITS = (
    (150 * GB, None),
    (300 * GB, None),
    (450 * GB, None),
    (700 * GB, None),
    (1000 * GB, None),
    (450 * GB, 58 * GB),
    (450 * GB, 50 * GB),
    (450 * GB, 45 * GB),
    (1000 * GB, 60 * GB),
    (None, 60 * GB),
)

#: The same for nano, as shares of the whole.
SHARES = ((0.35, None), (0.4, None), (0.5, None), (0.6, None), (0.5, 0.35))


def measure(
    damage: Damage, sizes: SourceSizes, table: SaliencyTable, limits: Mapping[str, int]
) -> dict[str, Any]:
    """One budget plan, and the plans by rule within the same limits."""
    chosen = dict(zip(table.layers.tolist(), table.score("frequency"), strict=True))
    cpu = time.process_time()
    found = budget_plan(damage, sizes, frequency=chosen, **limits)
    cpu = time.process_time() - cpu
    at_8_bits = {}
    if "memory" in limits:
        common: Any = {"sizes": sizes, "bits": all_classes(sizes, 8)}
        common["memory"] = limits["memory"]
        for name, make in (
            ("uniform", uniform_plan),
            ("global", global_plan),
            ("graded", graded_plan),
        ):
            try:
                plan = make(table, **common)
            except PlanError:
                continue
            if sizes.bytes_per_token(plan, chosen) <= limits.get(
                "bytes_per_token", 1e99
            ):
                at_8_bits[name] = damage.of_plan(plan)
    banks = found.plan.layers.values()
    return {
        **limits,
        "damage": found.damage,
        "bound": found.bound,
        "gap": found.gap,
        "solver_gap": found.solver_gap,
        "nodes": found.nodes,
        "evaluations": found.evaluations,
        "seconds": round(found.seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "plan_memory": found.memory,
        "plan_bytes_per_token": found.bytes_per_token,
        "high": sum(len(layer.high) for layer in banks),
        "low": sum(len(layer.low) for layer in banks),
        "bits": dict(found.plan.bits),
        "by_rule": dict(found.fixed),
        "at_8_bits": at_8_bits,
    }


def full_size() -> list[dict[str, Any]]:
    sizes, table = SourceSizes.of(full_size_config()), big_table()
    damage = Damage.of_criterion(table, "reap_sum", None, sizes)
    cases = []
    for memory, tokens in LIMITS:
        limits = {"memory": memory, "bytes_per_token": tokens}
        named = {name: int(limit) for name, limit in limits.items() if limit}
        cases.append(measure(damage, sizes, table, named))
    return cases


def nano(folder: Path) -> dict[str, list[dict[str, Any]]]:
    table = SaliencyTable.load(folder)
    sizes = SourceSizes.of(read_config(NANO_FOLDER))
    damages = {"reap_sum": Damage.of_criterion(table, "reap_sum", None, sizes)}
    if (folder / FILE_NAME).exists():
        measured = DamageTable.load(folder / FILE_NAME)
        probed = (
            "with" if any("probe" in key for key in measured.settings) else "without"
        )
        damages[f"measured, {probed} probes"] = Damage.of_measured(measured)
    whole = ExpertPlan.identity(sizes.args.text_config)
    memory, tokens = sizes.plan_bytes(whole), sizes.bytes_per_token(whole)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, damage in damages.items():
        found[name] = []
        for share, of_token in SHARES:
            limits = {"memory": int(share * memory)}
            if of_token:
                limits["bytes_per_token"] = int(of_token * tokens)
            found[name].append(measure(damage, sizes, table, limits))
    return found


def shown(result: Mapping[str, Any]) -> str:
    """The figures as they stand in the document."""
    lines = [
        "At Kimi K3's size, made-up saliency, damage by reap_sum:",
        "",
        "| memory, GB | GB per token | uniform, 8 bits | graded, 8 bits | best by rule, "
        "same widths | budget | gap | CPU seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in result["full_size"]:
        limits = (case.get("memory"), case.get("bytes_per_token"))
        lines.append(_row([f"{x / GB:.0f}" if x else "any" for x in limits], case))
    for name, cases in result["nano"].items():
        lines += [
            "",
            f"nano, its own calibration, damage by {name}:",
            "",
            "| memory, MB | MB per token | uniform, 8 bits | graded, 8 bits | best by "
            "rule, same widths | budget | gap | CPU seconds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for case in cases:
            limits = (case.get("memory"), case.get("bytes_per_token"))
            lines.append(_row([f"{x / 1e6:.2f}" if x else "any" for x in limits], case))
    return "\n".join(lines)


def _row(limits: list[str], case: Mapping[str, Any]) -> str:
    by_rule = min(case["by_rule"].values(), default=None)
    damages = [case["at_8_bits"].get("uniform"), case["at_8_bits"].get("graded")]
    damages += [by_rule, case["damage"]]
    gap = f"{100 * case['gap']:.3f} %"
    return (
        "| "
        + " | ".join(
            [
                *limits,
                *("none" if d is None else f"{d:.3f}" for d in damages),
                gap,
                f"{case['cpu_seconds']:.1f}",
            ]
        )
        + " |"
    )


def filled(page: str, result: Mapping[str, Any]) -> str:
    """``page`` with the figures of ``result`` between its marks."""
    return with_table(page, "budget", shown(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nano", type=Path, metavar="CALIBRATION")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "system": platform.system(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kimi-k3-mlx": version("kimi-k3-mlx"),
        },
        "full_size": full_size(),
        "nano": nano(options.nano) if options.nano else {},
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
