"""``kimi-k3 bench``: time a model as mlx-lm runs it."""

import argparse
import json
import sys

from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(options: argparse.Namespace) -> int:
    from ..machine.bench import bench

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


VERB = Verb(
    "time a model as mlx-lm runs it: prefill, decode, memory, share of bandwidth",
    "  kimi-k3 bench ./build\n  kimi-k3 bench ./build --prompt 4096 --tokens 256\n\n"
    "A random prompt goes through mlx_lm.stream_generate; a first generation warms\n"
    "up, and figures are medians of the others. Decoding is bound by the weights it\n"
    "reads: the share says how near it comes to a plain read of this machine's\n"
    "memory. The last line is one JSON document; progress goes to stderr.\n",
    add_arguments,
    run,
)
