"""Calibrate random checkpoints of two depths: memory, bytes read, speed.

    python benchmarks/calibrate.py --out benchmarks/results/calibrate.json

Writes two source-format checkpoints with random weights, 40 and 10 layers that are alike
(64 experts each, about 2 GB and 0.5 GB) and hold as many residual blocks, then runs
:data:`CASES`, each in a process of its own: with and without input moments, hidden
states held in memory or, above a small limit, read from disk.

- ``peak_array_mb``: most that MLX held at once (``mx.get_peak_memory``), and beside it
  what the dry run's formula says; ``resident_growth_mb``: growth of the process.
- ``bytes_read``: of weights, as the stream counts them; ``tensors_read_twice``: by name;
  ``process_read_mb``: what the process asked of the system for in all (Linux).
- ``tokens_per_second`` and ``bytes_per_second`` are of the whole run, from a disk cache
  that has just been written. They are worth something beside each other only.

``--page`` puts the figures of the results file into docs/calibrating.md.

Needs 3 GB of disk, in ``--folder`` or the system's temporary one, and some minutes. The
last line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from alike_layers import CORPORA, Shape, random_samples, write_checkpoint
from page_tables import with_table

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.calibration_cost import CalibrationCost, calibration_cost
from kimi_k3.build.layer_reader import LayerReader
from kimi_k3.config import ModelArgs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "calibrating.md"
RESULTS = ROOT / "benchmarks" / "results" / "calibrate.json"


@dataclass(frozen=True)
class Case:
    """One run: of the deep or the shallow checkpoint, and how."""

    depth: str
    moments: bool
    memory_limit: int


HELD, SPILLED = 1 << 34, 0

CASES = {
    f"{depth}, moments {'on' if moments else 'off'}, states {where}": Case(
        depth, moments, limit
    )
    for depth in ("deep", "shallow")
    for moments in (True, False)
    for where, limit in (("held", HELD), ("on disk", SPILLED))
    if moments or (depth, where) == ("deep", "held")
}


@dataclass(frozen=True)
class Form:
    """How large everything is.

    Both depths store three residual blocks, the last where a KDA layer follows another.
    """

    deep: Shape
    shallow: Shape
    rows: int
    length: int
    step_tokens: int


FULL = Form(Shape(40, 18), Shape(10, 4), rows=4, length=64, step_tokens=128)

#: Layers of a few megabytes; memory and reading mean the same there, speed nothing.
_SMALL: dict[str, Any] = {
    "hidden": 128,
    "heads": 1,
    "expert": 256,
    "experts": 16,
    "top_k": 2,
}
QUICK = Form(
    Shape(14, 6, **_SMALL), Shape(6, 2, **_SMALL), rows=2, length=64, step_tokens=64
)


@dataclass
class Reads:
    """Counts the tensors that a run reads, while it stands before ``LayerReader.read``."""

    names: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def __enter__(self) -> "Reads":
        self._read = original = LayerReader.read
        counts = self

        def read(reader: LayerReader, names: list[str], *rest: Any) -> Any:
            counts.names.update(names)
            counts.nbytes += reader.nbytes(names)
            return original(reader, names, *rest)

        LayerReader.read = read  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *_: object) -> None:
        LayerReader.read = self._read

    @property
    def twice(self) -> int:
        return sum(count > 1 for count in self.names.values())


def cost_of(form: Form, case: Case) -> CalibrationCost:
    """What the dry run says of ``case``."""
    return calibration_cost(
        ModelArgs.from_dict(getattr(form, case.depth).config()),
        rows=form.rows,
        length=form.length,
        step_tokens=form.step_tokens,
        memory_limit=case.memory_limit,
        moments=case.moments,
        corpora=len(CORPORA),
    )


def measure(source: Path, form: Form, case: Case, out: Path) -> dict[str, Any]:
    """Calibrate ``source`` in this process, and what that took."""
    samples = random_samples(source, form.rows, form.length)
    cost = cost_of(form, case)
    resident, held = _resident("VmRSS"), mx.get_active_memory()
    mx.reset_peak_memory()
    asked = _process_read()
    start = time.perf_counter()
    with Reads() as reads:
        calibrate(
            source,
            samples,
            out,
            moments=case.moments,
            step_tokens=form.step_tokens,
            memory_limit=case.memory_limit,
        )
    seconds = time.perf_counter() - start
    peak = mx.get_peak_memory() - held
    read = None if asked is None else _megabytes((_process_read() or 0) - asked)
    return {
        "peak_array_mb": _megabytes(peak),
        "formula_array_mb": _megabytes(cost.array_memory),
        "formula_to_measured": round(cost.array_memory / peak, 3),
        "resident_growth_mb": _megabytes(_resident("VmHWM") - resident),
        "bytes_read": reads.nbytes,
        "bytes_expected": cost.sizes.read,
        "tensors_read": len(reads.names),
        "tensors_read_twice": reads.twice,
        "process_read_mb": read,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(form.rows * form.length / seconds, 1),
        "bytes_per_second": round(reads.nbytes / seconds),
        "gflop_per_second": round(sum(cost.flop.values()) / seconds / 1e9, 1),
    }


def _resident(field: str) -> int:
    """Bytes of this process in memory: now ("VmRSS"), or at most so far ("VmHWM").

    Elsewhere than on Linux at most so far. The system's own count of that begins with
    the parent's on Linux.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else 1024 * peak
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])


