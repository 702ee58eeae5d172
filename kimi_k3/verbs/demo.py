"""``kimi-k3 demo``: the nano, and stock commands that run it."""

import argparse
import os

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="where the pruned copy is kept"
    )


def run(options: argparse.Namespace) -> int:
    from ..nano.cache import default_cache_dir
    from ..nano.demo import run_demo

    folder = options.cache_dir or default_cache_dir(os.environ)
    report = run_demo(
        folder, environment=os.environ, progress=lambda line: print(line, flush=True)
    )
    return 1 if report.problems else 0


VERB = Verb(
    "let stock commands run the small trained K3 that ships, whole and pruned",
    "  kimi-k3 demo\n  kimi-k3 demo --cache-dir ./small-k3\n\n"
    "Exit code 1 if a step did not go as it should.\n",
    add_arguments,
    run,
)
