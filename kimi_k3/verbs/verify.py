"""``kimi-k3 verify``: is a checkpoint folder whole, and is it its source's build."""

import argparse
import sys
import time

from .printing import add_json_argument, print_report
from .progress_lines import ProgressLines, bytes_text, duration_text
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder")
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help="the checkpoint that it was converted from: compare every number with it",
    )
    parser.add_argument(
        "--experts",
        type=expert_count,
        default="all",
        metavar="all|N",
        help="compare all experts (default), or N of each bank in each layer",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="for drawing N experts"
    )
    add_json_argument(parser)


def expert_count(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor a count")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from ..build.verify import verify

    report = verify(
        options.build,
        options.source,
        experts=options.experts,
        seed=options.seed,
        progress=_Progress(),
    )
    print_report(report, options.json)
    return 0 if report.passed else 1


class _Progress:
    """A line for each thing that is read: share done, time left."""

    def __init__(self) -> None:
        self._lines = ProgressLines()
        self._what = ""
        self._started = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._started = what, now
        line = progress_text(what, done, total, now - self._started)
        if done < total:
            self._lines.moving(line)
        elif sys.stderr.isatty():
            self._lines.step(line)


def progress_text(what: str, done: int, total: int, seconds: float) -> str:
    """What is read, the share that has been, and the time left at this speed."""
    text = f"{what} {done / max(total, 1):4.0%} of {bytes_text(total)}"
    if done and seconds >= 1:
        left = seconds * (total - done) / done
        text += f" at {bytes_text(done / seconds)}/s  {duration_text(left)} left"
    return text


VERB = Verb(
    "look a checkpoint folder through: whole, sane, and what its record says",
    "  kimi-k3 verify ./build\n"
    "  kimi-k3 verify ./build --source ./Kimi-K3\n"
    "  kimi-k3 verify ./build --source ./Kimi-K3 --experts 4\n"
    "  kimi-k3 verify ./build --json\n\n"
    "Takes local folders. Of a folder of any format: headers, float tensors and scales.\n"
    "Of a build that `kimi-k3 convert` made also: config, shards and tensors as its plan\n"
    "makes them, and the recorded hash of every shard. With --source: MXFP4 experts byte\n"
    "for byte, router rows and biases in the kept order, all that is not quantised bit\n"
    "for bit, and the error of all that is.\n"
    "docs/verifying.md says what each check sees and what it cannot see. Exit code 1 if\n"
    "there is a fault, or a check could not be done.\n",
    add_arguments,
    run,
)
