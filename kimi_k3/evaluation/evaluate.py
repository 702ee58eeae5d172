"""Judges a build by its teacher: the same tokens through both, prediction by prediction.

OUT/predictions.npz    the result; the command writes its summary beside it
OUT/build/             final hidden states of the build, while it runs
OUT/teacher/           those of the source, where no teacher was made before; kept
OUT/partial/           the lock, while it runs
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..build.pass_progress import Tell, Watch
from ..build.sample_rows import Samples
from ..errors import EvaluationError
from .checks import (
    TEACHER,
    asked_samples,
    dtype_of,
    made_from_teacher,
    open_teacher,
    overlap_of,
    part_of,
    refuse_inside,
    refuse_teacher_as_checkpoint,
    rows_of,
    samples_of_teacher,
)
from .evaluation import FILE_NAME, Evaluation, is_evaluation
from .final_states import RESTART, FinalStates
from .judging import DIRECTION, Judged, check_vocab, compare
from .states_journal import discard, own_folder, writing
from .states_run import ROWS_PER_STEP, Run
from .summary import FILE_NAME as SUMMARY

__all__ = ["DIRECTION", "compare", "discard_evaluation", "evaluate", "make_teacher"]

BUILD = "build"


def make_teacher(
    source: str | Path,
    samples: Samples | str | Path,
    out: str | Path,
    *,
    part: str | None = None,
    float32: bool = False,
    rows_per_step: int = ROWS_PER_STEP,
    memory_limit: int | None = None,
    restart: bool = False,
    progress: Watch | None = None,
    tell: Tell | None = None,
) -> FinalStates:
    """Run ``samples`` through ``source`` layer by layer, and keep what its head reads.

    Called again with the same arguments it goes on where it was stopped, to the same
    bits; finished, it gives the result.

    Args:
        source: a checkpoint folder of any format.
        samples: a value, an ``.npz`` file of it, a mix (TOML), or a shipped mix's name.
        out: a folder, new or of the same teacher.
        part: which part of the mix: "held_out" (default), "calibration" or "all".
        float32: compute in float32 instead of the checkpoint's own type.
        rows_per_step: rows that go through a layer together. In bfloat16 other rows
            beside a row change its roundings, so the default is 1.
        memory_limit: bytes of hidden states to hold in memory; above, they are read
            from ``out`` as needed. Default: a quarter of this machine's memory.
        restart: discard what ``out`` holds of an earlier run.
        progress: is shown how far it is, at every row.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong.
    """
    refuse_teacher_as_checkpoint(source, "a source")
    refuse_inside(Path(out), source=source)
    kept = None if restart else Path(out)
    chosen, request = asked_samples(samples, source, part_of(part), kept)
    run = Run.of(
        source,
        chosen,
        float32=float32,
        rows_per_step=rows_per_step,
        memory_limit=memory_limit,
        request=request,
    )
    return run.final_states(out, restart=restart, progress=progress, tell=tell)


def evaluate(
    build: str | Path,
    against: str | Path,
    out: str | Path,
    *,
    samples: Samples | str | Path | None = None,
    part: str | None = None,
    calibration: str | Path | None = None,
    float32: bool | None = None,
    rows_per_step: int | None = None,
    memory_limit: int | None = None,
    restart: bool = False,
    progress: Callable[[str], Watch] | None = None,
    judged: Judged | None = None,
    tell: Tell | None = None,
) -> Evaluation:
    """KL(teacher || build), perplexities and agreement of every prediction of ``samples``.

    Called again with the same arguments it goes on where it was stopped, to the same
    bits; finished, it gives the result.

    Args:
        build: a checkpoint folder of any format.
        against: its source, or the folder that :func:`make_teacher` filled.
        out: a folder, new or of the same evaluation.
        samples: as for :func:`make_teacher`; a teacher has its own.
        part: as for :func:`make_teacher`; a teacher has its own.
        calibration: the folder of the calibration that the build was planned with, or
            its ``saliency.npz``: samples that share a document with it are refused.
        float32: as for :func:`make_teacher`; a teacher has its own.
        rows_per_step: as for :func:`make_teacher`; a teacher has its own.
        memory_limit: as for :func:`make_teacher`.
        restart: discard what ``out`` holds, but a teacher that is whole and the one
            that is wanted.
        progress: gives, for "teacher" and "build", what is shown how far it is.
        judged: is told how many predictions of how many are judged.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then: EvaluationError for a teacher of other samples, type or tokenizer, OverlapError
    for samples that the build was calibrated on.
    """
    out, tell = Path(out), tell or (lambda text: None)
    refuse_teacher_as_checkpoint(build, "a build")
    refuse_inside(out, build=build, teacher=against)
    ready = open_teacher(against)
    request = ""
    if ready is not None:
        chosen = samples_of_teacher(ready, samples, build, part)
    elif not Path(against).is_dir():
        raise EvaluationError(
            f"{against} is no folder; name the build's source, or a teacher of it, with "
            "--against."
        )
    elif samples is None:
        raise EvaluationError("name samples to judge by; only a teacher has its own.")
    else:
        kept = None if restart else out / TEACHER
        chosen, request = asked_samples(samples, against, part_of(part), kept)
    settings: dict[str, Any] = {
        "float32": dtype_of(ready, float32),
        "rows_per_step": rows_of(ready, rows_per_step, ROWS_PER_STEP),
        "memory_limit": memory_limit,
        "request": request,
    }
    run = Run.of(build, chosen, **settings)
    source = None if ready is not None else Run.of(against, chosen, **settings)
    pair = _Pair.of(run, source or ready, overlap_of(run, calibration))
    for remark in pair.remarks():
        tell(remark)
    with own_folder(out, (out / FILE_NAME,)):
        if (out / SUMMARY).exists() and not (out / FILE_NAME).exists():
            raise EvaluationError(
                f"{out} holds {SUMMARY}, and no evaluation that it is of. Name another "
                "folder, or move that file."
            )
        if restart:
            discard_evaluation(out)
        done = pair.finished_in(out)
        if done is not None:
            tell(f"{out} holds this evaluation, finished; there is nothing to do.")
            return done
        shown = progress or (lambda what: lambda at: None)
        if source is not None:
            again = restart and not _is_whole(out / TEACHER, source)
            ready = source.final_states(
                out / TEACHER, restart=again, progress=shown(TEACHER), tell=tell
            )
        assert ready is not None
        states = run.final_states(out / BUILD, progress=shown(BUILD), tell=tell)
        result = compare(ready, states, pair.about, tokenizer=build, judged=judged)
        with writing(out):
            result.save(out)
            _discard_build(out)
    return result


def discard_evaluation(out: Path) -> None:
    """Delete what :func:`evaluate` wrote to ``out``; a teacher in it is kept.

    A file of the result's name that is none is somebody's own, and stays.
    """
    path = out / FILE_NAME
    if path.is_file() and is_evaluation(path):
        path.unlink()
        (out / SUMMARY).unlink(missing_ok=True)
    if (out / BUILD).is_dir():
        _discard_build(out)


def _is_whole(folder: Path, source: Run) -> bool:
    """Whether ``folder`` holds the teacher that ``source`` would make."""
    try:
        found = FinalStates.open(folder)
        found.check()
    except EvaluationError:
        return False
    return found.conditions == source.conditions


@dataclass(frozen=True)
class _Pair:
    """A build and its teacher, and what the result will say of them."""

    run: Run
    teacher: Run | FinalStates
    about: dict[str, Any]

    @classmethod
    def of(cls, run: Run, teacher: Run | FinalStates | None, overlap: str) -> "_Pair":
        """Raises EvaluationError if they cannot be compared."""
        assert teacher is not None
        if isinstance(teacher, Run):
            vocab, path = teacher.stream.args.vocab_size, teacher.stream.folder.path
        else:
            vocab, path = teacher.head.vocab, teacher.path
        check_vocab(vocab, run.stream.args.vocab_size)
        samples = run.samples
        about = {
            "direction": DIRECTION,
            "teacher": {**asdict(teacher.conditions), "path": str(path)},
            "build": {
                **asdict(run.conditions),
                "path": str(run.stream.folder.path),
                "made_from_teacher": made_from_teacher(
                    run, teacher.conditions.checkpoint
                ),
            },
            "samples": {
                "part": samples.part,
                "rows": samples.rows,
                "length": samples.length,
                "documents": len(samples.document_hashes),
            },
            "overlap": overlap,
        }
        return cls(run, teacher, about)

    def remarks(self) -> Iterator[str]:
        """What a reader of the numbers must know."""
        yield f"overlap with what was calibrated on: {self.about['overlap']}."
        if self.run.samples.part != part_of(None):
            yield f"these are samples of the part {self.run.samples.part!r}."
        if self.about["build"]["made_from_teacher"] is False:
            yield "the build was not converted from this teacher's checkpoint."
        for words in self.teacher.conditions.other_roundings(self.run.conditions):
            yield f"teacher and build were not computed alike ({words})."

    def finished_in(self, out: Path) -> Evaluation | None:
        """What is finished in ``out``; EvaluationError if it is of another pair."""
        if not (out / FILE_NAME).is_file():
            return None
        try:
            found = Evaluation.load(out)
        except EvaluationError as error:
            raise EvaluationError(f"{error} {RESTART}") from error
        for name in (TEACHER, BUILD):
            then, now = found.about.get(name, {}), self.about[name]
            other = [k for k in now if k != "path" and then.get(k) != now[k]]
            if other:
                raise EvaluationError(
                    f"{out} holds another evaluation: of its {name} {', '.join(other)} "
                    "differ. Name another folder, or discard it with --restart."
                )
        if found.about.get("overlap") != self.about["overlap"]:
            # The numbers stay; what was looked at for them is told anew.
            about = {**found.about, "overlap": self.about["overlap"]}
            found = replace(found, about=about)
            with writing(out):
                found.save(out)
        _discard_build(out)
        return found


def _discard_build(out: Path) -> None:
    discard(out / BUILD)
    with suppress(OSError):  # unless it holds other things, or is not there
        (out / BUILD).rmdir()
