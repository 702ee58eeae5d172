"""What verbs that run samples through a checkpoint ask alike, and how they go on."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from ..errors import EvaluationError
from .calibrate import progress_text
from .progress_lines import ProgressLines

if TYPE_CHECKING:
    from ..build.pass_progress import Progress, Watch

PARTS = ("held_out", "calibration", "all")


def add_streaming_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``teacher`` and ``evaluate``."""
    parser.add_argument(
        "--part",
        choices=PARTS,
        help="which part of the mix (default: held_out, which no calibration uses)",
    )
    parser.add_argument(
        "--dtype",
        choices=("stored", "float32"),
        help="the type to compute in (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="hidden states to hold in memory; the others are read from disk. Two "
        "layers come on top (default: a quarter of this machine's memory)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="discard what the folder holds of an earlier run, and start over",
    )


def prepare_environment() -> None:
    """To be called before mlx is imported."""
    # What transformers says about a missing PyTorch has no meaning here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Or a GPU that has TF32 computes logits that are told to be float32 in 10 bits.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def streaming_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments; raises EvaluationError for impossible numbers."""
    limit = options.memory_limit
    if limit is not None and not 0 <= limit < float("inf"):
        raise EvaluationError(f"--memory-limit is {limit:g}, wanted 0 GB or more.")
    return {
        "part": options.part,
        "float32": None if options.dtype is None else options.dtype == "float32",
        "memory_limit": None if limit is None else int(limit * 1e9),
        "restart": options.restart,
    }


class StreamingLines(ProgressLines):
    """A line a layer, and on a terminal one that moves."""

    def of(self, what: str) -> "Watch":
        """What shows how far ``what`` is; a layer that is finished keeps its line."""

        def show(progress: "Progress") -> None:
            line = f"{what}: {progress_text(progress)}" if what else ""
            line = line or progress_text(progress)
            if progress.finished:
                self.step(line)
            else:
                self.moving(line)

        return show

    def judged(self, done: int, total: int) -> None:
        """Show how many predictions are judged."""
        line = f"predictions judged: {done:,} of {total:,}"
        if done < total:
            self.moving(line)
        else:
            self.step(line)

    def stopped(self, out: str) -> int:
        """Say how to go on; the exit code."""
        self.note(
            f"stopped. Resume with the same command: finished layers are kept in {out}."
        )
        return 130
