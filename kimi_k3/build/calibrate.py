"""Runs samples through a checkpoint, layer by layer, and records what matters in it.

One layer's weights are in memory, and the next layer's on their way. Each layer's sums,
moments and hidden states are safe on disk before the next begins, so that a run that is
killed at any point goes on to the same bits.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ..errors import CalibrationError, PartialResultError, SaliencyError, SamplesError
from ..machine.hardware import read_machine
from .calibration_checks import check_samples, check_source, request_of
from .calibration_run import CalibrationRun
from .journal import (
    RESTART,
    RESULT,
    SAMPLES,
    Begun,
    Conditions,
    Journal,
    discard_all,
    locked,
    read_begun,
    writing,
)
from .layer_stream import LayerStream
from .pass_progress import Tell, Watch
from .saliency import TOOL, SaliencyTable
from .samples import Samples, open_samples

#: Tokens that go through a layer together, in whole rows.
STEP_TOKENS = 2048

#: Share of the machine's memory in which hidden states may be held.
HELD_SHARE = 0.25

#: Told what is being done to make samples, how much of it is done, and of how much.
SamplesProgress = Callable[[str, int, int], None]


def calibrate(
    source: str | Path,
    samples: Samples | str | Path,
    out: str | Path,
    *,
    moments: bool = True,
    step_tokens: int = STEP_TOKENS,
    memory_limit: int | None = None,
    restart: bool = False,
    progress: Watch | None = None,
    samples_progress: SamplesProgress | None = None,
    tell: Tell | None = None,
) -> SaliencyTable:
    """Calibrate the checkpoint ``source`` on ``samples``; results are in ``out`` too.

    Called again with the same arguments it goes on where it was stopped, and gives the
    same bits; when it is finished it gives the result and does nothing.

    Args:
        source: a checkpoint folder of any format.
        samples: a value, an ``.npz`` file of it, a mix (TOML), or a shipped mix's name.
        out: a folder, new or of the same calibration. Gets ``saliency.npz`` and
            ``moments/``.
        moments: whether to record second moments of what each matrix reads.
        step_tokens: tokens that go through a layer together, in whole rows. More need
            more memory; the results depend on it in their last bits.
        memory_limit: bytes of hidden states to hold in memory; above, they are read
            from ``out`` as needed. Default: a quarter of this machine's memory.
        restart: discard the partial results in ``out``.
        progress: is shown how far it is, at every step.
        samples_progress: the same while samples are made.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then: CalibrationError, and of partial results that are damaged or another
    calibration's, PartialResultError.
    """
    if step_tokens < 1:
        raise CalibrationError(f"step_tokens is {step_tokens}, wanted 1 or more.")
    tell = tell or (lambda text: None)
    if memory_limit is not None and memory_limit < 0:
        raise CalibrationError(
            f"memory_limit is {memory_limit}, wanted 0 bytes or more."
        )
    machine = read_machine()
    if memory_limit is None:
        memory_limit = int(machine.memory * HELD_SHARE)
    stream, out = LayerStream(source), Path(out)
    check_source(stream.args)
    for note in stream.notes:
        tell(note)
    with locked(out):
        if restart and not _is_finished(out):
            discard_all(out)
        begun, request = read_begun(out), request_of(samples)
        chosen = _kept(out, begun, request) or _open(samples, stream, samples_progress)
        check_samples(chosen, stream)
        now = Conditions(
            source=stream.fingerprint,
            samples=chosen.fingerprint,
            moments=moments,
            step_tokens=step_tokens,
            tool=TOOL,
            mlx=version("mlx"),
            device=machine.device,
        )
        if begun is not None:
            begun.refuse_other(out, now)
        journal = Journal(out, now)
        if (out / RESULT).exists():
            table = _finished(out)
            tell(f"{out} holds this calibration, finished; there is nothing to do.")
        else:
            with writing(out):
                Begun(now, request).save(out)
                chosen.save(journal.samples)
            run = CalibrationRun(stream, chosen, journal, memory_limit, progress, tell)
            table = run.result()
            with writing(out):
                table.save(out)
        journal.close()
    return table


def _finished(out: Path) -> SaliencyTable:
    """The result in ``out``, which must be whole."""
    try:
        return SaliencyTable.load(out / RESULT)
    except SaliencyError as error:
        raise PartialResultError(f"{error} {RESTART}") from error


def _is_finished(out: Path) -> bool:
    """Whether ``out`` holds a result, and knows what it is the result of."""
    try:
        _finished(out)
        return read_begun(out) is not None
    except CalibrationError:
        return False


def _kept(out: Path, begun: Begun | None, request: str) -> Samples | None:
    """The samples that were made of the same mix before, if they were."""
    path = out / SAMPLES
    if begun is None or begun.request != request or not path.exists():
        return None
    try:
        return Samples.load(path)
    except SamplesError as error:
        raise PartialResultError(f"{error} {RESTART}") from error


def _open(
    samples: Samples | str | Path,
    stream: LayerStream,
    progress: SamplesProgress | None,
) -> Samples:
    if isinstance(samples, Samples):
        return samples
    return open_samples(samples, stream.folder.path, progress=progress)
