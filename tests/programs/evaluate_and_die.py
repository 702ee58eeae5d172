"""Evaluates again and again, each time in a fork that may be killed on its way.

Arguments: build, source, samples. Each line of stdin is a JSON object: ``out``; ``at``,
before which operation on the disk the fork kills itself (0: it lives); ``after``, the
seconds after which it is killed from outside, if given. The answer to each is a line of
JSON: ``died``, ``error`` and ``operations``.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

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

count = 0


def dying(operation: Callable[..., Any], at: int) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return counted


def run(build: str, source: str, samples: Samples, order: dict[str, Any]) -> str:
    for owner, name in OPERATIONS:
        setattr(owner, name, dying(getattr(owner, name), order["at"]))
    try:
        evaluate(build, source, order["out"], samples=samples)
    except KimiK3Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    build, source, samples = sys.argv[1], sys.argv[2], Samples.load(sys.argv[3])
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        # Nothing was computed in this process, so a fork has all that MLX needs.
        child = os.fork()
        if not child:
            error = run(build, source, samples, order)
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
