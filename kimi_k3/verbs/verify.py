"""``kimi-k3 verify``: is a checkpoint folder whole."""

import argparse

from .printing import add_json_argument, print_report, progress_line
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from ..build.verify import verify_build

    report = verify_build(options.build, progress=progress_line("read"))
    print_report(report, options.json)
    return 0 if report.passed else 1


VERB = Verb(
    "look a checkpoint folder through: whole, consistent, numbers sane",
    "  kimi-k3 verify ./build\n  kimi-k3 verify ./build --json\n\n"
    "Takes a local folder. Reads headers, float tensors and scales; packed codes are\n"
    "not read. Every fault of the files is listed; of config and tensors that do not\n"
    "fit each other, the first. Exit code 1 if there is a fault.\n",
    add_arguments,
    run,
)
