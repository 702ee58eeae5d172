"""``kimi-k3 saliency``: what a calibration found, in figures, words and pictures."""

import argparse
import sys
from pathlib import Path

from ..errors import SaliencyError
from .printing import add_json_argument, print_report
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "saliency", help="the folder that calibrate filled, or its saliency.npz"
    )
    parser.add_argument(
        "--weight",
        action="append",
        type=corpus_weight,
        metavar="CORPUS=SHARE",
        help="let a corpus stand for this share of the text; those not named for none",
    )
    parser.add_argument(
        "--criterion",
        default="reap_sum",
        metavar="NAME",
        help="rank by reap_sum (default), reap_mean, relative, frequency or gate",
    )
    parser.add_argument(
        "--top",
        type=float,
        default=0.27,
        metavar="SHARE",
        help="the share of the experts that concentration and overlap are about",
    )
    parser.add_argument("--plot", metavar="FOLDER", help="draw pictures (PNG) there")
    add_json_argument(parser)


def corpus_weight(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form CORPUS=SHARE")
    return name, float(share)


def run(options: argparse.Namespace) -> int:
    from ..build.saliency import SaliencyTable
    from ..build.saliency_report import saliency_report

    refuse_unfinished(Path(options.saliency))
    table = SaliencyTable.load(options.saliency)
    report = saliency_report(
        table,
        criterion=options.criterion,
        weights=stated_once(options.weight),
        top=options.top,
    )
    if options.plot:
        from ..build.saliency_plot import draw

        for file in draw(table, report, options.plot):
            print(f"drawn: {file}", file=sys.stderr)
    print_report(report, options.json)
    return 0


def refuse_unfinished(folder: Path) -> None:
    from ..build.saliency import FILE_NAME

    if not folder.is_dir() or (folder / FILE_NAME).exists():
        return
    from ..build.journal import RUN  # which loads MLX, and is seldom needed

    if (folder / RUN).exists():
        raise SaliencyError(
            f"{folder} holds a calibration that is not finished. Start the same "
            "`kimi-k3 calibrate` again: it goes on where it was."
        )


def stated_once(weights: list[tuple[str, float]] | None) -> dict[str, float] | None:
    named = dict(weights or ())
    if len(named) < len(weights or ()):
        names = ", ".join(name for name, _ in weights or ())
        raise SaliencyError(f"--weight names a corpus twice: {names}. Give each once.")
    return named or None


VERB = Verb(
    "show what a calibration found: which experts matter, for which text",
    "  kimi-k3 saliency ./calibration\n"
    "  kimi-k3 saliency ./calibration --weight code=0.7 --weight chinese=0.3\n"
    "  kimi-k3 saliency ./calibration --criterion relative --plot ./pictures\n\n"
    "Shows how concentrated saliency is, how much stays if experts are dropped, which\n"
    "experts were never chosen, how uneven the load is, and how far the corpora need\n"
    "the same experts. docs/saliency.md explains each figure. --plot needs matplotlib:\n"
    "pip install 'kimi-k3-mlx[plot]'.\n",
    add_arguments,
    run,
)
