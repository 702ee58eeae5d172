"""``kimi-k3 calibrate``: which experts of a checkpoint matter for which text."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CalibrationError
from . import calibrate_dry_run
from .printing import add_json_argument
from .progress_lines import ProgressLines, bytes_text, duration_text
from .verb import Verb

if TYPE_CHECKING:
    from ..build.pass_progress import Progress
    from ..build.saliency import SaliencyTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", help="a checkpoint folder, of the release or of any build"
    )
    parser.add_argument(
        "--samples",
        metavar="MIX",
        help="TOML file of a mix, the name of a shipped one, or an .npz of samples",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where results go, and what is kept meanwhile"
    )
    parser.add_argument(
        "--moments",
        choices=("on", "off"),
        default="on",
        help="record what each matrix reads, which choosing its bits needs "
        "(default: on)",
    )
    parser.add_argument(
        "--step-tokens",
        type=int,
        metavar="N",
        help="tokens that go through a layer together (default: 2048)",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="hidden states to hold in memory; the others are read from FOLDER. Two "
        "layers and a step's activations come on top (default: a quarter of this "
        "machine's memory)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="discard the partial results in FOLDER and start over",
    )
    add_json_argument(parser)
    calibrate_dry_run.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return calibrate_dry_run.dry_run(options)
    for name, given in (
        ("a checkpoint folder", options.source),
        ("samples with --samples", options.samples),
        ("a folder for the results with --out", options.out),
    ):
        if not given:
            raise CalibrationError(f"name {name}; --help shows examples.")
    # What transformers says about a missing PyTorch has no meaning here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from ..build.calibrate import STEP_TOKENS, calibrate

    lines = _Lines()
    step_tokens, limit = options.step_tokens, options.memory_limit
    if limit is not None and not 0 <= limit < float("inf"):
        raise CalibrationError(f"--memory-limit is {limit:g}, wanted 0 GB or more.")
    try:
        table = calibrate(
            options.source,
            options.samples,
            options.out,
            moments=options.moments == "on",
            step_tokens=STEP_TOKENS if step_tokens is None else step_tokens,
            memory_limit=None if limit is None else int(limit * 1e9),
            restart=options.restart,
            progress=lines.layer,
            samples_progress=lines.samples,
            tell=lines.note,
        )
    except KeyboardInterrupt:
        lines.note(
            "stopped. Resume with the same command: finished layers are kept in "
            f"{options.out}."
        )
        return 130
    finally:
        lines.end()
    _print_result(table, Path(options.out), options.json)
    return 0


def _print_result(table: "SaliencyTable", out: Path, as_json: bool) -> None:
    tokens = {
        name: int(count)
        for name, count in zip(table.corpora, table.tokens, strict=True)
    }
    if as_json:
        document = {
            "out": str(out),
            "tokens": tokens,
            "layers": table.layers.tolist(),
            "experts": table.experts.tolist(),
            "top_k": table.top_k,
            "digest": table.digest,
        }
        print(json.dumps(document, indent=2))
        return
    most, least = int(table.experts.max()), int(table.experts.min())
    experts = f"{most}" if most == least else f"{least} to {most}"
    print(
        f"{out}: {len(table.layers)} layers of {experts} experts, on "
        f"{sum(tokens.values()):,} tokens of {', '.join(tokens)}.\n"
        f"`kimi-k3 saliency {out}` shows which of them matter."
    )


class _Lines(ProgressLines):
    """A line a layer, and on a terminal one that moves."""

    def samples(self, what: str, done: int, total: int) -> None:
        """Show how far the samples are."""
        of_all = f" of {total:,}" if total else ""
        self.moving(f"samples, {what}: {done:,}{of_all}")

    def layer(self, progress: "Progress") -> None:
        """Show how far the layers are; a finished one keeps its line."""
        line = progress_text(progress)
        if progress.finished:
            self.step(line)
        else:
            self.moving(line)


def progress_text(progress: "Progress") -> str:
    """One line: layer, share of its rows, bytes gone through, speed, time left."""
    width = len(str(progress.layers))
    share = progress.rows_done / progress.rows
    left = progress.seconds_left
    parts = [
        f"layer {progress.layer + 1:{width}} of {progress.layers}",
        f"{share:4.0%}",
        f"{bytes_text(progress.bytes_done)} at {bytes_text(progress.bytes_per_second)}/s",
        f"{duration_text(progress.seconds)} gone",
    ]
    if left is not None:
        parts.append(f"{duration_text(left)} left")
    return "  ".join(parts)


VERB = Verb(
    "record which experts matter for which text, one layer in memory at a time",
    "  kimi-k3 calibrate ./Kimi-K3 --samples mix.toml --out ./calibration\n"
    "  kimi-k3 calibrate ./Kimi-K3 --samples general --out ./calibration\n"
    "  kimi-k3 calibrate --dry-run --samples mix.toml --memory-limit 64\n"
    "  kimi-k3 saliency ./calibration\n\n"
    "Weights are read once, layer by layer, while the layer before computes. FOLDER gets\n"
    "saliency.npz (per corpus and expert: tokens, router weights, what they contribute),\n"
    "moments/ (what each matrix reads) and samples.npz (the tokens that were used).\n"
    "Stopped or killed, the same command goes on where it was, to the same bits: each\n"
    "layer is safe on disk before the next begins. Another source, other samples or\n"
    "settings in the same FOLDER are refused. `kimi-k3 samples` looks at a mix first.\n",
    add_arguments,
    run,
)
