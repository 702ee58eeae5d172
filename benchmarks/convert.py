"""Convert random checkpoints of two depths: speed beside a plain copy, and memory.

    python benchmarks/convert.py --out benchmarks/results/convert.json

Writes two source-format checkpoints with random weights, 40 and 10 layers that are alike
(64 experts each, about 2 GB and 0.5 GB). Then:

- ``speed``: converts the deep one without a plan, and copies the same files with
  ``shutil.copyfile``, by turns, each file synced to the disk; medians of the rounds.
  ``share_of_copy`` is the time of the copy over that of the conversion. Both read from
  the system's cache what was written before, so the figures are those of writing, and
  worth something beside each other only.
- ``memory``: :data:`CASES`, each in a process of its own: how far MLX's arrays and the
  process grew at most, and how many of the checkpoint's layers that is.

``--page`` puts the figures of the results file into docs/converting.md.

Needs 7 GB of disk, in ``--folder`` or the system's temporary one, and some minutes. The
last line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from alike_layers import Shape, write_checkpoint
from page_tables import with_table

from kimi_k3.checkpoint.source_layout import layer_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.conversion.convert import convert
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "converting.md"
RESULTS = ROOT / "benchmarks" / "results" / "convert.json"

#: Bits of the classes that the graded plan quantises.
CLASSES = {"mla.o_proj": 6, "lm_head": 8}

#: Experts of a layer that the graded plan quantises: a CPU's time is long, and memory
#: does not depend on them.
LOW = 2


@dataclass(frozen=True)
class Form:
    """How large everything is, and how often speed is taken."""

    deep: Shape
    shallow: Shape
    rounds: int


FULL = Form(Shape(40, 18, expert=704), Shape(10, 4, expert=704), rounds=7)

#: Layers of a few megabytes: memory means the same there, speed nothing.
_SMALL: dict[str, Any] = {
    "hidden": 256,
    "heads": 1,
    "expert": 256,
    "experts": 16,
    "top_k": 2,
}
QUICK = Form(Shape(12, 5, **_SMALL), Shape(5, 2, **_SMALL), rounds=1)

CASES = {
    f"{depth}, {plan}": (depth, plan)
    for plan in ("pass-through", "graded")
    for depth in ("deep", "shallow")
}


def graded_plan(config: dict[str, Any]) -> ExpertPlan:
    """Of each layer half the experts as they are, :data:`LOW` with 2 bits."""
    text = ModelArgs.from_dict(config).text_config
    whole = ExpertPlan.identity(text)
    count = text.num_experts
    layer = LayerPlan(tuple(range(0, count, 2)), tuple(range(1, 2 * LOW, 2)))
    return ExpertPlan(
        experts=count,
        top_k=whole.top_k,
        layers=dict.fromkeys(whole.layers, layer),
        bits=CLASSES,
        about={"kind": "graded"},
    )


def layer_bytes(config: dict[str, Any]) -> int:
    """Bytes of a layer of the source, the largest there is."""
    text = ModelArgs.from_dict(config).text_config
    heads = (text.linear_attn_config.num_heads,)
    return max(
        sum(tensor.nbytes for tensor in layer_tensors(text, layer, heads))
        for layer in range(text.num_hidden_layers)
    )


def measure(source: Path, plan: str, out: Path) -> dict[str, Any]:
    """Convert ``source`` in this process, and what that took."""
    config = json.loads((source / "config.json").read_text())
    wanted = graded_plan(config) if plan == "graded" else None
    layer = layer_bytes(config)
    mx.eval(mx.zeros(1))
    resident, held = _resident("VmRSS"), mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    convert(source, out, wanted)
    seconds = time.perf_counter() - start
    arrays = mx.get_peak_memory() - held
    grown = _resident("VmHWM") - resident
    written = sum(path.stat().st_size for path in out.iterdir())
    return {
        "layer_mb": _megabytes(layer),
        "peak_array_mb": _megabytes(arrays),
        "peak_array_layers": round(arrays / layer, 3),
        "resident_growth_mb": _megabytes(grown),
        "resident_growth_layers": round(grown / layer, 3),
        "written_mb": _megabytes(written),
        "seconds": round(seconds, 1),
    }


def copied(source: Path, out: Path) -> None:
    """Copy every file, each safe on the disk before the next."""
    out.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, out / path.name)
        descriptor = os.open(out / path.name, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def speed(source: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Seconds of converting and of copying ``source``, by turns; the first is left out."""
    seconds: dict[str, list[float]] = {"convert": [], "copy": []}
    ways = {
        "convert": lambda out: convert(source, out),
        "copy": lambda out: copied(source, out),
    }
    for number in range(rounds + 1):
        # Whoever begins finds another disk than who follows.
        for name in sorted(ways, reverse=number % 2 == 1):
            out = scratch / name
            os.sync()
            start = time.perf_counter()
            ways[name](out)
            taken = time.perf_counter() - start
            if number:
                seconds[name].append(taken)
            shutil.rmtree(out)
            print(f"{name}: {taken:.2f} s", flush=True)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "bytes": nbytes,
        "seconds": {n: [round(s, 2) for s in found] for n, found in seconds.items()},
        "median_seconds": {n: round(s, 2) for n, s in medians.items()},
        "mb_per_second": {n: round(nbytes / s / 1e6) for n, s in medians.items()},
        "share_of_copy": round(medians["copy"] / medians["convert"], 3),
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


