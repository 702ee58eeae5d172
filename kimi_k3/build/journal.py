"""What a calibration keeps on disk while it runs, so that nothing is done twice.

OUT/calibration.json    what the results depend on, to the bit
OUT/samples.npz         the samples, so that going on needs no corpus
OUT/moments/            input moments, a file a layer
OUT/partial/            sums of each finished layer, and the hidden states after the last
OUT/saliency.npz        the result; written last

A layer counts as finished when the hidden states after it are committed; its sums and
moments are on the disk by then. ``partial`` goes when the result is there.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CalibrationError, PartialResultError
from .differences import differences
from .expert_recorder import ExpertSums
from .folder_lock import LOCK, locked_folder
from .input_moments import LayerMoments
from .saliency import FILE_NAME as RESULT
from .sealed_npz import read_sealed, write_sealed

#: Of everything here but the result: another version does not go on from it.
FORMAT = 1

RUN, SAMPLES, MOMENTS, PARTIAL = (
    "calibration.json",
    "samples.npz",
    "moments",
    "partial",
)
STATES, HEAD = "states", "head.npz"

_KIND = "sums of a calibrated layer"

#: What is this package's in OUT, in the order in which it is discarded; whatever else
#: lies there is somebody's own.
_RESULTS = (RESULT, f"{MOMENTS}/layer-*.npz", f"{MOMENTS}/{HEAD}")
_PARTIAL_RESULTS = (
    f"{PARTIAL}/layer-*.npz",
    f"{PARTIAL}/{STATES}/states.*",
    f"{PARTIAL}/{STATES}/prefix-?.bin",
    f"{PARTIAL}/{STATES}/block-*.bin",
)
#: The way out that there always is.
RESTART = "--restart discards the partial results and starts over."


@dataclass(frozen=True)
class Conditions:
    """Everything that the bits of the results depend on.

    Attributes:
        source: fingerprint of the checkpoint.
        samples: fingerprint of the tokens and their labels.
        moments: whether input moments are recorded.
        step_tokens: tokens that go through a layer together.
        tool, mlx: versions.
        device: what computes.
        format: of the files beside this one.
    """

    source: str
    samples: str
    moments: bool
    step_tokens: int
    tool: str
    mlx: str
    device: str
    format: int = FORMAT

    def differences(self, other: "Conditions") -> list[str]:
        """In words, what of ``other`` is not as here."""
        return differences(_WORDS, asdict(self), asdict(other))


_WORDS = {
    "source": "the source's fingerprint",
    "samples": "the samples' fingerprint",
    "moments": "moments",
    "step_tokens": "tokens a step",
    "tool": "kimi-k3-mlx",
    "mlx": "mlx",
    "device": "the device",
    "format": "the format of partial results",
}


class Journal:
    """The folder OUT of one calibration, which nobody else writes to meanwhile."""

    def __init__(self, out: Path, conditions: Conditions):
        self.out = out
        self.conditions = conditions

    @property
    def states(self) -> Path:
        """The folder for hidden states."""
        return self.out / PARTIAL / STATES

    @property
    def samples(self) -> Path:
        return self.out / SAMPLES

    def moments_path(self, layer: int) -> Path:
        return self.out / MOMENTS / f"layer-{layer:03d}.npz"

    @property
    def head_path(self) -> Path:
        return self.out / MOMENTS / HEAD

    def record(
        self, layer: int, sums: ExpertSums | None, moments: LayerMoments | None
    ) -> None:
        """Keep what ``layer`` gave; ``sums`` are None if it has no experts."""
        digest = ""
        if moments is not None:
            path = self.moments_path(layer)
            path.parent.mkdir(exist_ok=True)
            moments.save(path)
            digest = _file_digest(path)
        about = {"run": self._run(), "layer": layer, "moments": digest}
        arrays = {} if sums is None else sums.arrays()
        write_sealed(
            self._record_path(layer),
            _KIND,
            FORMAT,
            {**arrays, "about": np.array(json.dumps(about))},
        )

    def read(self, layers: int) -> dict[int, ExpertSums]:
        """The sums of the first ``layers`` layers that have experts.

        Raises PartialResultError naming the first file that is not as it was written.
        """
        found: dict[int, ExpertSums] = {}
        for layer in range(layers):
            path = self._record_path(layer)
            remedy = f"Take it from a copy, or start over: {RESTART}"
            arrays = read_sealed(path, _KIND, FORMAT, PartialResultError, remedy)
            about = json.loads(str(arrays.pop("about")))
            if (about["run"], about["layer"]) != (self._run(), layer):
                raise PartialResultError(
                    f"{path} is of layer {about['layer']} or of another run. {remedy}"
                )
            moments = self.moments_path(layer)
            if about["moments"] and _file_digest(moments) != about["moments"]:
                how = "was changed" if moments.exists() else "is not there any more"
                raise PartialResultError(f"{moments} {how}. {remedy}")
            if arrays:
                found[layer] = ExpertSums(**arrays)
        return found

    def states_are_missing(self) -> bool:
        """Whether layers were finished but no hidden states are there."""
        return any((self.out / PARTIAL).glob("layer-*.npz"))

    def close(self) -> None:
        """Delete what only an unfinished calibration needs."""
        _delete(self.out, _PARTIAL_RESULTS)

    def _record_path(self, layer: int) -> Path:
        return self.out / PARTIAL / f"layer-{layer:03d}.npz"

    def _run(self) -> str:
        return _text_digest(asdict(self.conditions))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """OUT is this process's alone until the block ends, or the process does.

    Raises CalibrationError if another process has it, or it cannot be written. Where
    nothing was begun by the end, nothing is left.
    """
    try:
        with locked_folder(out, PARTIAL, "calibrated", CalibrationError):
            _sweep(out)
            yield
    finally:
        if not (out / RUN).exists():
            with suppress(OSError):  # unless it holds other things, or is not there
                out.rmdir()


def _sweep(out: Path) -> None:
    """Delete what a killed process had begun to write."""
    begun = (*_RESULTS, *_PARTIAL_RESULTS, SAMPLES) if (out / RUN).exists() else ()
    for path in map(Path, (*begun, RUN)):
        _delete(out, [str(path.with_name(f".{path.name}.unfinished"))])


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Says of a disk that takes no more what is kept, and how to go on."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"{error.filename or out} cannot be written: {error.strerror}. Layers that "
            "were finished are kept: make room, then start the same command again to "
            "go on from there."
        ) from error


@dataclass(frozen=True)
class Begun:
    """What ``calibration.json`` says: the conditions, and what samples were asked for."""

    conditions: Conditions
    request: str

    def refuse_other(self, out: Path, now: Conditions) -> None:
        """Raise PartialResultError if ``out`` was begun otherwise than ``now``."""
        differences = self.conditions.differences(now)
        if not differences:
            return
        way_out = f"Start it as it was begun, or name another folder; {RESTART}"
        if (out / RESULT).exists():
            way_out = "It is finished and stays as it is: name another folder."
        raise PartialResultError(
            f"{out} holds a calibration that was begun otherwise: "
            f"{'; '.join(differences)}. {way_out}"
        )

    def save(self, out: Path) -> None:
        """Begin a calibration in ``out``, durably."""
        content = asdict(self)
        document = {**content, "digest": _text_digest(content)}
        unfinished = out / f".{RUN}.unfinished"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(out / RUN)


def read_begun(out: Path) -> Begun | None:
    """What was begun in the folder ``out``; None if nothing was.

    Raises CalibrationError for a folder that holds other things, PartialResultError for
    a damaged ``calibration.json``.
    """
    path = out / RUN
    if not path.exists():
        if _holds_partial_results(out):
            raise PartialResultError(
                f"{path} is not there any more, but partial results are. Take it from a "
                f"copy, or start over: {RESTART}"
            )
        if foreign := _foreign(out):
            raise CalibrationError(
                f"{out} holds {foreign[0]}, and no calibration that was begun. Name an "
                "empty folder, or one that is not there yet."
            )
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text("utf-8"))
        seal = document.pop("digest")
        if seal == _text_digest(document):
            found = document["conditions"]
            # Of another format, whose conditions may be others.
            blank = dict.fromkeys(_WORDS, "") | {"format": 0}
            known = {name: found.get(name, blank[name]) for name in _WORDS}
            return Begun(Conditions(**known), document["request"])
        problem = "its digest is not that of its content"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = str(error) or type(error).__name__
    raise PartialResultError(
        f"{path} is damaged: {problem}. Take it from a copy, or start over: {RESTART}"
    )


def _foreign(out: Path) -> list[str]:
    """What lies in ``out``, where nothing was begun, besides the lock."""
    found = {path.name for path in out.iterdir()} - {PARTIAL}
    partial = {path.name for path in (out / PARTIAL).iterdir()} - {LOCK}
    return sorted(found | {f"{PARTIAL}/{name}" for name in partial})


def discard_all(out: Path) -> None:
    """Delete what a calibration wrote to ``out`` but the lock; the beginning last.

    Only where one was begun: other files of these names are left alone.
    """
    if (out / RUN).exists() or _holds_partial_results(out):
        _delete(out, (*_RESULTS, *_PARTIAL_RESULTS, SAMPLES, RUN))


def _holds_partial_results(out: Path) -> bool:
    return any(path for pattern in _PARTIAL_RESULTS for path in out.glob(pattern))


def _delete(out: Path, patterns: Iterable[str]) -> None:
    """Delete files of ``out`` by pattern, and folders in it that are empty then."""
    for pattern in patterns:
        for path in sorted(out.glob(pattern)):
            path.unlink()
        if (folder := (out / pattern).parent) != out:
            with suppress(OSError):  # unless it holds other things, or is not there
                folder.rmdir()


def _text_digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
