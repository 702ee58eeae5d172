"""``kimi-k3 teacher``: keep of a checkpoint what builds are judged by."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EvaluationError
from .dry_run import add_dry_run, disk_speeds
from .printing import add_json_argument, print_report
from .streaming_options import (
    StreamingLines,
    add_streaming_arguments,
    prepare_environment,
    streaming_settings,
)
from .verb import Verb

if TYPE_CHECKING:
    from ..evaluation.final_states import FinalStates
    from ..evaluation.teacher_cost import TeacherCost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", help="a checkpoint folder of any format")
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
    add_dry_run(
        parser,
        "print bytes, memory, disk and hours, and stop; without SOURCE of the released "
        "Kimi K3, with it of its config.json (weights are not needed)",
    )


def run(options: argparse.Namespace) -> int:
    if options.dry_run:
        print_report(cost_of(options), options.json)
        return 0
    for name, given in (
        ("a checkpoint folder", options.source),
        ("samples with --samples", options.samples),
        ("a folder for the teacher with --out", options.out),
    ):
        if not given:
            raise EvaluationError(f"name {name}; --help shows examples.")
    settings = streaming_settings(options)
    settings["float32"] = bool(settings["float32"])
    prepare_environment()
    from ..evaluation.evaluate import make_teacher

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


def cost_of(options: argparse.Namespace) -> "TeacherCost":
    """What a teacher as ``options`` say would take."""
    from ..build.calibration_cost import SPEEDS, Speed
    from ..evaluation.states_run import HELD_SHARE
    from ..evaluation.teacher_cost import teacher_cost
    from ..machine.hardware import read_machine
    from .calibrate_dry_run import DEFAULT_MIX, config_of, shape_of

    rows, length, _ = shape_of(options.samples or DEFAULT_MIX)
    limit = streaming_settings(options)["memory_limit"]
    if limit is None:
        limit = int(read_machine().memory * HELD_SHARE)
    disks = disk_speeds(options, EvaluationError)
    computes = sorted({speed.compute for speed in SPEEDS})
    return teacher_cost(
        config_of(Path(options.source) if options.source else None),
        rows=rows,
        length=length,
        memory_limit=limit,
        speeds=[Speed(disk, compute) for disk in disks for compute in computes],
    )


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
    "  kimi-k3 teacher ./Kimi-K3 --samples traces --out ./teacher\n"
    "  kimi-k3 teacher ./Kimi-K3 --samples mix.toml --part all --out ./teacher\n"
    "  kimi-k3 teacher --dry-run --samples traces --memory-limit 64\n"
    "  kimi-k3 evaluate ./build --against ./teacher --out ./quality\n\n"
    "Runs samples through the checkpoint, layer by layer, and keeps the final hidden\n"
    "states (14 kB a token at Kimi K3's size) and the head: from them the distribution\n"
    "over the whole vocabulary is made again when a build is judged. One teacher serves\n"
    "any number of builds. Stopped or killed, the same command goes on where it was, to\n"
    "the same bits. Other samples or another checkpoint in the same folder are refused.\n",
    add_arguments,
    run,
)
