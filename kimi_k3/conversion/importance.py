"""How much each input channel of a matrix matters: the moments of a calibration."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..build.input_moments import LayerMoments
from ..build.journal import HEAD, MOMENTS
from ..build.saliency import FILE_NAME, SaliencyTable
from ..checkpoint.names import PREFIX, layer_of
from ..errors import ConversionError

_REMEDY = "Name the folder of a finished calibration with moments."


class Importance:
    """Σ x² by input channel of every matrix, all corpora of a calibration together.

    Attributes:
        digest: of the files that :meth:`of` and :meth:`expert` read.
    """

    def __init__(
        self, calibration: str | Path, fingerprint: str, modules: Iterable[str]
    ):
        """Look for the moments of the module paths ``modules``.

        Raises ConversionError for a calibration of another source than that of
        ``fingerprint``, or one that lacks moments of one of ``modules``.
        """
        self._folder = _calibration_folder(Path(calibration))
        self._loaded: tuple[Path, LayerMoments] | None = None
        table = SaliencyTable.load(self._folder / FILE_NAME)
        if (found := table.source.get("fingerprint")) != fingerprint:
            raise ConversionError(
                f"{self._folder} is a calibration of another checkpoint: its source's "
                f"fingerprint is {found}, this one's {fingerprint}. Calibrate this one."
            )
        digest = hashlib.sha256()
        for path in sorted({self._path(module) for module in modules}):
            digest.update(f"{path.name} {_file_digest(path)}\n".encode())
        self.digest = digest.hexdigest()

    def of(self, module: str) -> mx.array | None:
        """(inputs,) of the matrix ``module``, a path of the model; (heads, inputs) of one
        matrix a head; None for the embedding, which no activations multiply.
        """
        if module.endswith(".embed_tokens"):
            return None
        moments = self._moments(module).of(_inside(module))
        return mx.array(moments.sum(axis=0, dtype=np.float64).astype(np.float32))

    def expert(self, module: str, source_expert: int) -> mx.array:
        """(inputs,) of one expert of the experts' matrix ``module``."""
        return mx.array(self._moments(module).of(_inside(module))[source_expert])

    def _moments(self, module: str) -> LayerMoments:
        path = self._path(module)
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = path, LayerMoments.load(path)
        return self._loaded[1]

    def _path(self, module: str) -> Path:
        layer = layer_of(f".{module}.")
        name = HEAD if layer is None else f"layer-{layer:03d}.npz"
        return self._folder / MOMENTS / name


def _inside(module: str) -> str:
    """The path of ``module`` inside its layer."""
    layer = layer_of(f".{module}.")
    outer = PREFIX if layer is None else f"{PREFIX}model.layers.{layer}."
    return module.removeprefix(outer)


def _calibration_folder(path: Path) -> Path:
    """The calibration at ``path``, which may be its moments' folder."""
    folder = path.parent if path.name == MOMENTS else path
    if not (folder / FILE_NAME).is_file():
        raise ConversionError(
            f"{path} holds no {FILE_NAME}: it is no calibration, or not finished. {_REMEDY}"
        )
    if not (folder / MOMENTS).is_dir():
        raise ConversionError(
            f"{path} holds no {MOMENTS}: it was made with `--moments off`. {_REMEDY}"
        )
    return folder


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read: {error.strerror}. {_REMEDY}"
        ) from error
