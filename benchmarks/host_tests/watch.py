"""One test file in a process of its own, watched test by test.

A test that runs past the limit, or takes the process down, costs only itself: the
process is ended and the tests after it run in a new one.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: Tests that take this long are listed.
SLOW_SECONDS = 10.0

PROGRESS_SECONDS = 10.0


@dataclass
class FileRun:
    """What the tests of one file came to.

    ``outcomes`` and ``messages`` go by ``TestClass::test_name``, subtests by that and
    their own name in brackets. ``witness`` is empty if pytest never got to its end.
    """

    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    witness: dict[str, Any] = field(default_factory=dict)
    broken: str = ""
    running: str | None = None
    seconds: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of the plugin."""
        kind = event.pop("event")
        if kind == "collected":
            self.collected = self.collected or event["tests"]
        elif kind == "start":
            self.running = event["test"]
        elif kind == "result":
            self.settle(event["test"], event["outcome"], event["message"])
            if event["seconds"] >= SLOW_SECONDS:
                self.slow[event["test"]] = event["seconds"]
        elif kind == "broken":
            self.broken = event["message"]
        elif kind == "end":
            self.witness = event

    def settle(self, test: str, outcome: str, message: str) -> None:
        self.outcomes[test] = outcome
        if message:
            self.messages[test] = message

    @property
    def done(self) -> int:
        """Collected tests, without subtests, that have an outcome."""
        return sum(test in self.outcomes for test in self.collected)


def run_file(
    file: Path,
    *,
    python: str,
    environment: Mapping[str, str],
    scratch: Path,
    limit: float,
    leave_out: Sequence[str],
    progress: Callable[[FileRun], None],
) -> FileRun:
    """Run the tests of ``file`` with ``python``; each may take ``limit`` seconds.

    The tests named in ``leave_out`` do not run. ``progress`` is called every few
    seconds. A test past the limit has the outcome
    ``timeout``, one that ends the process ``crashed``.
    """
    run, began = FileRun(), time.monotonic()
    while True:
        events = scratch / f"events-{time.monotonic_ns()}.jsonl"
        events.touch()
        done = [*run.outcomes, *leave_out]
        process = start(file, python, environment, events, done)
        stuck = follow(process, events, run, limit, progress)
        if run.witness or run.broken or run.running is None:
            break
        if run.running not in run.outcomes or stuck:
            why = f"took more than {limit:g} s" if stuck else "ended the process"
            run.settle(run.running, "timeout" if stuck else "crashed", why)
        run.running = None
    run.seconds = round(time.monotonic() - began, 1)
    return run


def start(
    file: Path,
    python: str,
    environment: Mapping[str, str],
    events: Path,
    done: Sequence[str],
) -> "subprocess.Popen[bytes]":
    """Pytest on ``file`` without the tests that are ``done``; output goes to a log."""
    done_file = events.with_suffix(".done")
    done_file.write_text(json.dumps(done))
    command = [python, "-m", "pytest", "-q", "-p", "host_plugin"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(file.parent.parent), str(file)]
    command += ["--event-file", str(events), "--done-file", str(done_file)]
    with events.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": str(HERE)},
            cwd=events.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def follow(
    process: "subprocess.Popen[bytes]",
    events: Path,
    run: FileRun,
    limit: float,
    progress: Callable[[FileRun], None],
) -> bool:
    """Read events until the process ends; True if it was ended for its running test."""
    heard = shown = time.monotonic()
    with events.open() as stream:
        while True:
            ended = process.poll() is not None
            fresh = read_events(stream, run)
            now = time.monotonic()
            heard = now if fresh else heard
            if now - shown > PROGRESS_SECONDS:
                shown = now
                progress(run)
            if ended and not fresh:
                return False
            if now - heard > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.1)


def read_events(stream: Any, run: FileRun) -> bool:
    """Take the whole lines that were added to ``stream``; False if there were none."""
    fresh = False
    while True:
        position = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(position)
            return fresh
        run.take(json.loads(line))
        fresh = True


def tail_of_log(scratch: Path) -> str:
    """The end of the last pytest's output, for when it says what the events do not."""
    logs = sorted(scratch.glob("events-*.log"))
    return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-25:])
