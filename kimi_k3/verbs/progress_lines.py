"""Lines on stderr of a verb that works for hours: remarks, steps, and one that moves."""

import sys
import time

#: What a terminal's line is rewritten over, and the seconds between two states of it.
_WIDTH, _EVERY = 78, 0.2


class ProgressLines:
    """Keeps the lines that matter; only a terminal sees the one that moves."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._open = False

    def note(self, text: str) -> None:
        """Print a remark on a line of its own."""
        self.end()
        print(text, file=sys.stderr, flush=True)

    def moving(self, line: str) -> None:
        """Show ``line`` until the next one, if the last is not of just now."""
        now = time.monotonic()
        if self._terminal and now >= self._next:
            self._next = now + _EVERY
            self._rewrite(line)

    def step(self, line: str) -> None:
        """Show ``line`` and leave it."""
        self._rewrite(line)
        self.end()

    def end(self) -> None:
        """Leave the line that moves, if there is one."""
        if self._open:
            print(file=sys.stderr, flush=True)
        self._open = False

    def _rewrite(self, line: str) -> None:
        start = "\r" if self._terminal else ""
        print(f"{start}{line:<{_WIDTH}}", end="", file=sys.stderr, flush=True)
        self._open = True


def bytes_text(count: float) -> str:
    """``count`` bytes in a decimal unit: 1.56 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_text(seconds: float) -> str:
    """``seconds`` as minutes or hours: 7:05, 1:07:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
