"""``kimi-k3 evaluate``: how far a build is from its source, prediction by prediction."""

import argparse

from ..errors import EvaluationError
from .printing import add_json_argument, print_report
from .streaming_options import (
    StreamingLines,
    add_streaming_arguments,
    prepare_environment,
    streaming_settings,
)
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder of any format")
    parser.add_argument(
        "--against",
        metavar="SOURCE|TEACHER",
        help="the checkpoint that it was made from, or what `kimi-k3 teacher` kept of it",
    )
    parser.add_argument(
        "--samples",
        metavar="MIX",
        help="TOML file of a mix, the name of a shipped one, or an .npz of samples; a "
        "teacher has its own",
    )
    parser.add_argument("--out", metavar="OUT", help="folder for the results")
    parser.add_argument(
        "--calibration",
        metavar="FOLDER",
        help="the calibration that the build was planned from: samples that share a "
        "document with it are refused",
    )
    add_streaming_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    for name, given in (
        ("the source or teacher with --against", options.against),
        ("a folder for the results with --out", options.out),
    ):
        if not given:
            raise EvaluationError(f"name {name}; --help shows examples.")
    settings = streaming_settings(options)
    prepare_environment()
    from ..evaluation.evaluate import evaluate
    from ..evaluation.summary import Summary

    lines = StreamingLines()
    try:
        found = evaluate(
            options.build,
            options.against,
            options.out,
            samples=options.samples,
            calibration=options.calibration,
            progress=lines.of,
            judged=lines.judged,
            tell=lines.note,
            **settings,
        )
        summary = Summary.of(found)
        summary.save(options.out)
    except KeyboardInterrupt:
        return lines.stopped(options.out)
    finally:
        lines.end()
    print_report(summary, options.json)
    return 0


VERB = Verb(
    "judge a build by its source: perplexity, KL, agreement, by corpus, span, language",
    "  kimi-k3 evaluate ./build --against ./Kimi-K3 --samples traces --out ./quality\n"
    "  kimi-k3 evaluate ./build --against ./teacher --out ./quality\n"
    "  kimi-k3 evaluate ./build --against ./teacher --calibration ./calibration \\\n"
    "      --out ./quality --json\n\n"
    "Both models read the same tokens, layer by layer; neither need fit in memory. For\n"
    "every prediction their distributions over the whole vocabulary are compared:\n"
    "KL(source || build) in nats, perplexities, and whether both find the same token the\n"
    "likeliest. OUT gets predictions.npz (every prediction) and evaluation.json (what is\n"
    "printed, with 95 % intervals); with a SOURCE also teacher/, which serves other\n"
    "builds too. Stopped or killed, the same command goes on where it was, to the same\n"
    "bits. Other tokens, types or tokenizers, and text that the build was calibrated on,\n"
    "are refused before any work. docs/evaluating.md says what the numbers mean.\n",
    add_arguments,
    run,
)
