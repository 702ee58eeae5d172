"""``kimi-k3 demo --report``: the nano's pruned copy judged, as a report and a model card.

FOLDER/report.html, *.png    the report
FOLDER/README.md             the model card of the copy
FOLDER, in work/             teacher, evaluation, answers and speed; kept, so that a
                             second run takes seconds and a stopped one goes on
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..answers.generation import generation
from ..answers.tool_calls import ToolChecker
from ..build.mix_file import find_mix
from ..build.pass_progress import Progress
from ..build.pictures import require_matplotlib
from ..build.samples import make_samples
from ..conversion.durable_files import write_durably
from ..errors import EvaluationError
from ..evaluation.evaluate import evaluate, make_teacher
from ..evaluation.summary import Summary
from ..machine.bench import bench
from ..reporting.card import card
from ..reporting.report import report
from .cache import DemoFolders, demo_folders

#: Conversations to judge by, shipped with the package, and how much of them: enough for
#: intervals, little enough for two processor cores.
TRACES, CONVERSATIONS, LENGTH = "traces", 5, 769

#: Short chats of the kinds that the nano knows, half of them with a tool; answers to
#: each where tokens are drawn, and tokens of an answer.
QUESTIONS = Path(__file__).parent / "demo-questions.jsonl"
ANSWERS, ANSWER_TOKENS = 2, 96

#: What is timed: tokens of the prompt, tokens that follow, times.
PROMPT_TOKENS, DECODED_TOKENS, RUNS = 64, 32, 2

CARD, WORK, SPEED = "README.md", "work", "bench.json"


@dataclass(frozen=True)
class DemoPages:
    """What was written: a page and a model card."""

    report: Path
    card: Path


def report_demo(
    folder: str | Path, cache_dir: str | Path, progress: Callable[[str], None]
) -> DemoPages:
    """Judge the pruned copy of the shipped nano by the nano; report and card.

    Called again with the same ``folder`` it keeps what is done.

    Args:
        cache_dir: where the copy is kept.
        progress: gets a line as soon as something is to be told.

    Raises MissingPackageError without matplotlib or jsonschema, and whatever a step raises.
    """
    require_matplotlib()
    # Says now, and not after minutes, that its package is missing.
    ToolChecker([{"name": "any"}], str(QUESTIONS))
    work = Path(folder) / WORK
    work.mkdir(parents=True, exist_ok=True)
    progress("1 of 6  the nano and its pruned copy")
    folders = demo_folders(cache_dir)
    evaluation = _evaluate(folders, work, progress)
    progress("4 of 6  the copy answers")
    answers = work / "answers"
    _kept(
        lambda restart: generation(
            folders.two_bank,
            QUESTIONS,
            answers,
            answers=ANSWERS,
            max_tokens=ANSWER_TOKENS,
            restart=restart,
            progress=lambda at: _tenth(progress, "answer", at.done, at.total),
        )
    )
    progress("5 of 6  its speed")
    speed = work / SPEED
    timed = bench(
        folders.two_bank,
        prompt_tokens=PROMPT_TOKENS,
        decoded_tokens=DECODED_TOKENS,
        runs=RUNS,
    )
    write_durably(speed, json.dumps(timed.to_dict()).encode())
    progress("6 of 6  report and card")
    page = report(
        folders.two_bank, folder, evaluations=[evaluation], generations=[answers]
    )
    return DemoPages(
        report=page,
        card=card(
            folders.two_bank,
            Path(folder) / CARD,
            evaluations=[evaluation],
            generations=[answers],
            benchmarks=[speed],
            replace=True,
        ),
    )


def _evaluate(
    folders: DemoFolders, work: Path, progress: Callable[[str], None]
) -> Path:
    """Teacher, evaluation and its summary; the folder of the last two."""
    progress("2 of 6  the nano reads conversations: the teacher")
    mix = replace(find_mix(TRACES), tokens=CONVERSATIONS * LENGTH, length=LENGTH)
    samples = make_samples(mix, folders.plain, "held_out")
    teacher, out = work / "teacher", work / "evaluation"
    _kept(
        lambda restart: make_teacher(
            folders.plain,
            samples,
            teacher,
            restart=restart,
            progress=lambda at: _layer(progress, at),
        )
    )
    progress("3 of 6  the copy reads the same, and is judged")
    found = _kept(
        lambda restart: evaluate(
            folders.two_bank,
            teacher,
            out,
            restart=restart,
            progress=lambda what: lambda at: _layer(progress, at),
        )
    )
    Summary.of(found).save(out)
    return out


def _kept(step: Callable[[bool], Any]) -> Any:
    """What ``step`` gives; what an earlier version or copy left is discarded."""
    try:
        return step(False)
    except EvaluationError:
        return step(True)


def _layer(progress: Callable[[str], None], at: Progress) -> None:
    if at.finished:
        progress(f"        layer {at.layer + 1} of {at.layers}")


def _tenth(progress: Callable[[str], None], what: str, done: int, total: int) -> None:
    if done * 10 // total > (done - 1) * 10 // total:
        progress(f"        {what} {done} of {total}")
