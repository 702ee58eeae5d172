"""Calibrates again and again, each time in a fork that may be killed on its way.

Arguments: source, samples, and 1 or 0 for moments. Each line of stdin is a JSON object:
``out``; ``at``, before which operation on the disk the fork kills itself (0: it lives);
``after``, the seconds after which it is killed from outside, if given. The answer to
each is a line of JSON: ``died``, ``error`` and ``operations``.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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

count = 0


def dying(operation: Callable[..., Any], at: int) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return counted


def run(source: str, samples: Samples, moments: bool, order: dict[str, Any]) -> str:
    for owner, name in OPERATIONS:
        setattr(owner, name, dying(getattr(owner, name), order["at"]))
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
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        # Nothing was computed in this process, so a fork has all that MLX needs.
        child = os.fork()
        if not child:
            error = run(source, samples, moments, order)
            os.write(write, json.dumps({"error": error, "operations": count}).encode())
            os._exit(0)
        os.close(write)
        if order.get("after"):
            time.sleep(order["after"])
            os.kill(child, signal.SIGKILL)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        answer = json.loads(said) if said else {"error": "", "operations": 0}
        answer |= {"died": os.WIFSIGNALED(status)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
