"""Runs something again and again, each time in a fork that may be killed on its way."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

#: Operations on the disk that this process has done, of those that are counted.
count = 0


def die_before(at: int, operations: Iterable[tuple[Any, str]]) -> None:
    """Count ``operations``, as owner and name; the process dies before number ``at``."""
    for owner, name in operations:
        setattr(owner, name, _dying(getattr(owner, name), at))


def counted() -> int:
    return count


def serve(
    run: Callable[[dict[str, Any]], str], operations: Callable[[], int] = counted
) -> None:
    """Carry out each order of stdin, a line of JSON, and answer it in one.

    Args:
        run: is given the order, in a fork; gives an error's text, or nothing.
        operations: how many were done in it. An order has ``after``, if it is to be
            killed from outside after so many seconds. The answer has ``died``, ``error``
            and ``operations``.
    """
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        # Nothing was computed in this process, so a fork has all that MLX needs.
        child = os.fork()
        if not child:
            said = {"error": run(order), "operations": operations()}
            os.write(write, json.dumps(said).encode())
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


def _dying(operation: Callable[..., Any], at: int) -> Callable[..., Any]:
    def dying(*args: Any, **kwargs: Any) -> Any:
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return dying
