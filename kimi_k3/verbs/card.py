"""``kimi-k3 card``: a model card for the Hugging Face hub."""

import argparse

from .report import add_results_arguments
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder of any format")
    add_results_arguments(parser)
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="FILE",
        help="what `kimi-k3 bench` printed for it; may be given more than once",
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the card, as ./build/README.md"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FILE if it is there"
    )


def run(options: argparse.Namespace) -> int:
    from ..reporting.card import card

    file = card(
        options.build,
        options.out,
        evaluations=options.evaluation,
        generations=options.generation,
        benchmarks=options.benchmark,
        replace=options.force,
    )
    print(f"written: {file}")
    return 0


VERB = Verb(
    "write a model card for the hub, in which every number comes from a results file",
    "  kimi-k3 card ./build --out ./build/README.md\n"
    "  kimi-k3 bench ./build > bench.txt\n"
    "  kimi-k3 card ./build --evaluation ./quality --generation ./answers \\\n"
    "                       --benchmark bench.txt --out ./build/README.md\n\n"
    "Sizes are read from the headers of the build, provenance from the record in its\n"
    "config, quality, answers and speed from the files that are named. What there is no\n"
    "file for is stated as not measured. Nothing is uploaded; docs/reports.md tells how.\n",
    add_arguments,
    run,
)
