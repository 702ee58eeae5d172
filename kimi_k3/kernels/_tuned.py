"""How kernels divide their work on this chip, as ``kimi-k3 doctor --kernels`` measured.

One JSON file in the user's cache folder: chip → kernel → ``[rows, simdgroups]``.
"""

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

FILE = Path("~/.cache/kimi-k3-mlx/kernels.json")

#: Most rows a simdgroup, and most simdgroups a threadgroup, that a file may ask for.
MOST_ROWS, MOST_SIMDGROUPS = 16, 16


class Tiling(NamedTuple):
    """Rows a simdgroup multiplies at once, and simdgroups in a threadgroup."""

    rows: int
    simdgroups: int


def chip() -> str:
    """The name of the device that computes here."""
    return str(mx.device_info().get("device_name", "unknown"))


def read_tilings(file: Path | None = None) -> dict[str, dict[str, Tiling]]:
    """All stored choices by chip and kernel; none, with a warning, if damaged."""
    file = (file or FILE).expanduser()
    try:
        stored = json.loads(file.read_text())
        return {
            name: {kernel: _tiling(pair) for kernel, pair in kernels.items()}
            for name, kernels in stored.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{file} does not hold kernel tilings ({error}); the built-in ones are "
            "used. Delete it, or run `kimi-k3 doctor --kernels` to measure again.",
            stacklevel=2,
        )
        return {}


def _tiling(pair: list[int]) -> Tiling:
    """Two checked numbers; raises ValueError."""
    rows, simdgroups = pair
    if rows not in range(1, MOST_ROWS + 1):
        raise ValueError(f"{rows!r} rows a simdgroup")
    if simdgroups not in range(1, MOST_SIMDGROUPS + 1):
        raise ValueError(f"{simdgroups!r} simdgroups")
    return Tiling(rows, simdgroups)


def store_tilings(tilings: dict[str, Tiling], file: Path | None = None) -> Path:
    """Keep the choices for this chip, beside those of other chips; the file's path."""
    file = (file or FILE).expanduser()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged file is replaced
        everything = read_tilings(file)
    everything[chip()] = everything.get(chip(), {}) | tilings
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(everything, indent=2) + "\n")
    temporary.replace(file)
    best_tiling.cache_clear()
    return file


@cache
def best_tiling(kernel: str, otherwise: Tiling) -> Tiling:
    """What was measured for ``kernel`` on this chip, or ``otherwise``."""
    return read_tilings().get(chip(), {}).get(kernel, otherwise)