def _megabytes(nbytes: int) -> float:
    return round(nbytes / 1e6, 1)


def _in_own_process(name: str, source: Path, scratch: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, "--folder", str(source)]
    found = subprocess.run(
        [*command, "--scratch", str(scratch)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


def run_all(folder: Path, form: Form) -> dict[str, Any]:
    """Write both checkpoints into ``folder``, time the deep one and run every case."""
    sources = {}
    for depth in ("deep", "shallow"):
        sources[depth] = write_checkpoint(folder / depth, getattr(form, depth))
        total = sum(f.stat().st_size for f in sources[depth].glob("*.safetensors"))
        print(f"{depth}: {total / 1e9:.2f} GB written", flush=True)
    load = os.getloadavg()[0]
    times = speed(sources["deep"], folder, form.rounds)
    print(times, flush=True)
    cases = {}
    for name, (depth, _) in CASES.items():
        out = folder / "case"
        cases[name] = _in_own_process(name, sources[depth], out)
        shutil.rmtree(out)
        print(f"{name}: {cases[name]}", flush=True)
    return {
        "benchmark": "convert",
        "form": asdict(form),
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU",
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "versions": {name: version(name) for name in ("mlx", "kimi-k3-mlx")},
        "speed": times,
        "memory": cases,
    }


def table(result: dict[str, Any]) -> str:
    """Speed in a sentence and memory a row a case, in Markdown."""
    times = result["speed"]
    lines = [
        f"{times['bytes'] / 1e9:.2f} GB: copied at "
        f"{times['mb_per_second']['copy']:,} MB/s, converted at "
        f"{times['mb_per_second']['convert']:,} MB/s: "
        f"{times['share_of_copy']:.0%} of the copy's speed.",
        "",
        "| checkpoint, plan | a layer, MB | MLX's peak MB | in layers "
        "| process grew MB | in layers |",
        "|---" * 6 + "|",
    ]
    for name, found in result["memory"].items():
        cells = (
            f"{found['layer_mb']:.0f}",
            f"{found['peak_array_mb']:.0f}",
            f"{found['peak_array_layers']:.2f}",
            f"{found['resident_growth_mb']:.0f}",
            f"{found['resident_growth_layers']:.2f}",
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
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    mx.set_default_device(mx.cpu)
    if options.case:
        result = measure(options.folder, CASES[options.case][1], options.scratch)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            form = QUICK if options.quick else FULL
            result = run_all(options.folder or Path(scratch), form)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
