"""The command ``kimi-k3``: parse, call one function, print; the only place that exits.

A verb is a row of :data:`VERBS`: what it is, how its arguments look, and a function
that imports what it needs when it is asked for, and returns the exit code.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import __version__
from .errors import KimiK3Error

EPILOG = """\
examples:
  kimi-k3 demo                                   see a small random K3 generate
  kimi-k3 doctor                                 is this machine ready?
  kimi-k3 verify ./Kimi-K3-build                 is this folder whole?
  mlx_lm.generate --model ./Kimi-K3-build --prompt "hello"
                                                 stock commands simply work

An error is one line on stderr and exit code 2; --debug shows where it came from.
"""


@dataclass(frozen=True)
class Verb:
    """One subcommand. ``run`` returns what ``sys.exit`` takes: 0 or None is success."""

    summary: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]


def main(arguments: Sequence[str] | None = None) -> object:
    """Run the command line; returns what ``sys.exit`` takes."""
    options = build_parser().parse_args(arguments)
    try:
        return VERBS[options.verb].run(options)
    except KimiK3Error as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
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


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("module", help="mlx_lm.generate, mlx_lm.server, mlx_vlm.chat …")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="handed on to the module as they are",
    )


def _run(options: argparse.Namespace) -> object:
    from .run import run_host

    return run_host(options.module, options.arguments)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="instead compare, time and tune each Metal kernel on this GPU",
    )


def _doctor(options: argparse.Namespace) -> int:
    if options.kernels:
        return _doctor_kernels(options.json)
    from .machine.doctor import diagnose

    report = diagnose()
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.text())
    return 0 if report.healthy else 1


def _doctor_kernels(as_json: bool) -> int:
    # Before MLX reads it: the references are to be float32 in full.
    os.environ["MLX_ENABLE_TF32"] = "0"
    from .machine.kernels_check import check_kernels

    report = check_kernels()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())
    return 0 if report.passed else 1


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _verify(options: argparse.Namespace) -> int:
    from .build.verify import verify_build

    report = verify_build(options.build, progress=_progress_line("read"))
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.text())
    return 0 if report.passed else 1


def _progress_line(what: str) -> Callable[[int, int], None] | None:
    """Rewrites one line on a terminal with the share that is done; else nothing."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{what} {done / total:.0%}", end=end, file=sys.stderr, flush=True)

    return show


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="where the small checkpoints are kept"
    )


def _demo(options: argparse.Namespace) -> int:
    from .nano.cache import default_cache_dir
    from .nano.demo import run_demo

    folder = options.cache_dir or default_cache_dir(os.environ)
    report = run_demo(
        folder, environment=os.environ, progress=lambda line: print(line, flush=True)
    )
    return 1 if report.problems else 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint folder, or a repository of the hub")
    parser.add_argument(
        "--prompt", type=int, default=512, metavar="N", help="tokens of the prompt"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="tokens to decode"
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="generations to time"
    )


def _bench(options: argparse.Namespace) -> int:
    from .machine.bench import bench

    report = bench(
        options.model,
        prompt_tokens=options.prompt,
        decoded_tokens=options.tokens,
        runs=options.runs,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report.text())
    print(json.dumps(report.to_dict()))
    return 0


VERBS = {
    "demo": Verb(
        "make a small random K3 and let the stock command generate with it",
        "  kimi-k3 demo\n  kimi-k3 demo --cache-dir ./small-k3\n\n"
        "Exit code 1 if a step did not go as it should.\n",
        _demo_arguments,
        _demo,
    ),
    "run": Verb(
        "run a command of mlx-lm or mlx-vlm with our class, after a look at the folder",
        "  kimi-k3 run mlx_lm.generate --model ./build --prompt hello\n"
        "  kimi-k3 run mlx_lm.server --model ./build --port 8080\n\n"
        "Only needed where Python ignores start-up files, or to have a damaged folder\n"
        "named before it is read. The exit code is the command's.\n",
        _run_arguments,
        _run,
    ),
    "verify": Verb(
        "look a checkpoint folder through: whole, consistent, numbers sane",
        "  kimi-k3 verify ./build\n  kimi-k3 verify ./build --json\n\n"
        "Takes a local folder. Reads headers, float tensors and scales; packed codes are\n"
        "not read. Every fault of the files is listed; of config and tensors that do not\n"
        "fit each other, the first. Exit code 1 if there is a fault.\n",
        _verify_arguments,
        _verify,
    ),
    "bench": Verb(
        "time a model as mlx-lm runs it: prefill, decode, memory, share of bandwidth",
        "  kimi-k3 bench ./build\n  kimi-k3 bench ./build --prompt 4096 --tokens 256\n\n"
        "A random prompt goes through mlx_lm.stream_generate; a first generation warms\n"
        "up, and figures are medians of the others. Decoding is bound by the weights it\n"
        "reads: the share says how near it comes to a plain read of this machine's\n"
        "memory. The last line is one JSON document; progress goes to stderr.\n",
        _bench_arguments,
        _bench,
    ),
    "doctor": Verb(
        "show versions, whose K3 class answers and why, the machine, and what to mend",
        "  kimi-k3 doctor\n  kimi-k3 doctor --json\n  kimi-k3 doctor --kernels\n\n"
        "Exit code 1 if something stops K3 from running, or if a kernel is wrong.\n"
        "With --kernels the fastest way to divide a kernel's work is kept for this chip\n"
        "in ~/.cache/kimi-k3-mlx.\n",
        _doctor_arguments,
        _doctor,
    ),
}
