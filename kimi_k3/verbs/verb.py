"""What a verb of the command line is."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One subcommand. ``run`` returns what ``sys.exit`` takes: 0 or None is success.

    ``run`` imports what it needs when it is called, so that help stays quick.
    """

    summary: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]
