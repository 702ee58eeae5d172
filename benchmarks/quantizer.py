"""Our affine quantiser against ``mx.quantize``: errors, time, and what a model notices.

    python benchmarks/quantizer.py --out benchmarks/results/quantizer.json

*Matrices.* 3072 x 3584 weights, N(0,1) and Student-t(5) from fixed seeds, as bfloat16
(what other matrices than experts are) and rounded to MXFP4 (what experts are), quantised
at every width in groups of 64 by both, with and without importance (log-normal, sigma 1).
Errors are of the bfloat16 scales and biases that are stored, summed in float64:

- ``squared``: our Σ h·(w - w')² over theirs; ``rms``: its square root, the ratio of
  relative error norms; ``worst_group``: the largest ratio of any group.
- ``relative``, ``relative_mx``: Σ h·(w - w')² over Σ h·w², ours and theirs.
- ``optimum_squared`` (2 bits): over :data:`OPTIMA` groups, the least error that any codes
  and any real scale and bias have, over theirs; ``to_optimum``: ours over it.
- ``seconds``, ``seconds_mx``: of the processor for one matrix of the first distribution,
  the least of three, since other work may share it; ``time_ratio``: one over the other.

*Nanos.* The three trained nanos, each calibrated on one half of the documents of
benchmarks/nano/mix.toml and judged on the other: mean KL(full || build) in nats per
token. Builds are written by ``kimi_k3.convert``: all experts at 2 bits, or all other
matrices at 4 bits, by ``mx.quantize``, by ours, by ours weighed with the calibration's
moments. ``interval`` is of the paired difference to ``mx.quantize``: 95 %, over rows.

``--page`` puts the figures of the results file into docs/quantizer.md; ``--nano FILE``
takes the nanos' figures from an earlier results file. The last line of the output is one
JSON document. Takes a quarter of an hour on two cores.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import oracle_quantizer as oracle
from page_tables import with_table

from kimi_k3 import convert, load
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.samples import make_samples
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.config import ModelArgs
from kimi_k3.conversion import convert_shard
from kimi_k3.conversion.quantizer import BITS, quantize
from kimi_k3.models import Model
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan
from kimi_k3.planning.matrix_classes import class_matrices

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quantizer.md"
RESULTS = ROOT / "benchmarks" / "results" / "quantizer.json"
NANO = ROOT / "benchmarks" / "nano"

ROWS, COLUMNS, GROUP, OPTIMA = 3072, 3584, 64, 1024

#: Rows of held-out samples that nanos are judged by, evenly spread over all of them.
JUDGED = 16

#: Numbers of the generator, by name: fixed, so that anybody gets the same matrices.
SEEDS = {"normal": 1, "student": 2, "importance": 3}

#: Name of a distribution → how its weights are drawn, and whether they are MXFP4.
DISTRIBUTIONS = {
    f"{name}, {form}": (name, form == "MXFP4")
    for form in ("MXFP4", "bfloat16")
    for name in ("normal", "student")
}
WEIGHTS = {"unweighted": False, "weighted": True}

NANOS = {"seed 0": NANO_FOLDER, "seed 1": NANO / "seed1", "seed 2": NANO / "seed2"}
EXPERTS, OTHERS = "experts at 2 bits", "other matrices at 4 bits"
MX, OURS, WEIGHED = "mx.quantize", "ours", "ours, weighted"


def draw(distribution: str, rows: int = ROWS) -> mx.array:
    """(rows, COLUMNS) bfloat16."""
    name, is_mxfp4 = DISTRIBUTIONS[distribution]
    rng = np.random.default_rng(SEEDS[name])
    shape = rows, COLUMNS
    values = rng.standard_normal(shape)
    if name == "student":
        values = rng.standard_t(5, shape)
    weights = mx.array(values.astype(np.float32))
    if is_mxfp4:
        form: Any = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        weights = mx.dequantize(*mx.quantize(weights, **form), **form)
    weights = weights.astype(mx.bfloat16)
    mx.eval(weights)
    return weights


def draw_importance() -> mx.array:
    """(COLUMNS,) float32."""
    rng = np.random.default_rng(SEEDS["importance"])
    return mx.array(np.exp(rng.standard_normal(COLUMNS)).astype(np.float32))


def theirs(weights: mx.array, bits: int) -> Any:
    return mx.quantize(weights, group_size=GROUP, bits=bits)


def group_errors(
    weights: mx.array, stored: Any, bits: int, importance: np.ndarray
) -> np.ndarray:
    """(rows, groups) float64."""
    codes, scales, biases = stored
    found = []
    for start in range(0, weights.shape[0], 256):
        part = slice(start, start + 256)
        w = mx.dequantize(
            codes[part],
            scales[part].astype(mx.float32),
            biases[part].astype(mx.float32),
            group_size=GROUP,
            bits=bits,
        )
        left = np.array(weights[part].astype(mx.float32), np.float64)
        left = (left - np.array(w, np.float64)) ** 2 * importance
        found.append(left.reshape(len(left), -1, GROUP).sum(axis=-1))
    return np.concatenate(found)


def seconds_of(work: Callable[[], Any], times: int = 3) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time()
        mx.eval(work())
        taken.append(time.process_time() - start)
    return min(taken)


def measure_matrix(
    weights: mx.array, bits: int, importance: mx.array | None, timed: bool
) -> dict[str, float]:
    """The figures of one matrix at one width."""
    options: Any = {"bits": bits, "group_size": GROUP, "importance": importance}
    h = np.ones(COLUMNS) if importance is None else np.array(importance, np.float64)
    ours = group_errors(weights, quantize(weights, **options), bits, h)
    other = group_errors(weights, theirs(weights, bits), bits, h)
    energy = (np.array(weights.astype(mx.float32), np.float64) ** 2 * h).sum()
    squared = ours.sum() / other.sum()
    found = {
        "squared": squared,
        "rms": math.sqrt(squared),
        # In a group without error the ratio has no meaning; ours must have none either.
        "worst_group": float((ours / np.where(other > 0, other, np.inf)).max()),
        "relative": ours.sum() / energy,
        "relative_mx": other.sum() / energy,
    }
    assert not ours[other == 0].any()
    if bits == 2:
        places = np.linspace(0, ours.size - 1, OPTIMA).astype(int)
        groups = np.array(weights.astype(mx.float32)).reshape(-1, GROUP)
        h = h.reshape(-1, GROUP)
        best = sum(
            oracle.least_error(groups[i], h[i % len(h)], 2) for i in places.tolist()
        )
        found["optimum_squared"] = best / other.reshape(-1)[places].sum()
        found["to_optimum"] = ours.reshape(-1)[places].sum() / best
    if timed:
        found["seconds"] = seconds_of(lambda: quantize(weights, **options))
        found["seconds_mx"] = seconds_of(lambda: theirs(weights, bits))
        found["time_ratio"] = found["seconds"] / found["seconds_mx"]
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def measure_matrices(rows: int = ROWS) -> dict[str, Any]:
    importance, result = draw_importance(), {}
    for distribution in DISTRIBUTIONS:
        weights = draw(distribution, rows)
        timed = not result
        result[distribution] = {}
        for name, weighted in WEIGHTS.items():
            by_bits = {
                str(bits): measure_matrix(
                    weights, bits, importance if weighted else None, timed
                )
                for bits in BITS
            }
            result[distribution][name] = by_bits
            print(f"{distribution}, {name}: {by_bits}", file=sys.stderr, flush=True)
    return result


def plans(source: Path) -> dict[str, ExpertPlan]:
    """What to quantise of a nano, by name."""
    args = ModelArgs.from_dict(read_config(source))
    whole = ExpertPlan.identity(args.text_config)
    low = {n: LayerPlan((), plan.high) for n, plan in whole.layers.items()}
    classes = {name for name, _, _ in class_matrices(Model(args))}
    return {
        EXPERTS: replace(whole, layers=low),
        OTHERS: replace(whole, bits=dict.fromkeys(sorted(classes), 4)),
    }


@contextmanager
def plain_quantizer() -> Iterator[None]:
    """Conversions quantise as ``mx.quantize`` does until the block ends."""

    def plain(weight: mx.array, *, bits: int, group_size: int, importance: Any) -> Any:
        return mx.quantize(weight.astype(mx.bfloat16), bits=bits, group_size=group_size)

    ours, convert_shard.quantize = convert_shard.quantize, plain
    try:
        yield
    finally:
        convert_shard.quantize = ours


def log_probabilities(folder: Path, tokens: np.ndarray) -> Iterator[mx.array]:
    """Of each row in turn, (length, vocabulary) float32."""
    model, _ = load(folder)
    for row in tokens:
        logits = model(mx.array(row)[None])[0].astype(mx.float32)
        yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergences(
    full: np.ndarray, folder: Path, tokens: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """(rows,) mean KL(full || build) over the tokens of each row, nats."""
    found = []
    for mine, built, of_row in zip(
        full, log_probabilities(folder, tokens), labels, strict=True
    ):
        reference = mx.array(mine)
        by_token = (mx.exp(reference) * (reference - built)).sum(axis=-1)
        found.append(np.array(by_token)[of_row >= 0].mean())
    return np.array(found, np.float64)


def measure_nano(source: Path, scratch: Path) -> dict[str, Any]:
    mix = NANO / "mix.toml"
    held_out = make_samples(mix, source, "held_out")
    judged = np.linspace(0, held_out.rows - 1, JUDGED).astype(int)
    tokens, labels = held_out.tokens[judged], held_out.labels[judged]
    calibration = scratch / "calibration"
    calibrate(source, mix, calibration)
    full = np.stack([np.array(row) for row in log_probabilities(source, tokens)])
    result: dict[str, Any] = {"tokens": int((labels >= 0).sum())}
    for what, plan in plans(source).items():
        rows: dict[str, np.ndarray] = {}
        for by in (MX, OURS, WEIGHED):
            out = scratch / f"{what}, {by}"
            moments = calibration if by == WEIGHED else None
            if by == MX:
                with plain_quantizer():
                    convert(source, out, plan)
            else:
                convert(source, out, plan, moments=moments)
            rows[by] = divergences(full, out, tokens, labels)
        result[what] = {
            by: {"kl": float(f"{kl.mean():.5g}")} for by, kl in rows.items()
        }
        for by in (OURS, WEIGHED):
            less = rows[by] - rows[MX]
            half = 1.96 * less.std(ddof=1) / math.sqrt(len(less))
            ends = less.mean() - half, less.mean() + half
            result[what][by]["interval"] = [float(f"{end:.3g}") for end in ends]
    print(f"{source.name}: {result}", file=sys.stderr, flush=True)
    return result


def measure_nanos() -> dict[str, Any]:
    result = {}
    for name, source in NANOS.items():
        with tempfile.TemporaryDirectory() as scratch:
            result[name] = measure_nano(source, Path(scratch))
    return result


def error_table(result: dict[str, Any]) -> str:
    """A row a distribution and width, in Markdown."""
    lines = [
        "| weights | bits | relative squared error | squared, ours : `mx.quantize` "
        "| RMS | weighted squared | weighted RMS | worst group |",
        "|---" * 8 + "|",
    ]
    for distribution, by_weight in result["matrices"].items():
        for bits in by_weight["unweighted"]:
            plain, heavy = (by_weight[name][bits] for name in WEIGHTS)
            worst = max(plain["worst_group"], heavy["worst_group"])
            cells = (
                distribution,
                bits,
                f"{plain['relative']:.2g}",
                *(f"{x[k]:.3f}" for x in (plain, heavy) for k in ("squared", "rms")),
                f"{worst:.6f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def optimum_table(result: dict[str, Any]) -> str:
    """How near 2 bits come to the best there is, in Markdown."""
    lines = [
        "| weights | importance | RMS, best possible : `mx.quantize` "
        "| squared, ours : best possible |",
        "|---" * 4 + "|",
    ]
    for distribution, by_weight in result["matrices"].items():
        for name, by_bits in by_weight.items():
            found = by_bits["2"]
            lines.append(
                f"| {distribution} | {name} "
                f"| {math.sqrt(found['optimum_squared']):.3f} "
                f"| {found['to_optimum']:.3f} |"
            )
    return "\n".join(lines)


def time_table(result: dict[str, Any]) -> str:
    """Seconds of a matrix by width, in Markdown."""
    lines = [
        "| bits | seconds | weighted | `mx.quantize` |",
        "|---" * 4 + "|",
    ]
    first = next(iter(result["matrices"].values()))
    for bits, plain in first["unweighted"].items():
        heavy = first["weighted"][bits]
        cells = (plain["seconds"], heavy["seconds"], plain["seconds_mx"])
        lines.append(f"| {bits} | {' | '.join(f'{x:.2f}' for x in cells)} |")
    return "\n".join(lines)


def nano_table(result: dict[str, Any]) -> str:
    """KL of the nanos' builds, in Markdown."""
    lines = [
        f"| KL, nats per token | | {MX} | {OURS} | {WEIGHED} |",
        "|---" * 5 + "|",
    ]
    for what in (EXPERTS, OTHERS):
        for name, found in result["nanos"].items():
            cells = (f"{found[what][by]['kl']:.4f}" for by in (MX, OURS, WEIGHED))
            lines.append(f"| {what} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "errors": error_table,
    "optimum": optimum_table,
    "time": time_table,
    "nano": nano_table,
}


def filled(page: str, result: dict[str, Any]) -> str:
    """``page`` with the figures of ``result`` between its markers."""
    for name, table in TABLES.items():
        page = with_table(page, name, table(result))
    return page


def run_all(nanos: dict[str, Any] | None) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    result = {
        "benchmark": "quantizer",
        "command": "python benchmarks/quantizer.py --out benchmarks/results/quantizer.json",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "form": {"rows": ROWS, "columns": COLUMNS, "group_size": GROUP, "seeds": SEEDS},
        "matrices": measure_matrices(),
        "nanos": measure_nanos() if nanos is None else nanos,
    }
    result["load_average"] = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--nano", type=Path, help="results file to take nanos from")
    parser.add_argument("--page", action="store_true", help="fill the page and stop")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    mx.set_default_device(mx.cpu)
    nanos = json.loads(options.nano.read_text())["nanos"] if options.nano else None
    result = run_all(nanos)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
