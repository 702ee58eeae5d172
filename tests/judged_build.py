"""A small converted build, and results of it that nobody measured."""

import json
from pathlib import Path
from typing import Any

from made_evaluations import ABOUT, made_evaluation
from small_builds import BITS, COUNTS, HIGH_COUNTS, scrambled, write_source

from kimi_k3.answers.generation_report import Generation, GRow, SettingRows
from kimi_k3.build.layer_stream import folder_fingerprint
from kimi_k3.conversion.convert import convert
from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.evaluation.statistics import Estimate
from kimi_k3.evaluation.summary import Summary
from kimi_k3.folder_check import open_folder
from kimi_k3.reporting.report_facts import BuildFacts

PLAN = scrambled(COUNTS, HIGH_COUNTS, bits=BITS)


def make_build(folder: Path) -> Path:
    """``folder/build``, a two-bank build with a licence."""
    source = write_source(folder / "source")
    return convert(source, folder / "build", PLAN)


def fingerprint(build: Path) -> str:
    return folder_fingerprint(open_folder(build))


def save_evaluation(out: Path, checkpoint: str, **changes: Any) -> Evaluation:
    """Predictions and summary of the build with this fingerprint, in ``out``."""
    out.mkdir(parents=True)
    about = {**ABOUT["build"], "checkpoint": checkpoint, "path": f"/home/me/{out.name}"}
    evaluation = made_evaluation(build=about, **changes)
    evaluation.save(out)
    Summary.of(evaluation, draws=200).save(out)
    return evaluation


def save_generation(out: Path, checkpoint: str, corpus: str = "chat") -> Generation:
    """Counted answers; of tools and drift nothing is known."""
    out.mkdir(parents=True)
    estimates = {
        "loops": Estimate(0.0625, 0.0313, 0.141),
        "repeated": Estimate(0.217, 0.113, 0.371),
        "compression": Estimate(2.31, 1.87, 2.93),
        "ends_by_itself": Estimate(0.875),
    }
    row = GRow(16, 8, 777, estimates, {"length": 2}, {"loop": 1})
    about = {
        "build": {"checkpoint": checkpoint, "path": "/home/me/build"},
        "settings": {"greedy": {"temperature": 0.0}},
        "max_tokens": 59,
        "seed": 3,
    }
    rows = {"greedy": SettingRows(row, {corpus: row})}
    generation = Generation(about, 0.95, 200, 0, rows)
    generation.save(out)
    return generation


def save_benchmark(file: Path, facts: BuildFacts, **changes: Any) -> Path:
    """What ``kimi-k3 bench`` prints: words, then one line of JSON."""
    found = {
        "model": "build",
        "device": "Apple M9 | <b>Ultra</b>",
        "prompt_tokens": 512,
        "decoded_tokens": 128,
        "runs": [{}, {}, {}],
        "prefill": 271.8,
        "decode": 31.4,
        "peak_memory": 14_100_000,
        "bytes_per_token": facts.token_bytes,
        "share_of_bandwidth": 0.577,
    }
    file.write_text(f"some words\n{json.dumps(found | changes)}\n")
    return file
