"""Judges a build by its teacher: the same tokens through both, prediction by prediction.

OUT/predictions.npz    the result
OUT/build/             final hidden states of the build, while it runs
OUT/teacher/           those of the source, where no teacher was made before; kept
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..build.saliency import FILE_NAME as SALIENCY
from ..build.saliency import SaliencyTable
from ..build.sample_rows import Samples
from ..build.samples import load_tokenizer, open_samples
from ..errors import EvaluationError
from .divergence import Divergences, divergences
from .evaluation import FILE_NAME, Evaluation
from .final_states import ROWS_PER_STEP, FinalStates, Run, Watch, discard
from .scored import Scored

TEACHER, BUILD = "teacher", "build"

#: What the divergence is of, in this order.
DIRECTION = "KL(teacher || build)"

#: Predictions whose logits are in memory at once.
BLOCK = 256


def make_teacher(
    source: str | Path,
    samples: Samples | str | Path,
    out: str | Path,
    *,
    part: str = "held_out",
    float32: bool = False,
    rows_per_step: int = ROWS_PER_STEP,
    memory_limit: int | None = None,
    restart: bool = False,
    progress: Watch | None = None,
) -> FinalStates:
    """Run ``samples`` through ``source`` layer by layer, and keep what its head reads.

    Called again with the same arguments it goes on where it was stopped, to the same
    bits; finished, it gives the result.

    Args:
        source: a checkpoint folder of any format.
        samples: a value, an ``.npz`` file of it, a mix (TOML), or a shipped mix's name.
        out: a folder, new or of the same teacher.
        part: which part of the mix: "held_out", "calibration" or "all".
        float32: compute in float32 instead of the checkpoint's own type.
        rows_per_step: rows that go through a layer together. In bfloat16 other rows
            beside a row change its roundings, so the default is 1.
        memory_limit: bytes of hidden states to hold in memory; above, they are read
            from ``out`` as needed. Default: a quarter of this machine's memory.
        restart: discard what ``out`` holds of an earlier run.
        progress: is told after each layer how far it is.

    Raises the KimiK3Error that says what is wrong.
    """
    if not isinstance(samples, Samples):
        samples = open_samples(samples, source, part)
    run = Run.of(
        source,
        samples,
        float32=float32,
        rows_per_step=rows_per_step,
        memory_limit=memory_limit,
    )
    return run.final_states(out, restart=restart, progress=progress)


def evaluate(
    build: str | Path,
    against: str | Path,
    out: str | Path,
    *,
    samples: Samples | str | Path | None = None,
    part: str = "held_out",
    calibration: str | Path | None = None,
    float32: bool | None = None,
    rows_per_step: int = ROWS_PER_STEP,
    memory_limit: int | None = None,
    restart: bool = False,
    progress: Callable[[str], Watch] | None = None,
) -> Evaluation:
    """KL(teacher || build), perplexities and agreement of every prediction of ``samples``.

    Called again with the same arguments it goes on where it was stopped, to the same
    bits; finished, it gives the result.

    Args:
        build: a checkpoint folder of any format.
        against: its source, or the folder that :func:`make_teacher` filled.
        out: a folder, new or of the same evaluation.
        samples: as for :func:`make_teacher`; a teacher has its own.
        part: as for :func:`make_teacher`.
        calibration: the folder of the calibration that the build was planned with, or
            its ``saliency.npz``: samples that share a document with it are refused.
        float32: as for :func:`make_teacher`; a teacher has its own.
        progress: gives, for "teacher" and "build", what is told how far it is.

    Raises EvaluationError for a teacher of other samples, type or tokenizer, OverlapError
    for samples that the build was calibrated on.
    """
    out = Path(out)
    options = {"rows_per_step": rows_per_step, "memory_limit": memory_limit}
    ready = FinalStates.open(against) if FinalStates.exist(against) else None
    chosen = _samples(ready, samples, against, part)
    overlap = _refuse_overlap(chosen, calibration)
    if ready is not None:
        float32 = _dtype_of(ready, float32)
    run = Run.of(build, chosen, float32=bool(float32), **options)
    now = asdict(run.conditions)
    if restart:
        discard_evaluation(out)
    watch = progress or (lambda what: lambda at: None)
    if ready is None:
        source = Run.of(against, chosen, float32=bool(float32), **options)
        _refuse_other_result(out, asdict(source.conditions), now)
        ready = source.final_states(out / TEACHER, progress=watch(TEACHER))
    teacher = asdict(ready.conditions)
    done = _refuse_other_result(out, teacher, now)
    if done is not None:
        return done
    states = run.final_states(out / BUILD, progress=watch(BUILD))
    about = {
        "direction": DIRECTION,
        "teacher": {**teacher, "path": ready.path},
        "build": {**now, "path": states.path},
        "overlap": overlap,
    }
    result = compare(ready, states, about)
    result.save(out)
    discard(out / BUILD)
    (out / BUILD).rmdir()
    return result


def compare(
    teacher: FinalStates, build: FinalStates, about: dict[str, Any] | None = None
) -> Evaluation:
    """Judge ``build`` by ``teacher``, which are of the same samples.

    The whole vocabulary is looked at, some predictions at a time; the numbers do not
    depend on how many. Raises EvaluationError for other samples or another vocabulary.
    """
    if teacher.conditions.samples != build.conditions.samples:
        raise EvaluationError("teacher and build were run on other samples.")
    if teacher.head.vocab != build.head.vocab:
        raise EvaluationError(
            f"the teacher tells {teacher.head.vocab} tokens apart and the build "
            f"{build.head.vocab}; their distributions cannot be compared."
        )
    scored = Scored.of(teacher.samples, load_tokenizer(build.path))
    parts = list(_blocks(teacher, build, scored))
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Divergences)
    }
    return Evaluation(
        **joined,
        corpus=scored.corpus,
        document=scored.document,
        span=scored.span,
        language=scored.language,
        position=scored.position,
        corpora=scored.corpora,
        languages=scored.languages,
        about=about or {"direction": DIRECTION},
    )


def discard_evaluation(out: Path) -> None:
    """Delete what :func:`evaluate` wrote to ``out``; a teacher in it is kept."""
    (out / FILE_NAME).unlink(missing_ok=True)
    if (out / BUILD).is_dir():
        discard(out / BUILD)


def _blocks(
    teacher: FinalStates, build: FinalStates, scored: Scored
) -> Iterator[Divergences]:
    ends = np.flatnonzero(np.diff(scored.rows)) + 1
    for places in np.split(np.arange(len(scored.rows)), ends):
        row = int(scored.rows[places[0]])
        wanted, got = teacher.row(row), build.row(row)
        for start in range(0, len(places), BLOCK):
            part = places[start : start + BLOCK]
            at = mx.array(scored.columns[part])
            yield divergences(
                teacher.head.logits(wanted[at]),
                build.head.logits(got[at]),
                scored.targets[part],
            )


def _samples(
    ready: FinalStates | None,
    samples: Samples | str | Path | None,
    against: str | Path,
    part: str,
) -> Samples:
    """The samples to judge by: the teacher's own, if there is one."""
    if ready is None:
        if samples is None:
            raise EvaluationError(
                "name samples to judge by; only a teacher has its own."
            )
        if isinstance(samples, Samples):
            return samples
        return open_samples(samples, against, part)
    if samples is not None:
        given = samples
        if not isinstance(given, Samples):
            given = open_samples(given, ready.path, part)
        if given.fingerprint != ready.samples.fingerprint:
            raise EvaluationError(
                f"{ready.folder} was made of other samples than {samples}. Leave samples "
                "out to judge by the teacher's, or make a teacher of these."
            )
    return ready.samples


