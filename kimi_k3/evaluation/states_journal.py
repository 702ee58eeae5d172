"""What making final hidden states keeps on disk, so that nothing is done twice.

FOLDER/partial/lock         held while it runs
FOLDER/partial/begun.json   what is being made: conditions, and what was asked for
FOLDER/partial/states/      hidden states between two layers

What is finished lies beside ``partial``, as ``final_states.py`` says; that goes then.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..build.folder_lock import locked_folder
from ..build.sample_rows import Samples
from ..conversion.durable_files import unfinished_path
from ..errors import EvaluationError, SamplesError
from .conditions import Conditions
from .final_states import (
    FINAL,
    HEAD,
    KIND,
    MANIFEST,
    RESTART,
    SAMPLES,
    VERSION,
    FinalStates,
)
from .sealed_json import read_json

PARTIAL, STATES, BEGUN = "partial", "states", "begun.json"


def is_begun(folder: str | Path) -> bool:
    """Whether final states are being made in ``folder``, or were and are not whole."""
    return (Path(folder) / PARTIAL / BEGUN).is_file()


def kept_samples(folder: str | Path, request: str) -> Samples | None:
    """The samples that ``folder`` was begun with, if by the same ``request``."""
    folder = Path(folder)
    for path in (folder / MANIFEST, folder / PARTIAL / BEGUN):
        if path.is_file():
            begun = read_json(path, KIND, VERSION, RESTART)
            if begun.get("request") != request or not (folder / SAMPLES).is_file():
                return None
            try:
                return Samples.load(folder / SAMPLES)
            except SamplesError as error:
                raise EvaluationError(f"{error} Or start over: {RESTART}") from error
    return None


def discard(folder: Path) -> None:
    """Delete what this module wrote to ``folder``, but the lock.

    Only where something was begun: other files of these names are left alone. What
    tells that they are ours is deleted last.
    """
    if FinalStates.exist(folder) or is_begun(folder):
        for name in (HEAD, FINAL, SAMPLES):
            (folder / name).unlink(missing_ok=True)
        _discard_states(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        (folder / PARTIAL / BEGUN).unlink(missing_ok=True)


def discard_partial(folder: Path) -> None:
    """Delete what only an unfinished run needs."""
    _discard_states(folder)
    (folder / PARTIAL / BEGUN).unlink(missing_ok=True)


def _discard_states(folder: Path) -> None:
    states = folder / PARTIAL / STATES
    for name in ("states.json", "states.partial", "prefix-?.bin", "block-???.bin"):
        for path in states.glob(name):
            path.unlink()
    if states.is_dir():
        states.rmdir()


@contextmanager
def own_folder(folder: Path, written: Iterable[Path]) -> Iterator[None]:
    """``folder`` is this process's alone until the block ends.

    What a killed process had begun to write in place of ``written`` is deleted. Where
    nothing was begun by the end, nothing is left. Raises EvaluationError if another
    process has the folder.
    """
    try:
        with locked_folder(folder, PARTIAL, "evaluated", EvaluationError):
            for path in written:
                unfinished_path(path).unlink(missing_ok=True)
            yield
    finally:
        with suppress(OSError):  # unless it holds anything, or is not there
            folder.rmdir()


def written_files(folder: Path) -> tuple[Path, ...]:
    """What is written to ``folder`` under another name first."""
    return folder / MANIFEST, folder / SAMPLES, folder / PARTIAL / BEGUN


def refuse_other(folder: Path, now: Conditions) -> None:
    """Raise EvaluationError if ``folder`` holds, or has begun, anything else."""
    for path in (folder / MANIFEST, folder / PARTIAL / BEGUN):
        if path.is_file():
            then = read_json(path, KIND, VERSION, RESTART)["conditions"]
            if differences := Conditions.from_dict(then).differences(now):
                raise EvaluationError(
                    f"{folder} holds final states of another run: "
                    f"{'; '.join(differences)}. Name another folder, or {RESTART}"
                )
            return
    foreign = sorted(path.name for path in folder.iterdir() if path.name != PARTIAL)
    if foreign:
        raise EvaluationError(
            f"{folder} holds {foreign[0]} and no final states. Name an empty folder, or "
            "one that is not there yet."
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Layers that "
            "were finished are kept: make room, then start the same command again."
        ) from error
