"""``kimi-k3 demo``: the nano, and stock commands that run it."""

import argparse
import os
from pathlib import Path

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="where the pruned copy is kept"
    )
    parser.add_argument(
        "--report",
        metavar="FOLDER",
        help="judge the pruned copy instead, and write a report and a model card there",
    )


def run(options: argparse.Namespace) -> int:
    from ..nano.cache import default_cache_dir

    folder = options.cache_dir or default_cache_dir(os.environ)
    if options.report:
        return _report(Path(options.report), Path(folder))
    from ..nano.demo import run_demo

    report = run_demo(folder, environment=os.environ, progress=_say)
    return 1 if report.problems else 0


def _report(folder: Path, cache_dir: Path) -> int:
    # What transformers says about a missing PyTorch has no meaning here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from ..nano.demo_report import report_demo

    try:
        pages = report_demo(folder, cache_dir, _say)
    except KeyboardInterrupt:
        _say("stopped. The same command goes on where it was.")
        return 130
    _say(f"report: {pages.report}\ncard:   {pages.card}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


VERB = Verb(
    "let stock commands run the small trained K3 that ships, whole and pruned",
    "  kimi-k3 demo\n  kimi-k3 demo --cache-dir ./small-k3\n"
    "  kimi-k3 demo --report ./report\n\n"
    "With --report the pruned copy is judged by the whole nano: KL, perplexity and\n"
    "agreement on shipped conversations, answers, speed; FOLDER gets report.html and\n"
    "README.md, a model card. It takes some minutes on two cores, and more packages:\n"
    "pip install 'kimi-k3-mlx[plot,evaluate]'. Without it the exit code is 1\n"
    "if a step did not go as it should.\n",
    add_arguments,
    run,
)
