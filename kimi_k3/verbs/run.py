"""``kimi-k3 run``: a stock command, after a look at the folder."""

import argparse

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("module", help="mlx_lm.generate, mlx_lm.server, mlx_vlm.chat …")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="handed on to the module as they are",
    )


def run(options: argparse.Namespace) -> object:
    from ..run import run_host

    return run_host(options.module, options.arguments)


VERB = Verb(
    "run a command of mlx-lm or mlx-vlm with our class, after a look at the folder",
    "  kimi-k3 run mlx_lm.generate --model ./build --prompt hello\n"
    "  kimi-k3 run mlx_lm.server --model ./build --port 8080\n\n"
    "Only needed where Python ignores start-up files, or to have a damaged folder\n"
    "named before it is read. Options of mlx-lm that cannot work with Kimi K3 are refused\n"
    "with a reason: --draft-model, --chat-template, --max-kv-size, --chat-template-args\n"
    "or --chat-template-config that its format does not know, a --kv-bits or\n"
    "--kv-group-size that does not fit, and a server, generate or chat without --model.\n"
    "The exit code is the command's.\n",
    add_arguments,
    run,
)
