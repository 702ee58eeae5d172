"""``kimi-k3 compare``: which of several builds is closer to their teacher."""

import argparse
import json
from pathlib import Path

from ..errors import EvaluationError
from .printing import add_json_argument
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first", metavar="A", help="what `kimi-k3 evaluate` wrote for one build"
    )
    parser.add_argument(
        "others",
        metavar="B",
        nargs="+",
        help="the same of other builds; each is compared to A",
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="how often documents are drawn for the intervals (default: 2000)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="for drawing")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from ..evaluation.comparison import Comparison
    from ..evaluation.evaluation import Evaluation
    from ..evaluation.statistics import DRAWS

    if options.seed < 0:
        raise EvaluationError(f"--seed is {options.seed}; give 0 or more.")
    draws = DRAWS if options.draws is None else options.draws
    first = Evaluation.load(options.first)
    found: list[Comparison] = []
    for other in options.others:
        try:
            found.append(
                Comparison.of(first, Evaluation.load(other), draws, options.seed)
            )
        except EvaluationError as error:
            if str(other) in str(error):
                raise
            raise EvaluationError(f"{options.first} and {other}: {error}") from error
    if options.json:
        named = zip(options.others, found, strict=True)
        comparisons = [{"folder": str(name), **one.to_dict()} for name, one in named]
        document = {"a": str(Path(options.first)), "comparisons": comparisons}
        print(json.dumps(document, indent=2))
        return 0
    print(f"\n\n{'─' * 80}\n\n".join(one.text() for one in found))
    return 0


VERB = Verb(
    "say which of several builds is closer to their teacher, and how surely",
    "  kimi-k3 compare ./evaluation-a ./evaluation-b\n"
    "  kimi-k3 compare ./evaluation-a ./evaluation-b ./evaluation-c --json\n\n"
    "where the evaluations were made by\n\n"
    "  kimi-k3 teacher ./Kimi-K3 --samples traces --out ./teacher\n"
    "  kimi-k3 evaluate ./build-a --against ./teacher --out ./evaluation-a\n"
    "  kimi-k3 evaluate ./build-b --against ./teacher --out ./evaluation-b\n\n"
    "Prints what B has more than A, of KL, log perplexity and agreement, by corpus, span,\n"
    "language and position. The intervals are paired: documents are drawn again and\n"
    "again, the same for both builds. One that excludes 0 is a difference that other\n"
    "documents of these kinds would show too. Evaluations by other teachers, samples or\n"
    "types are refused, and what differs is named.\n",
    add_arguments,
    run,
)
