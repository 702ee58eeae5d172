"""Run mlx-lm's own tests without and with this package, and compare test by test.

    python benchmarks/host_tests/run.py
    python benchmarks/host_tests/run.py --sdist mlx_lm-0.32.2 --only test_models.py

The tests are those of mlx-lm's source distribution, of the version that is installed;
its files stay untouched. "Without" sets ``KIMI_K3_MLX=off``, or is another interpreter
that lacks the package (``--python-without``). The model that the tests would download is
a tiny random one (``tiny_hub.py``), and the hub is offline. Three files run once more
with a Kimi K3 as that model.

Exit status: 0 if every test that passes without the package passes with it, 1 if one
does not, 2 if the comparison itself cannot be made. The last line of the output is one
JSON document; ``--out FILE`` also writes it.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import Comparison, compare
from watch import HERE, FileRun, run_file, tail_of_log


@dataclass(frozen=True)
class Job:
    """One test file with one model behind the hub name; ``weight`` is rough seconds."""

    file: str
    weight: float
    model: str = "qwen2"
    leave_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.file + (" on kimi_k3" if self.model == "kimi_k3" else "")


JOBS = (
    Job("test_tool_parsing.py", 4),
    Job("test_gated_delta.py", 4),
    Job("test_utils.py", 8),
    Job("test_prompt_cache.py", 10),
    Job("test_generate.py", 15),
    Job("test_server.py", 18),
    Job("test_models.py", 20),
    Job("test_prompt_cache.py", 10, "kimi_k3"),
    # These give the model another architecture's caches, and leave them there when it
    # fails on them, as K3 does in both classes.
    Job(
        "test_generate.py",
        15,
        "kimi_k3",
        (
            "TestGenerate::test_batch_sliding_window",
            "TestGenerate::test_batch_continued_generation",
        ),
    ),
    Job("test_server.py", 18, "kimi_k3"),
)
FILES = sorted({job.file for job in JOBS})

SIDES = ("without", "with")


class CannotCompare(Exception):
    """The two runs would not say anything about this package."""


def find_sdist(given: Path | None, scratch: Path) -> Path:
    """The unpacked source distribution of the installed mlx-lm."""
    wanted = version("mlx-lm")
    if given is None:
        say(f"Fetching the source distribution of mlx-lm {wanted} ...")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", str(scratch)]
        done = subprocess.run([*command, f"mlx-lm=={wanted}"], check=False)
        archives = list(scratch.glob("mlx_lm-*.tar.gz"))
        if done.returncode or not archives:
            raise CannotCompare(
                f"pip could not download the source distribution of mlx-lm {wanted}; "
                "give an unpacked one with --sdist FOLDER."
            )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        given = next(folder for folder in scratch.glob("mlx_lm-*") if folder.is_dir())
    lines = (given / "PKG-INFO").read_text(encoding="utf-8").splitlines()
    found = next(x.split()[1] for x in lines if x.startswith("Version:"))
    if found != wanted:
        raise CannotCompare(
            f"{given.name} is mlx-lm {found}, but {wanted} is installed; its tests "
            "belong to its own version."
        )
    return given.resolve()


def digest(folder: Path) -> str:
    """A hash over the names and bytes of all files of ``folder``."""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            total.update(str(file.relative_to(folder)).encode())
            total.update(file.read_bytes())
    return total.hexdigest()


def environment(side: str, model: str, scratch: Path) -> dict[str, str]:
    """Variables of a test process: offline, ``model`` in the hub, writes to ``scratch``."""
    inherited = {k: v for k, v in os.environ.items() if k != "KIMI_K3_MLX"}
    own = {
        "HF_HOME": str(scratch / model),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if side == "without":
        own["KIMI_K3_MLX"] = "off"
    return inherited | own


def write_models(models: set[str], scratch: Path) -> None:
    """Write each tiny model into the hub cache that both sides read."""
    code = "import pathlib, sys, tiny_hub as t; t.write_hub_cache(pathlib.Path("
    for model in sorted(models):
        hub = scratch / model / "hub"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}sys.argv[1]), sys.argv[2])", hub, model],
            env={**environment("without", model, scratch), "PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotCompare(f"A tiny {model} could not be written:\n{done.stderr}")


def check_witness(side: str, job: Job, run: FileRun, sdist: Path) -> None:
    """Raise CannotCompare unless ``run`` is one of ``side``, told by whose class answered.

    A run that collected nothing, or that imported the distribution's own ``mlx_lm``,
    is none either; nor is one on a K3 that never asked for its class.
    """
    where = f"{job.name}, {side}"
    if run.broken or not run.collected or not run.witness:
        why = run.broken or "pytest reported no tests, or did not end"
        raise CannotCompare(f"{where}: {why}")
    if Path(run.witness["mlx_lm"]).is_relative_to(sdist):
        raise CannotCompare(f"{where}: mlx_lm came from the distribution.")
    wanted = {"without": "mlx_lm", "with": "kimi_k3"}[side]
    found = below(run.witness["class_file"])
    if not found.startswith(wanted + "/"):
        raise CannotCompare(
            f"{where}: the class of kimi_k3 came from {found}, not from "
            f"{wanted}. `kimi-k3 doctor` says why."
        )
    if job.model == "kimi_k3" and not run.witness["tests_asked_for_k3"]:
        raise CannotCompare(f"{where}: no test loaded the K3.")


def below(file: str) -> str:
    """``file`` from its package on: ``mlx_lm/models/kimi_k3.py``."""
    parts = Path(file).parts
    roots = [i for i, part in enumerate(parts) if part in ("mlx_lm", "kimi_k3")]
    return "/".join(parts[roots[-1] :]) if roots else file


def run_all(
    jobs: Sequence[Job],
    pythons: dict[str, str],
    sdist: Path,
    scratch: Path,
    limit: float,
) -> dict[str, dict[str, FileRun]]:
    """Every job on both sides, by its name, with a word on standard error about it."""
    runs: dict[str, dict[str, FileRun]] = {job.name: {} for job in jobs}
    plan = [(job, side) for job in jobs for side in SIDES]
    total, done = sum(job.weight for job, _ in plan), 0.0
    began = time.monotonic()
    for number, (job, side) in enumerate(plan, start=1):
        label = f"[{number}/{len(plan)}] {job.name}, {side}"

        def progress(
            run: FileRun, label: str = label, before: float = done, job: Job = job
        ) -> None:
            part = before + job.weight * run.done / max(1, len(run.collected))
            spent = time.monotonic() - began
            left = f", about {spent * (total / part - 1):.0f} s left" if part else ""
            say(f"{label}: {run.done}/{len(run.collected)} tests, {spent:.0f} s{left}")

        run = run_file(
            sdist / "tests" / job.file,
            python=pythons[side],
            environment=environment(side, job.model, scratch),
            scratch=scratch,
            limit=limit,
            leave_out=job.leave_out,
            progress=progress,
        )
        progress(run)
        done += job.weight
        try:
            check_witness(side, job, run, sdist)
        except CannotCompare as error:
            raise CannotCompare(f"{error}\n{tail_of_log(scratch)}") from error
        runs[job.name][side] = run
    return runs


def report(runs: dict[str, dict[str, FileRun]], compared: dict[str, Comparison]) -> str:
    """The table of all files and what differs, for people."""
    rows = [
        f"{'file':33}{'passed':>14}{'failed':>14}{'skipped':>14}"
        f"{'subtests':>14}   differ"
    ]
    for file, comparison in compared.items():
        cells = "".join(
            f"{f'{a} -> {b}':>14}" for a, b in comparison.counts_of_both().values()
        )
        rows.append(f"{file:33}{cells}{len(comparison.differences):>9}")
    for file, comparison in compared.items():
        for name, change in comparison.differences.items():
            rows.append(f"{file} {name}: {change['without']} -> {change['with']}")
            if change["message"]:
                rows.append(f"    {change['message']}")
        for name, why in comparison.fail_alike.items():
            rows.append(f"{file} {name}: fails in both: {why}")
    one = next(iter(runs.values()))
    for side in SIDES:
        rows.append(f"class of kimi_k3 {side}: {one[side].witness['class_file']}")
    return "\n".join(rows)


def as_json(
    runs: dict[str, dict[str, FileRun]], compared: dict[str, Comparison]
) -> dict[str, Any]:
    """The results document: counts, differences, what cannot run, versions, machine."""
    import mlx.core as mx

    names = ("mlx", "mlx-lm", "kimi-k3-mlx", "transformers", "tokenizers", "pytest")
    one = next(iter(runs.values()))
    answers = {
        side: {k: v and below(v) for k, v in one[side].witness["answers"].items()}
        for side in SIDES
    }
    return {
        "benchmark": "host_tests",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{mx.default_device()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "class": {side: below(one[side].witness["class_file"]) for side in SIDES},
        "answers": answers,
        "files": {
            file: comparison.summary()
            | {
                "seconds": {side: runs[file][side].seconds for side in SIDES},
                "slow": {side: runs[file][side].slow for side in SIDES},
                "asks_for_k3": runs[file]["with"].witness["tests_asked_for_k3"],
            }
            for file, comparison in compared.items()
        },
        "left_out": {job.name: job.leave_out for job in JOBS if job.leave_out},
        "regressions": sum(len(c.regressions) for c in compared.values()),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sdist", type=Path, help="unpacked source distribution")
    parser.add_argument(
        "--only", nargs="+", choices=FILES, default=FILES, metavar="FILE"
    )
    parser.add_argument(
        "--limit", type=float, default=180, help="seconds that one test may take"
    )
    parser.add_argument(
        "--python-without",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of an environment without this package",
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    jobs = [job for job in JOBS if job.file in options.only]
    pythons = {"without": options.python_without, "with": sys.executable}
    with TemporaryDirectory(prefix="host-tests-") as folder:
        scratch = Path(folder).resolve()
        try:
            sdist = find_sdist(options.sdist, scratch)
            before = digest(sdist)
            write_models({job.model for job in jobs}, scratch)
            runs = run_all(jobs, pythons, sdist, scratch, options.limit)
            if digest(sdist) != before:
                raise CannotCompare(f"A run changed a file of {sdist.name}.")
        except CannotCompare as error:
            say(str(error))
            return 2
    compared = {
        file: compare(run["without"], run["with"]) for file, run in runs.items()
    }
    print(report(runs, compared))
    result = as_json(runs, compared)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if result["regressions"] else 0


if __name__ == "__main__":
    sys.exit(main())
