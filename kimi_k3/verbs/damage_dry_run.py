"""``kimi-k3 damage --dry-run``: what measuring would take, without weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from .printing import print_report

if TYPE_CHECKING:
    from ..planning.damage_cost import DamageCost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only a dry run has."""
    group = parser.add_argument_group("before the weights are there")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print probes, passes, bytes, memory and hours, and stop; without SOURCE of "
        "the released Kimi K3, with it of its config.json (weights are not needed)",
    )


def dry_run(options: argparse.Namespace) -> int:
    """Print the cost of what ``options`` ask for."""
    print_report(cost_of(options), options.json)
    return 0


def cost_of(options: argparse.Namespace) -> "DamageCost":
    """What measuring as ``options`` say would take."""
    from ..build.saliency import SaliencyTable
    from ..checkpoint.folder import read_config
    from ..checkpoint.source_layout import full_size_config
    from ..planning.damage_cost import damage_cost
    from ..planning.probe_damage import TOKENS

    config = full_size_config()
    if options.source is not None:
        config = read_config(Path(options.source))
    corpora = 1
    if options.calibration is not None:
        corpora = len(SaliencyTable.load(options.calibration).corpora)
    tokens = options.probe_tokens
    return damage_cost(
        config,
        low_bits=options.low_bits,
        tokens=TOKENS if tokens is None else tokens,
        memory=memory_of(options),
        probes=options.probes == "on",
        corpora=corpora,
    )


def memory_of(options: argparse.Namespace) -> int:
    """Bytes of hidden states that a pass may hold."""
    limit = options.memory_limit
    if not 0 < limit < float("inf"):
        raise PlanError(f"--memory-limit is {limit:g}; wanted GB above 0.")
    return int(limit * 1e9)
