"""Calibrates again and again, each time in a fork that may be killed on its way.

Arguments: source, samples, and 1 or 0 for moments. Each line of stdin is a JSON object:
``out``; ``at``, before which operation on the disk the fork kills itself (0: it lives);
``after``, the seconds after which it is killed from outside, if given. The answer to
each is a line of JSON: ``died``, ``error`` and ``operations``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from forks import die_before, serve

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.row_file import RowFile
from kimi_k3.build.samples import Samples
from kimi_k3.errors import KimiK3Error

#: What reaches the disk: hidden states, arrays of archives, and what makes them count.
OPERATIONS: tuple[tuple[Any, str], ...] = (
    (RowFile, "write"),
    (np.lib.format, "write_array"),
    (os, "fsync"),
    (Path, "replace"),
    (Path, "unlink"),
)


def run(source: str, samples: Samples, moments: bool, order: dict[str, Any]) -> str:
    die_before(order["at"], OPERATIONS)
    try:
        calibrate(source, samples, order["out"], moments=moments, step_tokens=24)
    except KimiK3Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    source, samples, moments = (
        sys.argv[1],
        Samples.load(sys.argv[2]),
        sys.argv[3] == "1",
    )
    serve(lambda order: run(source, samples, moments, order))


main()
