"""``kimi-k3 teacher``: keep of a checkpoint what builds are judged by."""

import argparse
import json
from typing import TYPE_CHECKING

from ..errors import EvaluationError
from .printing import add_json_argument
from .streaming_options import (
    StreamingLines,
    add_streaming_arguments,
    prepare_environment,
    streaming_settings,
)
from .verb import Verb

if TYPE_CHECKING:
    from ..evaluate.final_states import FinalStates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint folder of any format")
    parser.add_argument(
        "--samples",
        metavar="MIX",
        help="TOML file of a mix, the name of a shipped one, or an .npz of samples",
    )
    parser.add_argument(
        "--out", metavar="TEACHER", help="folder for final hidden states and head"
    )
    add_streaming_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    for name, given in (
        ("samples with --samples", options.samples),
        ("a folder for the teacher with --out", options.out),
    ):
        if not given:
            raise EvaluationError(f"name {name}; --help shows examples.")
    settings = streaming_settings(options)
    settings["float32"] = bool(settings["float32"])
    prepare_environment()
    from ..evaluate.evaluate import make_teacher

    lines = StreamingLines()
    try:
        states = make_teacher(
            options.source,
            options.samples,
            options.out,
            progress=lines.of(""),
            tell=lines.note,
            **settings,
        )
    except KeyboardInterrupt:
        return lines.stopped(options.out)
    finally:
        lines.end()
    _print_result(states, options.json)
    return 0


def _print_result(states: "FinalStates", as_json: bool) -> None:
    samples, conditions = states.samples, states.conditions
    tokens = int(samples.tokens_per_corpus.sum())
    if as_json:
        document = {
            "out": str(states.folder),
            "source": states.path,
            "tokens": tokens,
            "corpora": list(samples.corpora),
            "documents": len(samples.document_hashes),
            "part": samples.part,
            "vocab": states.head.vocab,
            "dtype": conditions.dtype,
            "checkpoint": conditions.checkpoint,
            "samples": conditions.samples,
        }
        print(json.dumps(document, indent=2))
        return
    print(
        f"{states.folder}: final hidden states of {tokens:,} tokens of "
        f"{', '.join(samples.corpora)} (part {samples.part}), and the head of "
        f"{states.head.vocab:,} tokens.\n"
        f"`kimi-k3 evaluate BUILD --against {states.folder} --out OUT` judges a build "
        "by them."
    )


VERB = Verb(
    "keep of a checkpoint what its builds are judged by, one layer in memory at a time",
    "  kimi-k3 teacher ./Kimi-K3 --samples general --out ./teacher\n"
    "  kimi-k3 teacher ./Kimi-K3 --samples mix.toml --part all --out ./teacher\n"
    "  kimi-k3 evaluate ./build --against ./teacher --out ./quality\n\n"
    "Runs samples through the checkpoint, layer by layer, and keeps the final hidden\n"
    "states (14 kB a token at Kimi K3's size) and the head: from them the distribution\n"
    "over the whole vocabulary is made again when a build is judged. One teacher serves\n"
    "any number of builds. Stopped or killed, the same command goes on where it was, to\n"
    "the same bits. Other samples or another checkpoint in the same folder are refused.\n",
    add_arguments,
    run,
)
