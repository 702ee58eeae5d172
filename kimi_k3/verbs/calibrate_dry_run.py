"""``kimi-k3 calibrate --dry-run``: what a calibration would take, without weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CalibrationError
from .printing import print_report

if TYPE_CHECKING:
    from ..build.calibration_cost import CalibrationCost, Speed
    from ..config import ModelArgs

#: The mix whose size is taken if no samples are named.
DEFAULT_MIX = "general"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only a dry run has."""
    group = parser.add_argument_group("before the weights are there")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print bytes, memory, disk, arithmetic and hours, and stop; without SOURCE "
        "of the released Kimi K3, with it of its config.json (weights are not needed)",
    )
    group.add_argument(
        "--disk", type=float, metavar="GB/S", help="speed of the disk, for the hours"
    )
    group.add_argument(
        "--compute", type=float, metavar="TFLOPS", help="speed of computing, likewise"
    )


def dry_run(options: argparse.Namespace) -> int:
    """Print the cost of what ``options`` ask for."""
    print_report(cost_of(options), options.json)
    return 0


def cost_of(options: argparse.Namespace) -> "CalibrationCost":
    """What calibrating as ``options`` say would take."""
    from ..build.calibrate import HELD_SHARE, STEP_TOKENS
    from ..build.calibration_cost import calibration_cost, sizes_of_folder
    from ..machine.hardware import read_machine

    step_tokens, limit = options.step_tokens, options.memory_limit
    if step_tokens is not None and step_tokens < 1:
        raise CalibrationError(f"--step-tokens is {step_tokens}, wanted 1 or more.")
    if limit is not None and not 0 <= limit < float("inf"):
        raise CalibrationError(f"--memory-limit is {limit:g}, wanted 0 GB or more.")
    rows, length, corpora = shape_of(options.samples or DEFAULT_MIX)
    if limit is None:
        limit = read_machine().memory * HELD_SHARE / 1e9
    source = None if options.source is None else Path(options.source)
    has_weights = source is not None and any(source.glob("*.safetensors"))
    return calibration_cost(
        config_of(source),
        rows=rows,
        length=length,
        corpora=corpora,
        step_tokens=step_tokens or STEP_TOKENS,
        memory_limit=int(limit * 1e9),
        moments=options.moments == "on",
        speeds=_speeds(options),
        sizes=sizes_of_folder(source) if source and has_weights else None,
    )


def config_of(source: Path | None) -> "ModelArgs":
    """Of the folder ``source``, or of the released model."""
    from ..checkpoint.folder import read_config
    from ..checkpoint.source_layout import full_size_config
    from ..config import ModelArgs

    if source is None:
        return ModelArgs.from_dict(full_size_config())
    return ModelArgs.from_dict(read_config(source))


def shape_of(samples: str) -> tuple[int, int, int]:
    """Rows, tokens a row, and corpora; of a mix without reading its corpora."""
    from ..build.mix_file import find_mix
    from ..build.sample_rows import Samples

    if Path(samples).suffix == ".npz":
        found = Samples.load(samples)
        return found.rows, found.length, len(found.corpora)
    mix = find_mix(samples)
    return -(-mix.tokens // mix.length), mix.length, len(mix.corpora)


def _speeds(options: argparse.Namespace) -> "tuple[Speed, ...]":
    """The usual ones, or those among them with the disk or compute that was named."""
    from ..build.calibration_cost import SPEEDS, Speed

    for name in ("disk", "compute"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise CalibrationError(f"--{name} is {value}, wanted more than 0.")
    disks, computes = {s.disk for s in SPEEDS}, {s.compute for s in SPEEDS}
    if options.disk is not None:
        disks = {options.disk * 1e9}
    if options.compute is not None:
        computes = {options.compute * 1e12}
    return tuple(Speed(d, c) for d in sorted(disks) for c in sorted(computes))
