"""What is looked at before an evaluation reads any weights: hours depend on it."""

from pathlib import Path

from ..build.calibration_checks import request_of
from ..build.corpus_stream import HELD_OUT
from ..build.saliency import FILE_NAME as SALIENCY
from ..build.saliency import SaliencyTable
from ..build.sample_rows import Samples
from ..build.samples import open_samples
from ..conversion.provenance import Provenance
from ..errors import ConversionError, EvaluationError, SamplesError
from .conditions import FLOAT32
from .final_states import FINAL, MANIFEST, FinalStates
from .states_journal import is_begun, kept_samples
from .states_run import Run

#: Subfolder of an evaluation for a teacher that is made on the way.
TEACHER = "teacher"


def refuse_teacher_as_checkpoint(folder: str | Path, what: str) -> None:
    """Raise EvaluationError if ``folder``, wanted as ``what``, is a teacher's."""
    if FinalStates.exist(folder) or is_begun(folder):
        raise EvaluationError(
            f"{folder} holds final hidden states, not a checkpoint: it can be what a build "
            f"is judged by (--against), but not {what}. Name a checkpoint folder."
        )


def open_teacher(against: str | Path) -> FinalStates | None:
    """The teacher in ``against``, all of it read through; None if it is a checkpoint.

    Raises EvaluationError for one that is unfinished or damaged.
    """
    if FinalStates.exist(against):
        ready = FinalStates.open(against)
        ready.check()
        return ready
    if (Path(against) / FINAL).is_file() and not is_begun(against):
        raise EvaluationError(
            f"{Path(against) / MANIFEST} is not there, but final hidden states are: the "
            "teacher is damaged. Take it from a copy, or make the teacher again in an "
            "empty folder."
        )
    inner = Path(against) / TEACHER
    if FinalStates.exist(inner):
        raise EvaluationError(
            f"{against} holds an evaluation, whose teacher is {inner}: name that."
        )
    if is_begun(against):
        raise EvaluationError(
            f"the teacher in {against} is not finished. Start the command that began it "
            "again: `kimi-k3 teacher SOURCE --samples MIX --out` with this folder."
        )
    return None


def refuse_inside(out: Path, **used: str | Path) -> None:
    """Raise EvaluationError if ``out`` is, or lies in, a folder that is only read."""
    for what, path in used.items():
        folder = Path(path).resolve()
        if out.resolve() == folder or folder in out.resolve().parents:
            raise EvaluationError(
                f"{out} lies in {path}, which is the {what} and is only read. Name "
                "another folder with --out."
            )


def asked_samples(
    samples: Samples | str | Path,
    checkpoint: str | Path,
    part: str,
    kept: Path | None = None,
) -> tuple[Samples, str]:
    """The samples, and what they were asked for by.

    Args:
        checkpoint: folder of the tokenizer, if they are to be made.
        part: which part they must be.
        kept: a folder that may hold those of the same request.

    Raises SamplesError for another part, and what making them raises.
    """
    request = f"{part} {request_of(samples)}"
    if isinstance(samples, Samples):
        if samples.part != part:
            raise SamplesError(
                f"these samples are of the part {samples.part!r}, wanted {part!r}. To "
                f'judge by them nevertheless, say part="{samples.part}".'
            )
        return samples, request
    found = None if kept is None else kept_samples(kept, request)
    return found or open_samples(samples, checkpoint, part), request


def samples_of_teacher(
    ready: FinalStates,
    samples: Samples | str | Path | None,
    build: str | Path,
    part: str | None,
) -> Samples:
    """The teacher's own; raises EvaluationError if others are named."""
    own = ready.samples
    if part not in (None, own.part):
        raise EvaluationError(
            f"{ready.folder} was made of the part {own.part!r}, not of {part!r}. Leave "
            "the part out, or make another teacher."
        )
    if samples is None:
        return own
    given = samples
    if not isinstance(given, Samples):
        given = open_samples(given, build, part or own.part)
    if given.fingerprint != own.fingerprint:
        raise EvaluationError(
            f"{ready.folder} was made of other samples than {_named(samples)}. Leave "
            "samples out to judge by the teacher's, or make a teacher of these."
        )
    return own


def dtype_of(ready: FinalStates | None, float32: bool | None) -> bool:
    """Whether to compute in float32; EvaluationError if the teacher was not."""
    if ready is None:
        return bool(float32)
    own = ready.conditions.dtype == FLOAT32
    if float32 not in (None, own):
        raise EvaluationError(
            f"{ready.folder} was computed with --dtype {ready.conditions.dtype}. Judge by "
            "it in the same type, or make another teacher."
        )
    return own


def rows_of(ready: FinalStates | None, rows_per_step: int | None, usual: int) -> int:
    """Rows a step; EvaluationError if the teacher's were others."""
    if ready is None:
        return usual if rows_per_step is None else rows_per_step
    own = ready.conditions.rows_per_step
    if rows_per_step not in (None, own):
        raise EvaluationError(
            f"{ready.folder} was computed with {own} rows a step, not {rows_per_step}. "
            "Judge by it with the same, or make another teacher."
        )
    return own


def part_of(part: str | None) -> str:
    """The part that is judged by, unless another is named: what was held out."""
    return HELD_OUT if part is None else part


def overlap_of(run: Run, calibration: str | Path | None) -> str:
    """What is known of texts that build and samples have in common, in words.

    Args:
        run: of the build.
        calibration: folder or ``saliency.npz`` of the calibration behind it.

    Raises OverlapError if a document of the calibration is judged by.
    """
    planned = _planned_from(run)
    if calibration is None:
        if planned is None:
            return "not checked: no calibration was named with --calibration"
        return (
            f"not checked: the build was planned from the calibration {planned[:12]}, "
            "which was not named with --calibration"
        )
    path = Path(calibration)
    table = SaliencyTable.load(path / SALIENCY if path.is_dir() else path)
    run.samples.refuse_overlap(
        table.samples["document_hashes"], f"the calibration {path}"
    )
    checked = f"none with the calibration {table.digest[:12]}"
    if planned is None:
        return f"{checked}; which one the build was planned from is not recorded"
    if planned != table.digest:
        return (
            f"{checked}, but the build was planned from another one, {planned[:12]}: "
            "overlap with that is not checked"
        )
    return f"{checked}, which the build was planned from"


def made_from_teacher(run: Run, teacher: str) -> bool | None:
    """Whether the build of ``run`` was converted from the checkpoint with the fingerprint
    ``teacher``; None if it keeps no record."""
    record = _record(run)
    return None if record is None else record.fingerprint == teacher


def _planned_from(run: Run) -> str | None:
    """Digest of the saliency that the plan of the build names."""
    record = _record(run)
    plan = None if record is None else record.plan
    named = None if plan is None else plan.about.get("saliency")
    return named if isinstance(named, str) else None


def _record(run: Run) -> Provenance | None:
    try:
        return Provenance.of_config(run.stream.folder.config)
    except ConversionError as error:
        raise EvaluationError(
            f"{run.stream.folder.path}: {error} `kimi-k3 verify` says more."
        ) from error


def _named(samples: Samples | str | Path) -> str:
    return "those given" if isinstance(samples, Samples) else str(samples)
