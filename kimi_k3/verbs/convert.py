"""``kimi-k3 convert``: a build from the release, by a plan."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConversionError
from . import convert_dry_run
from .printing import add_json_argument
from .progress_lines import ProgressLines, bytes_text, duration_text
from .verb import Verb

if TYPE_CHECKING:
    from ..conversion.conversion_run import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", help="a checkpoint folder in Moonshot's own format"
    )
    parser.add_argument("out", nargs="?", help="a new folder for the build")
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="what to keep and how (`kimi-k3 plan`); without it everything, as it is",
    )
    parser.add_argument(
        "--moments",
        metavar="CALIBRATION",
        help="weigh quantisation errors with what this calibration of SOURCE recorded",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a conversion that was stopped",
    )
    parser.add_argument(
        "--hash-source",
        action="store_true",
        help="record the SHA-256 of every source file, and hold it against the hub's",
    )
    add_json_argument(parser)
    convert_dry_run.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return convert_dry_run.dry_run(options)
    for name, given in (
        ("a checkpoint folder", options.source),
        ("a new folder for the build", options.out),
    ):
        if not given:
            raise ConversionError(f"name {name}; --help shows examples.")
    from ..conversion.convert import convert

    lines = _Lines()
    try:
        out = convert(
            options.source,
            options.out,
            options.plan,
            moments=options.moments,
            resume=options.resume,
            hash_source=options.hash_source,
            progress=lines.shard,
            tell=lines.note,
        )
    except KeyboardInterrupt:
        lines.note(
            "stopped. Go on with the same command and --resume: finished shards are kept "
            f"in {options.out}."
        )
        return 130
    finally:
        lines.end()
    _print_result(out, options.json)
    return 0


def _print_result(out: Path, as_json: bool) -> None:
    from ..checkpoint.folder import read_config
    from ..conversion.provenance import Provenance

    record = Provenance.of_config(read_config(out))
    assert record is not None
    nbytes = sum(shard.size for shard in record.shards.values())
    counts = {layer: len(kept) for layer, kept in record.kept.items()}
    if as_json:
        document = {
            "out": str(out),
            "shards": len(record.shards),
            "bytes": nbytes,
            "experts": counts,
            "plan": record.plan and record.plan.digest,
        }
        print(json.dumps(document, indent=2))
        return
    most, least = max(counts.values()), min(counts.values())
    experts = f"{most}" if most == least else f"{least} to {most}"
    print(
        f"{out}: {experts} experts in each of {len(counts)} layers, {nbytes:,} bytes in "
        f"{len(record.shards)} shards.\n"
        f"`kimi-k3 verify {out} --source SOURCE` proves it against its source."
    )


class _Lines(ProgressLines):
    """A line a shard, and on a terminal one that moves."""

    def shard(self, progress: "Progress") -> None:
        """Show how far it is; a finished shard keeps its line."""
        line = progress_text(progress)
        if progress.finished:
            self.step(line)
        else:
            self.moving(line)


def progress_text(progress: "Progress") -> str:
    """One line: shard, share of all bytes, bytes gone through, speed, time left."""
    width, left = len(str(progress.shards)), progress.seconds_left
    share = progress.bytes_done / progress.bytes_all if progress.bytes_all else 1
    what = f"shard {progress.shard + 1:{width}} of {progress.shards}"
    parts = [
        f"hashing {progress.hashing}" if progress.hashing else what,
        f"{share:4.0%}",
        f"{bytes_text(progress.bytes_done)} at "
        f"{bytes_text(progress.bytes_per_second)}/s",
        f"{duration_text(progress.seconds)} gone",
    ]
    if left is not None:
        parts.append(f"{duration_text(left)} left")
    return "  ".join(parts)


VERB = Verb(
    "make a build from the release by a plan, one shard after the other",
    "  kimi-k3 convert ./Kimi-K3 ./build --plan plan.json --moments ./calibration\n"
    "  kimi-k3 convert ./Kimi-K3 ./build --plan plan.json --moments ./calibration "
    "--resume\n"
    "  kimi-k3 convert ./Kimi-K3 ./everything\n"
    "  kimi-k3 convert --dry-run --plan plan.json --disk-speed 5\n"
    "  kimi-k3 verify ./build --source ./Kimi-K3\n\n"
    "Experts that keep their MXFP4 are copied byte for byte; router rows and correction\n"
    "biases move with their experts; float32 stays float32. Only what the plan says is\n"
    "quantised again. Memory holds one layer without its experts, whatever the size.\n"
    "One shard is made safe on disk while the next is written. Stopped, killed or out of\n"
    "disk, the same command with --resume goes on, to the same bytes. config.json comes\n"
    "last: a folder without it is not finished. Its key `conversion` says what was done.\n",
    add_arguments,
    run,
)
