"""Evaluates again and again, each time in a fork that may be killed on its way.

Arguments: build, source, samples. Each line of stdin is a JSON object: ``out``; ``at``,
before which operation on the disk the fork kills itself (0: it lives); ``after``, the
seconds after which it is killed from outside, if given. The answer to each is a line of
JSON: ``died``, ``error`` and ``operations``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from forks import die_before, serve

from kimi_k3.build.row_file import RowFile
from kimi_k3.build.samples import Samples
from kimi_k3.errors import KimiK3Error
from kimi_k3.evaluation.evaluate import evaluate

#: What reaches the disk: states, head, arrays of archives, and what makes them count.
OPERATIONS: tuple[tuple[Any, str], ...] = (
    (RowFile, "write"),
    (mx, "save_safetensors"),
    (np.lib.format, "write_array"),
    (os, "fsync"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "rmdir"),
)


def run(build: str, source: str, samples: Samples, order: dict[str, Any]) -> str:
    die_before(order["at"], OPERATIONS)
    try:
        evaluate(build, source, order["out"], samples=samples)
    except KimiK3Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    build, source, samples = sys.argv[1], sys.argv[2], Samples.load(sys.argv[3])
    serve(lambda order: run(build, source, samples, order))


main()
