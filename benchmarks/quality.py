"""Which plans make good builds? Three nanos, builds of equal bytes, judged by KL.

    python benchmarks/quality.py --work FOLDER --out benchmarks/results/quality.json

Each nano (benchmarks/nano) is calibrated on one half of the documents of
benchmarks/nano/mix.toml, with errors of widths and probes as ``kimi-k3 damage`` measures
them. Its builds are written by ``kimi_k3.convert`` and judged by
``kimi_k3.evaluate`` in float32 on windows of the other half. Parts:

- ``sizes``: plans by rule (uniform, global, graded, all low) and ``budget`` by five
  ways to predict damage, at the bytes of uniform plans that keep 23, 16 and 10 of 32
  experts. Other matrices stay as they are.
- ``speed``: the graded build with other matrices at 8 bits; then how few bytes a token
  ``budget`` can read, in no more memory, at no more KL: by halves over measured KL.
- ``random``: uniform counts, experts drawn at random.
- ``domains``: plans by the saliency of code alone and of Chinese alone.
- ``draws``: further calibrations (fewer tokens, other documents first): new saliency,
  errors and moments, the same probes.
- ``quantisers``: builds with a low bank, quantised as ``mx.quantize`` does.

That no plan by rule predicts less damage than ``budget``'s, and that each is in its search
space, is asserted exactly for every budget plan of ``sizes``.

FOLDER keeps what is done: a run that was killed goes on. ``--seeds`` and ``--parts`` do a
share of the work, parts in order (several may run beside each other, on other seeds);
``--collect`` writes the results of what is judged; ``--page`` writes docs/quality.md's
tables and pictures from the results file. The last line of the output is one JSON
document. About two hours on one core.
"""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quality_analysis import Judged, analysed, row_of
from quality_cases import PARTS
from quality_ranks import rank_correlations
from quality_subject import (
    BEST_WAY,
    DRAW_TOKENS,
    KEPT,
    LENGTH,
    PROBE_TOKENS,
    WINDOWS,
    subjects,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--judge-only", action="store_true", help="write no results")
    parser.add_argument("--collect", action="store_true", help="judge nothing more")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.page:
        if options.work is None:
            parser.error("name a folder for what is done: --work FOLDER")
        judged = judge(options.work, options.seeds, options.parts, not options.collect)
        if options.judge_only:
            return
        result = collected(judged)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result))
    from quality_page import write_page

    write_page(json.loads(options.out.read_text("utf-8")))


def judge(work: Path, seeds: list[int], parts: list[str], judges: bool) -> list[Judged]:
    """Every build of these seeds and parts; with ``judges`` False those that are done."""
    found = []
    for part in parts:
        for subject in subjects(work, seeds, judges):
            for case, more in PARTS[part](subject):
                evaluation = subject.judge(case)
                if evaluation is None:
                    print(f"not judged: {subject.seed}, {case}"[:99], file=sys.stderr)
                    continue
                row = row_of(subject, case, more, evaluation)
                found.append(Judged(row, evaluation))
    return found


def collected(judged: list[Judged]) -> dict[str, Any]:
    """The results file."""
    about = {
        "benchmark": "quality",
        "command": "python benchmarks/quality.py --work FOLDER --out "
        "benchmarks/results/quality.json",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        },
        "direction": "KL(source || build), nats a token, float32",
        "held_out": {
            "windows": WINDOWS,
            "length": LENGTH,
            "predictions": len(judged[0].evaluation.kl),
        },
        "limits": f"bytes of uniform plans that keep {', '.join(map(str, KEPT))} of 32",
        "budget": BEST_WAY,
        "draw_tokens": DRAW_TOKENS,
        "probe_tokens": {str(seed): PROBE_TOKENS[seed] for seed in SEEDS},
        "judged": {
            part: {
                str(seed): sum(
                    1 for one in judged if (one.part, one.seed) == (part, seed)
                )
                for seed in SEEDS
            }
            for part in dict.fromkeys(one.part for one in judged)
        },
    }
    builds = [one.row for one in judged]
    found = {**analysed(judged), "rank_correlation": rank_correlations(builds)}
    # What is predicted stays exact: the assertions are about it.
    return {**about, **_rounded(found), "builds": [_rounded(row) for row in builds]}


def _rounded(value: Any) -> Any:
    """Six digits of every figure but predictions."""
    if isinstance(value, dict):
        return {
            k: v if k in ("predicted", "damage", "bound") else _rounded(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
