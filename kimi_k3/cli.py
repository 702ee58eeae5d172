"""The command ``kimi-k3``: parse, hand over to the verb, turn errors into one line.

The verbs are rows of :data:`VERBS`, one file each in ``verbs/``.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .errors import KimiK3Error
from .verbs.table import VERBS

EPILOG = """\
examples:
  kimi-k3 demo                                   see a small trained K3 generate
  kimi-k3 doctor                                 is this machine ready?
  kimi-k3 calibrate ./Kimi-K3 --samples mix.toml --out ./calibration
                                                 which experts matter, for which text?
  kimi-k3 damage ./Kimi-K3 ./calibration         what does each cut cost? (hours)
  kimi-k3 plan ./calibration --memory 450 --out plan.json
                                                 which of them stay, at which width?
  kimi-k3 convert ./Kimi-K3 ./Kimi-K3-build --plan plan.json --moments ./calibration
                                                 make that build
  kimi-k3 verify ./Kimi-K3-build                 is this folder whole?
  kimi-k3 evaluate ./Kimi-K3-build --against ./Kimi-K3 --samples traces --out ./quality
                                                 how far is it from its source?
  mlx_lm.generate --model ./Kimi-K3-build --prompt "hello"
                                                 stock commands simply work

An error is one line on stderr and exit code 2; --debug shows where it came from.
"""


def main(arguments: Sequence[str] | None = None) -> object:
    """Run the command line; returns what ``sys.exit`` takes."""
    options = build_parser().parse_args(arguments)
    try:
        done = VERBS[options.verb].run(options)
        sys.stdout.flush()
        return done
    except BrokenPipeError:
        # In a host's command it may be a socket's, and is the host's to tell.
        if options.debug or options.verb == "run":
            raise
        # The reader has seen enough, as `head` does. Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KimiK3Error as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if options.verb != "run":
            # On a terminal a line that moves may be open.
            line = "\nstopped." if sys.stderr.isatty() else "stopped."
            print(line, file=sys.stderr)
        return 130
    except Exception as error:
        # A host's command fails in the host's own words.
        if options.debug or options.verb == "run":
            raise
        print(
            f"error: {type(error).__name__}: {error} (--debug shows where)",
            file=sys.stderr,
        )
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``kimi-k3`` with one subparser a verb."""
    parser = argparse.ArgumentParser(
        prog="kimi-k3",
        description="Run every build of Kimi K3 with stock mlx-lm, and look after builds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        subparser = subparsers.add_parser(
            name,
            help=verb.summary,
            description=verb.summary[0].upper() + verb.summary[1:] + ".",
            epilog="examples:\n" + verb.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(subparser)
    return parser
