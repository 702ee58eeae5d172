"""``kimi-k3 doctor``: is this machine ready, and whose class answers."""

import argparse
import os

from .printing import add_json_argument, print_report
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="instead compare, time and tune each Metal kernel on this GPU",
    )


def run(options: argparse.Namespace) -> int:
    if options.kernels:
        return check_kernels(options.json)
    from ..machine.doctor import diagnose

    report = diagnose()
    print_report(report, options.json)
    return 0 if report.healthy else 1


def check_kernels(as_json: bool) -> int:
    # Before MLX reads it: the references are to be float32 in full.
    os.environ["MLX_ENABLE_TF32"] = "0"
    from ..machine.kernels_check import check_kernels

    report = check_kernels()
    print_report(report, as_json)
    return 0 if report.passed else 1


VERB = Verb(
    "show versions, whose K3 class answers and why, the machine, and what to mend",
    "  kimi-k3 doctor\n  kimi-k3 doctor --json\n  kimi-k3 doctor --kernels\n\n"
    "Exit code 1 if something stops K3 from running, or if a kernel is wrong.\n"
    "With --kernels the fastest way to divide a kernel's work is kept for this chip\n"
    "in ~/.cache/kimi-k3-mlx.\n",
    add_arguments,
    run,
)