def _dtype_of(ready: FinalStates, float32: bool | None) -> bool:
    own = ready.conditions.dtype == "float32"
    if float32 is not None and float32 != own:
        raise EvaluationError(
            f"{ready.folder} was computed in {ready.conditions.dtype} type. Judge by it in "
            "the same one, or make another teacher."
        )
    return own


def _refuse_overlap(samples: Samples, calibration: str | Path | None) -> str:
    """What is known of an overlap; raises OverlapError if there is one."""
    if calibration is None:
        return "not checked"
    path = Path(calibration)
    table = SaliencyTable.load(path / SALIENCY if path.is_dir() else path)
    samples.refuse_overlap(table.samples["document_hashes"], f"the calibration {path}")
    return f"none with the calibration {table.digest}"


def _refuse_other_result(
    out: Path, teacher: dict[str, Any], build: dict[str, Any]
) -> Evaluation | None:
    """What is finished in ``out``, which must be of this teacher and build."""
    if not (out / FILE_NAME).is_file():
        return None
    found = Evaluation.load(out)
    for name, now in ((TEACHER, teacher), (BUILD, build)):
        then = found.about.get(name, {})
        other = [key for key in now if then.get(key) != now[key]]
        if other:
            raise EvaluationError(
                f"{out} holds another evaluation: the {name}'s {', '.join(other)} "
                "differ. Name another folder, or discard it with --restart."
            )
    return found
