"""``kimi-k3 generation``: what a build says by itself, and what can be counted of it."""

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from .printing import add_json_argument, print_report
from .progress_lines import ProgressLines, duration_text
from .verb import Verb

if TYPE_CHECKING:
    from ..answers.generation import Progress

_SETTINGS = {
    "greedy": ("greedy",),
    "sampled": ("sampled",),
    "both": ("greedy", "sampled"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", help="a checkpoint folder that fits into memory")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="MIX|JSONL",
        help="TOML file of a mix, the name of a shipped one, or a file of chats",
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="where answers and counts go"
    )
    parser.add_argument(
        "--answers",
        type=int,
        metavar="N",
        help="answers a prompt where tokens are drawn (default: 4); greedy gives one",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens of an answer, at most (default: 1024)",
    )
    parser.add_argument(
        "--setting",
        choices=tuple(_SETTINGS),
        default="both",
        help="sampled: temperature 1.0 and top-p 0.95 (default: both)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="prompts a corpus (default: 100)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="first tokens of a text that are its prompt (default: 64)",
    )
    parser.add_argument(
        "--part",
        choices=("held_out", "calibration", "all"),
        default="held_out",
        help="which part of a mix (default: held_out)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the answers in FOLDER"
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    # What transformers says about a missing PyTorch has no meaning here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from ..answers.generation import generation

    lines = _Lines()
    names = ("answers", "max_tokens", "limit", "prompt_tokens")
    given = {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) is not None
    }
    try:
        # mlx-lm prints remarks; stdout is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            found = generation(
                options.build,
                options.prompts,
                options.out,
                seed=options.seed,
                settings=_SETTINGS[options.setting],
                part=options.part,
                restart=options.restart,
                progress=lines.answer,
                tell=lines.note,
                **given,
            )
    except KeyboardInterrupt:
        lines.note(
            "stopped. Go on with the same command: finished answers are kept in "
            f"{options.out}."
        )
        return 130
    finally:
        lines.end()
    print_report(found, options.json)
    return 0


class _Lines(ProgressLines):
    """A line that moves on a terminal; elsewhere one for each twentieth."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = 0

    def answer(self, progress: "Progress") -> None:
        """Show how far it is."""
        line = progress_text(progress)
        twentieth = 20 * progress.done // progress.total
        if progress.done == progress.total or (
            not sys.stderr.isatty() and twentieth > self._shown
        ):
            self.step(line)
        else:
            self.moving(line)
        self._shown = twentieth


def progress_text(progress: "Progress") -> str:
    """One line: answers, speed, time gone and left."""
    speed = progress.tokens / max(progress.seconds, 1e-9)
    parts = [
        f"answer {progress.done:,} of {progress.total:,}",
        f"{speed:.3g} tokens/s",
        f"{duration_text(progress.seconds)} gone",
    ]
    if progress.seconds_left is not None:
        parts.append(f"{duration_text(progress.seconds_left)} left")
    return "  ".join(parts)


VERB = Verb(
    "let a build answer, and count loops, stops, tool calls and language drift",
    "  kimi-k3 generation ./build --prompts chats.jsonl --out ./answers\n"
    "  kimi-k3 generation ./build --prompts mix.toml --out ./answers --answers 8\n"
    "  kimi-k3 generation ./build --prompts mix.toml --out ./answers --setting greedy\n"
    "  kimi-k3 generation ./build --prompts mix.toml --out ./answers --limit 5 \\\n"
    "      --max-tokens 200                         a first look\n\n"
    "Of each conversation (a JSON line with messages and perhaps tools) the prompt is all\n"
    "up to its last user or tool message; of each text its first tokens. mlx-lm answers\n"
    "one prompt at a time, so that an answer depends on its seed alone. FOLDER gets\n"
    "answers.jsonl (a line an answer: read some!) and generation.json (per corpus and\n"
    "overall, with intervals). Stopped or killed, the same command goes on where it was.\n"
    "A build that does not fit into this machine's memory is refused before it is loaded.\n"
    "docs/generation.md says what each measure sees and what it cannot see.\n",
    add_arguments,
    run,
)
