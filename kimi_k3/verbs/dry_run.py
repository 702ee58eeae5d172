"""What dry runs of planning and converting ask alike: whether, and for which disk."""

import argparse

from ..errors import KimiK3Error


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """The options that only a dry run has; ``what`` it does is its help."""
    group = parser.add_argument_group("before the weights are there")
    group.add_argument("--dry-run", action="store_true", help=what)
    group.add_argument(
        "--disk-speed",
        type=float,
        metavar="GB/S",
        help="of the disk that is read and written, for the hours",
    )


def disk_speeds(
    options: argparse.Namespace, error: type[KimiK3Error]
) -> tuple[float, ...]:
    """Bytes a second to tell hours for; raises ``error`` for what is no speed."""
    from ..conversion.conversion_cost import DISK_SPEEDS

    speed = options.disk_speed
    if speed is None:
        return DISK_SPEEDS
    if not 0 < speed < float("inf"):
        raise error(f"--disk-speed is {speed:g}; wanted more than 0 GB/s.")
    return (speed * 1e9,)
