"""Whether what ``kimi-k3 damage`` left beside a calibration was measured on that one.

A folder is calibrated again, tables are merged, files are copied: the source and the
shapes may agree then, and the figures be those of other text.
"""

from pathlib import Path

import numpy as np

from ..build.journal import MOMENTS
from ..build.saliency import SaliencyTable
from ..conversion.importance import Importance
from ..errors import ConversionError, PlanError
from ..models import Model
from .damage_table import DamageTable
from .matrix_classes import class_matrices
from .plan_sizes import SourceSizes
from .probe_table import ProbeTable


def check_damage(
    measured: DamageTable, file: Path, table: SaliencyTable, sizes: SourceSizes
) -> None:
    """Raise PlanError if ``measured``, of ``file``, is not of the calibration beside it.

    The moments that it was measured with are read whole, where they still are there.
    """
    for name in ("source", "layers", "experts"):
        if not np.array_equal(getattr(measured, name), getattr(table, name)):
            raise PlanError(
                f"{file} was measured on another checkpoint than the saliency: their "
                f"{name} differ. Measure again with `kimi-k3 damage`."
            )
    stated = measured.settings.get("moments")
    if stated is None or not (file.parent / MOMENTS).is_dir():
        return
    paths = (path for _, path, _ in class_matrices(Model(sizes.args)))
    try:
        now = Importance(file.parent, str(table.source.get("fingerprint")), paths)
    except ConversionError as error:
        raise PlanError(
            f"{file} cannot be held against its moments: {error}"
        ) from error
    if now.digest != stated:
        raise PlanError(
            f"{file} was measured with other moments than {file.parent / MOMENTS} holds: "
            f"those had the digest {stated[:12]}, these have {now.digest[:12]}. Measure "
            f"again: `kimi-k3 damage SOURCE {file.parent} --restart`."
        )


def check_probes(probes: ProbeTable, file: Path, table: SaliencyTable) -> None:
    """Raise PlanError if ``probes``, of ``file``, are not of the saliency's samples."""
    if (found := table.samples["fingerprint"]) == probes.samples:
        return
    again = (
        f"Take --probes off (in Python probes=False), or probe again: `kimi-k3 damage "
        f"SOURCE {file.parent} --restart`."
    )
    if merged := table.samples.get("merged_from"):
        raise PlanError(
            f"{file} is of one calibration, but the saliency is merged from "
            f"{len(merged)}: its samples are {found[:12]}, those of the probes "
            f"{probes.samples[:12]}. Take --probes off (in Python probes=False), or plan "
            "from the calibration that was probed."
        )
    raise PlanError(
        f"{file} was probed with other samples than the saliency's: with "
        f"{probes.samples[:12]}, the saliency is of {found[:12]}. {again}"
    )


def check_low_bits(low_bits: int, probes: ProbeTable, file: Path) -> None:
    """Raise PlanError if ``probes``, of ``file``, did not try a low bank of that width."""
    widths = [int(bits) for bits in probes.low_bits]
    if low_bits not in widths:
        wanted = " ".join(map(str, sorted({*widths, low_bits})))
        raise PlanError(
            f"{file} holds no probe of a low bank of {low_bits} bits; there are "
            f"{', '.join(map(str, widths))}. Take --probes off (in Python probes=False), "
            f"or probe it: `kimi-k3 damage SOURCE {file.parent} --low-bits {wanted} "
            "--restart`."
        )