def _process_read() -> int | None:
    """Bytes that this process has read so far, from files of any kind."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    line = next(x for x in counters.read_text().splitlines() if x.startswith("rchar"))
    return int(line.split()[1])


def _megabytes(nbytes: int) -> float:
    return round(nbytes / 1e6, 1)


def _in_own_process(name: str, source: Path, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, "--folder", str(source)]
    found = subprocess.run(
        command + ["--quick"] * quick, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def run_all(folder: Path, quick: bool) -> dict[str, Any]:
    """Write both checkpoints into ``folder`` and run every case."""
    form = QUICK if quick else FULL
    sources = {}
    for depth in ("deep", "shallow"):
        sources[depth] = write_checkpoint(folder / depth, getattr(form, depth))
        total = sum(f.stat().st_size for f in sources[depth].glob("*.safetensors"))
        print(f"{depth}: {total / 1e9:.2f} GB written", flush=True)
    load = os.getloadavg()[0]
    cases = {}
    for name, case in CASES.items():
        cases[name] = _in_own_process(name, sources[case.depth], quick)
        print(f"{name}: {cases[name]}", flush=True)
    peaks = {
        where: cases[f"deep, moments on, states {where}"]["peak_array_mb"]
        / cases[f"shallow, moments on, states {where}"]["peak_array_mb"]
        for where in ("held", "on disk")
    }
    return {
        "benchmark": "calibrate",
        "form": asdict(form),
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU",
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "peak_of_deep_to_shallow": {k: round(v, 3) for k, v in peaks.items()},
        "cases": cases,
    }


def table(result: dict[str, Any]) -> str:
    """A row a case, in Markdown."""
    lines = [
        "| checkpoint, moments, hidden states | MLX's peak MB | formula MB "
        "| process grew MB | weights read MB | read twice | tokens/s | MB/s |",
        "|---" * 8 + "|",
    ]
    for name, found in result["cases"].items():
        grown = found["resident_growth_mb"]
        cells = (
            f"{found['peak_array_mb']:.0f}",
            f"{found['formula_array_mb']:.0f}",
            "not taken" if grown is None else f"{grown:.0f}",
            f"{found['bytes_read'] / 1e6:,.0f}",
            f"{found['tensors_read_twice']}",
            f"{found['tokens_per_second']:.1f}",
            f"{found['bytes_per_second'] / 1e6:.0f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str, result: dict[str, Any]) -> str:
    """``page`` with the figures of ``result`` between its markers."""
    return with_table(page, "measured", table(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go, new")
    parser.add_argument(
        "--quick", action="store_true", help="layers of a few megabytes"
    )
    parser.add_argument("--page", action="store_true", help="fill the page and stop")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as scratch:
        if options.case:
            form = QUICK if options.quick else FULL
            out = Path(scratch) / "out"
            result = measure(options.folder, form, CASES[options.case], out)
        else:
            result = run_all(options.folder or Path(scratch), options.quick)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
