"""``kimi-k3 report``: all that is known of a build, as one page."""

import argparse
import sys

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder of any format")
    add_results_arguments(parser)
    parser.add_argument(
        "--calibration",
        metavar="FOLDER",
        help="what `kimi-k3 calibrate` wrote of the source, for pictures of saliency",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="the plan that it was made by, if it holds none itself",
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="where page and pictures go"
    )


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    """The results that a page and a card are made from."""
    parser.add_argument(
        "--evaluation",
        action="append",
        default=[],
        metavar="OUT",
        help="what `kimi-k3 evaluate` wrote; may be given more than once",
    )
    parser.add_argument(
        "--generation",
        action="append",
        default=[],
        metavar="OUT",
        help="what `kimi-k3 generation` wrote; may be given more than once",
    )


def run(options: argparse.Namespace) -> int:
    from ..reporting.report import report

    page = report(
        options.build,
        options.out,
        evaluations=options.evaluation,
        generations=options.generation,
        calibration=options.calibration,
        plan=options.plan,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"written: {page}")
    return 0


VERB = Verb(
    "show all that is known of a build on one page: sizes, quality, plan, pictures",
    "  kimi-k3 report ./build --out ./report\n"
    "  kimi-k3 report ./build --evaluation ./quality --generation ./answers \\\n"
    "                         --calibration ./calibration --out ./report\n"
    "  kimi-k3 report ./build --evaluation ./quality --evaluation ./quality-of-another \\\n"
    "                         --out ./report\n\n"
    "Writes FOLDER/report.html, a page that needs no network and no scripts, and its\n"
    "pictures (PNG) beside it. Each table names the file that its numbers are from; what\n"
    "there is no file for was not measured. An evaluation of another build, by the same\n"
    "teacher and samples, is compared with this one. Results of other builds are refused\n"
    "otherwise. Drawing needs matplotlib: pip install 'kimi-k3-mlx[plot]'.\n"
    "docs/reports.md goes through the page.\n",
    add_arguments,
    run,
)
