"""How much each input channel of a matrix matters: the moments of a calibration."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..build.input_moments import LayerMoments
from ..build.journal import HEAD, MOMENTS
from ..build.saliency import FILE_NAME, SaliencyTable
from ..checkpoint.names import PREFIX, layer_of
from ..checkpoint.stored_format import StoredFormat
from ..errors import CalibrationError, ConversionError
from ..planning.expert_plan import ExpertPlan
from .build_layout import BuildLayout

_EXPERTS, _EMBEDDING = ".switch_mlp.", ".embed_tokens"

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

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read every file, so that none is found damaged after hours of work.

        ``shapes`` are as :func:`importance_shapes` gives them. Raises CalibrationError
        or ConversionError naming a file that is not whole, not of this model, or a copy
        of another layer's.
        """
        files: dict[Path, list[str]] = {}
        for module in shapes:
            if not module.endswith(_EMBEDDING):
                files.setdefault(self._path(module), []).append(module)
        seen: dict[str, Path] = {}
        for path, modules in sorted(files.items()):
            other = seen.setdefault(_file_digest(path), path)
            if other != path:
                raise ConversionError(
                    f"{path} and {other.name} hold the same: one was copied over the "
                    "other. Calibrate again with --restart."
                )
            for module in modules:
                self._check_shape(path, module, shapes[module])

    def _check_shape(self, path: Path, module: str, wanted: tuple[int, ...]) -> None:
        try:
            found = self._moments(module).of(_inside(module))
        except CalibrationError as error:
            told = str(error)
            named = told if path.name in told else f"{path}: {told}"
            raise ConversionError(f"{named} {_REMEDY}") from error
        # The experts' are of all corpora together; a row a corpus for the others.
        shape = found.shape if _EXPERTS in module else found.shape[1:]
        # Heads may all read the same, as unembed_out does.
        shared = () if _EXPERTS in module else wanted[-1:]
        if shape not in (wanted, shared):
            raise ConversionError(
                f"{path}: the moments of {module} are of shape {shape}, but it wants "
                f"{wanted}: they are of another layer or another model. {_REMEDY}"
            )

    def of(self, module: str) -> mx.array | None:
        """(inputs,) of the matrix ``module``, a path of the model; (heads, inputs) of one
        matrix a head; None for the embedding, which no activations multiply.
        """
        if module.endswith(_EMBEDDING):
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


def importance_shapes(
    layout: BuildLayout, plan: ExpertPlan, modules: Mapping[str, StoredFormat]
) -> dict[str, tuple[int, ...]]:
    """Module path → shape of what weighs it: (inputs,), (heads, inputs), or of experts
    (experts of the source, inputs).
    """
    stored = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    found = {}
    for module, form in modules.items():
        *batch, _, words = stored[f"{module}.weight"]
        inputs = words * 32 // form.bits
        experts = (plan.experts, inputs)
        found[module] = experts if _EXPERTS in module else (*batch, inputs)
    return found


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
