"""``kimi-k3 convert --dry-run``: what a conversion would take, without weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConversionError
from .dry_run import add_dry_run, disk_speeds
from .printing import print_report

if TYPE_CHECKING:
    from ..conversion.conversion_cost import ConversionCost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only a dry run has."""
    add_dry_run(
        parser,
        "print bytes, memory, disk and hours, and stop; without SOURCE of the "
        "released Kimi K3, with it of its config.json (weights are not needed)",
    )


def dry_run(options: argparse.Namespace) -> int:
    """Print the cost of what ``options`` ask for."""
    print_report(cost_of(options), options.json)
    return 0


def cost_of(options: argparse.Namespace) -> "ConversionCost":
    """What converting as ``options`` say would take."""
    from ..checkpoint.folder import read_config
    from ..checkpoint.source_layout import full_size_config
    from ..conversion.conversion_cost import conversion_cost
    from ..planning.expert_plan import ExpertPlan

    speeds = disk_speeds(options, ConversionError)
    config = full_size_config()
    if options.source is not None:
        config = read_config(Path(options.source))
    return conversion_cost(
        config,
        None if options.plan is None else ExpertPlan.load(options.plan),
        disk_speeds=speeds,
    )
