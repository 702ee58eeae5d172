"""``kimi-k3 samples``: what a mix of corpora gives, before hours are spent on it."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MixError, SamplesError
from .printing import add_json_argument, print_report
from .verb import Verb

if TYPE_CHECKING:
    from ..build.samples_report import SamplesReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "mix",
        nargs="?",
        help="TOML file of a mix, the name of a shipped one, or a finished .npz file",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="SOURCE",
        help="the checkpoint folder (its two tokenizer files are enough)",
    )
    parser.add_argument(
        "--part",
        choices=("calibration", "held_out", "all"),
        help="which documents: by their hash, so that the parts never overlap "
        "(default: calibration, or what a finished file holds)",
    )
    parser.add_argument("--out", metavar="FILE.npz", help="keep the samples")
    parser.add_argument("--list", action="store_true", help="name the shipped mixes")
    parser.add_argument(
        "--copy",
        nargs=2,
        metavar=("NAME", "FILE"),
        help="copy a shipped mix to a new file, to be edited",
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    if options.list:
        return _list()
    if options.copy:
        return _copy(*options.copy)
    if not options.mix:
        raise MixError(
            "name a mix; --list shows those that come with the package, and --copy NAME "
            "FILE gives you one to edit."
        )
    if not options.tokenizer:
        raise MixError(
            "name the checkpoint folder whose tokenizer to use: --tokenizer …"
        )
    # What transformers says about a missing PyTorch has no meaning here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    report = _report(options)
    print_report(report, options.json)
    return 0


def _report(options: argparse.Namespace) -> "SamplesReport":
    from ..build.samples import (
        Samples,
        load_tokenizer,
        make_samples_and_report,
        open_samples,
    )
    from ..build.samples_report import report_on

    if Path(options.mix).suffix == ".npz":
        if options.out:
            raise SamplesError(
                f"{options.mix} is finished: there is nothing to keep as {options.out}. "
                "Name a mix, or leave --out away."
            )
        part = options.part or Samples.load(options.mix).part
        samples = open_samples(options.mix, options.tokenizer, part)
        tokenizer = load_tokenizer(options.tokenizer)
        return report_on(samples, tokenizer, origin=options.mix)
    if options.out:
        _check_out(Path(options.out))
    part = options.part or "calibration"
    samples, report = make_samples_and_report(
        options.mix, options.tokenizer, part, progress=_Progress().show
    )
    if options.out:
        samples.save(options.out)
    return report


def _check_out(path: Path) -> None:
    if path.suffix != ".npz":
        raise SamplesError(f"--out {path} does not end in .npz; call it {path}.npz.")
    if path.is_dir():
        raise SamplesError(f"--out {path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise SamplesError(f"--out: {path.parent} is no folder; create it first.")


def _list() -> int:
    from ..build.mix_file import shipped_mixes

    for name, path in shipped_mixes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:10}{first.lstrip('# ')}")
    return 0


def _copy(name: str, target: str) -> int:
    from ..build.mix_file import copy_mix

    print(f"{copy_mix(name, target)} is yours to edit; its comments tell how.")
    return 0


class _Progress:
    """Rewrites a line on a terminal, or now and then prints one; nothing if quick."""

    QUIET, ON_TERMINAL, IN_A_LOG = 2.0, 0.2, 30.0  # seconds

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next: float | None = None
        self._shown = False

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._next is None:
            self._next = now + self.QUIET
        finished = what == "tokens" and done >= total
        if now < self._next and not (finished and self._shown):
            return
        self._next = now + (self.ON_TERMINAL if self._terminal else self.IN_A_LOG)
        self._shown = True
        line = f"{what}: {done:,}" + (f" of {total:,}" if total else "")
        if self._terminal:
            end = "\n" if finished else ""
            print(f"\r{line:<70}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


VERB = Verb(
    "make samples of a mix of corpora and report what is in them",
    "  kimi-k3 samples --list\n"
    "  kimi-k3 samples --copy general mix.toml\n"
    "  kimi-k3 samples mix.toml --tokenizer ./Kimi-K3\n"
    "  kimi-k3 samples mix.toml --tokenizer ./Kimi-K3 --part held_out --out test.npz\n"
    "  kimi-k3 samples test.npz --tokenizer ./Kimi-K3\n\n"
    "A mix is a TOML file: how many tokens, in rows of what length, and for each corpus\n"
    "its share and where its text lies (files, JSONL, chats, a streamed dataset).\n"
    "The report shows tokens and share of each corpus, bytes per token and the scripts\n"
    "found; a line that begins with `flag` wants a look. Nothing is fetched from a\n"
    "network unless the mix names a dataset.\n",
    add_arguments,
    run,
)
