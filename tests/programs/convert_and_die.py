"""Converts again and again, each time in a fork that may be killed on its way.

Arguments: source, and the file of a plan. Each line of stdin is a JSON object: ``out``;
``resume``; ``at``, before which operation on the disk the fork kills itself (0: it
lives); ``full``, from which operation on the disk is full instead; ``after``, the seconds
after which it is killed from outside, if given. The answer to each is a line of JSON:
``died``, ``error`` and ``operations``.
"""

import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import serve

from kimi_k3.conversion import byte_copy, convert, shard_writer
from kimi_k3.errors import KimiK3Error

#: What reaches the disk, and what makes it count.
OPERATIONS: tuple[tuple[Any, str], ...] = (
    (byte_copy.ByteCopier, "copy"),
    (shard_writer, "write_all"),
    (os, "ftruncate"),
    (os, "fsync"),
    (Path, "open"),
    (Path, "mkdir"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "rmdir"),
)

#: Those that a full disk still does.
NEED_NO_ROOM = ("unlink", "rmdir")

#: Numbers of operations, from whatever thread.
numbers = itertools.count(1)


def watched(operation: Callable[..., Any], order: dict[str, Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        reads = operation.__name__ == "open" and "w" not in "".join(map(str, args[1:]))
        if not reads:
            count = next(numbers)
            if count == order.get("at"):
                os.kill(os.getpid(), signal.SIGKILL)
            full = order.get("full")
            if full and count >= full and operation.__name__ not in NEED_NO_ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return operation(*args, **kwargs)

    return counted


def run(source: str, plan: str, order: dict[str, Any]) -> str:
    for owner, name in OPERATIONS:
        setattr(owner, name, watched(getattr(owner, name), order))
    try:
        convert.convert(source, order["out"], plan, resume=order["resume"])
    except KimiK3Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    source, plan = sys.argv[1:]
    serve(lambda order: run(source, plan, order), lambda: next(numbers) - 1)


main()
