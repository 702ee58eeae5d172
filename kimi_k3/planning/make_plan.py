"""``kimi_k3.plan``: from a calibration to an ExpertPlan, and what it keeps and costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..build.saliency import SaliencyTable
from ..checkpoint.folder import CONFIG, read_config
from ..checkpoint.source_layout import full_size_config
from ..config import ModelArgs
from ..errors import PlanError
from .budget_plan import budget_plan
from .damage import Damage
from .damage_table import FILE_NAME as ERRORS
from .damage_table import DamageTable
from .expert_plan import LOW_BITS, ExpertPlan
from .fixed_plans import global_plan, graded_plan, uniform_plan
from .matching_tables import check_damage, check_low_bits, check_probes
from .matrix_classes import CLASS_BITS
from .plan_report import PlanReport, plan_report
from .plan_request import PlanRequest
from .plan_sizes import SourceSizes
from .probe_table import FILE_NAME as PROBES
from .probe_table import ProbeTable
from .probed_damage import probed
from .scores import DAMAGE, check_source

#: Width of the low bank, unless another is asked for.
USUAL_LOW_BITS = 2

#: What saliency is measured by in the report of a plan that measured damage made.
SALIENCY = "reap_sum"


@dataclass(frozen=True, eq=False)
class PlanResult:
    """A plan, what it keeps, costs and promises, and the saliency that it is from.

    Attributes:
        drop: (L, E), what dropping each expert costs, if measured damage chose them.
    """

    plan: ExpertPlan
    report: PlanReport
    table: SaliencyTable
    drop: np.ndarray | None = None


def plan(
    saliency: SaliencyTable | str | Path,
    source: Mapping[str, Any] | str | Path | None = None,
    kind: str = "budget",
    **options: Any,
) -> PlanResult:
    """Choose which experts of a checkpoint stay, and the width of everything.

    Args:
        saliency: what a calibration recorded: the folder, its ``saliency.npz``, or the
            table.
        source: the calibrated checkpoint: its folder, its ``config.json``, or that as a
            mapping. Weights are not needed. None: the released Kimi K3.
        kind: ``uniform``, ``global``, ``graded`` or ``budget``.
        options: how large, and by what: see :class:`~.plan_request.PlanRequest`. Sizes
            are bytes.

    Raises PlanError for what cannot be asked, planned or run, SaliencyError for a table
    that is damaged or lacks a corpus that has a weight.
    """
    request = PlanRequest(kind=kind, **options)
    table, folder = saliency, None
    if not isinstance(table, SaliencyTable):
        folder = Path(table)
        table = SaliencyTable.load(folder)
        folder = folder if folder.is_dir() else folder.parent
    table.shares(request.weights)
    sizes = SourceSizes.of(_fitting_config(table, source))
    return plan_with(request, table, sizes, folder)


def plan_with(
    request: PlanRequest,
    table: SaliencyTable,
    sizes: SourceSizes,
    folder: Path | None = None,
    assumed: str = "",
) -> PlanResult:
    """The same from what is loaded already.

    Args:
        folder: where measured damage lies.
        assumed: see :class:`~.plan_report.PlanReport`.
    """
    damage = _damage(request, table, folder, sizes)
    bound, by_rule = None, None
    if request.kind == "budget":
        found = budget_plan(
            damage,
            sizes,
            memory=request.memory,
            bytes_per_token=request.bytes_per_token,
            frequency=_frequency(table, request.weights),
            least=request.least,
            low_bits=damage.low_bits,
            allowed_bits=request.allowed_bits or CLASS_BITS,
            fixed_bits=request.class_bits(sizes),
        )
        made, bound, by_rule = found.plan, found.bound, found.fixed
    else:
        made = _by_rule(request, table, sizes, damage)
    report = plan_report(
        made,
        sizes,
        table,
        criterion=SALIENCY if request.criterion == DAMAGE else request.criterion,
        weights=request.weights,
        damage=damage,
        bound=bound,
        by_rule=by_rule,
        assumed=assumed,
    )
    drop = damage.drop if request.criterion == DAMAGE else None
    return PlanResult(made, report, table, drop)


def source_config(
    source: Mapping[str, Any] | str | Path | None,
) -> Mapping[str, Any]:
    """The config that ``source`` names, as :func:`plan` takes it."""
    if isinstance(source, str | Path):
        path = Path(source)
        return read_config(path.parent if path.name == CONFIG else path)
    return full_size_config() if source is None else dict(source)


def _fitting_config(
    table: SaliencyTable, source: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any]:
    """The same; raises PlanError if ``table`` was recorded on another checkpoint."""
    config = source_config(source)
    try:
        check_source(table, ModelArgs.from_dict(dict(config)).text_config)
    except PlanError as error:
        if source is not None:
            raise
        raise PlanError(
            "the saliency is not of the released Kimi K3, so sizes need the config of "
            f"what was calibrated. Name its folder as the source (--source). ({error})"
        ) from error
    return config


def _frequency(
    table: SaliencyTable, weights: Mapping[str, float] | None
) -> dict[int, np.ndarray]:
    """Layer → (E,), how often each expert is chosen."""
    score = table.score("frequency", weights)
    return dict(zip(table.layers.tolist(), score, strict=True))


def _damage(
    request: PlanRequest, table: SaliencyTable, folder: Path | None, sizes: SourceSizes
) -> Damage:
    """By the criterion of ``request``, in nats if there are probes."""
    probes, errors = _probes(request, table, folder), None
    if request.criterion == DAMAGE:
        errors = _errors(table, folder, sizes)
    low_bits = _low_bits(request, errors, probes)
    if errors is not None:
        damage = Damage.of_measured(errors, low_bits)
        weights = None if request.weights is None else dict(request.weights)
        origin = {"saliency": table.digest, "weights": weights, **damage.origin}
        damage = replace(damage, origin=origin)
    else:
        damage = Damage.of_criterion(
            table, request.criterion, request.weights, sizes, low_bits
        )
    if probes is None:
        return damage
    assert folder is not None
    check_low_bits(low_bits, probes, folder / PROBES)
    return probed(damage, probes, request.weights)


def _low_bits(
    request: PlanRequest, errors: DamageTable | None, probes: ProbeTable | None
) -> int:
    """Of the low bank; in plans that have none a width that all tables have."""
    if request.kind not in ("uniform", "global"):
        return request.low_bits or USUAL_LOW_BITS
    widths = set(LOW_BITS)
    for known in (errors, probes):
        if known is not None:
            widths &= {int(bits) for bits in known.low_bits}
    return min(widths, default=USUAL_LOW_BITS)


def _probes(
    request: PlanRequest, table: SaliencyTable, folder: Path | None
) -> ProbeTable | None:
    """The probes that ``kimi-k3 damage`` left in ``folder``, if they are wanted."""
    if not request.probes or folder is None or not (folder / PROBES).is_file():
        return None
    probes = ProbeTable.load(folder / PROBES)
    check_probes(probes, folder / PROBES, table)
    return probes


def _errors(
    table: SaliencyTable, folder: Path | None, sizes: SourceSizes
) -> DamageTable:
    """The errors that ``kimi-k3 damage`` left in ``folder``."""
    if folder is None or not (folder / ERRORS).is_file():
        raise PlanError(
            f"{folder or 'the table'} has no {ERRORS}: no damage was measured. Run "
            f"`kimi-k3 damage SOURCE {folder or 'CALIBRATION'}`, or take another criterion."
        )
    errors = DamageTable.load(folder / ERRORS)
    check_damage(errors, folder / ERRORS, table, sizes)
    return errors


def _by_rule(
    request: PlanRequest, table: SaliencyTable, sizes: SourceSizes, damage: Damage
) -> ExpertPlan:
    common: dict[str, Any] = {
        "memory": request.memory,
        "sizes": sizes,
        "criterion": request.criterion,
        "weights": request.weights,
        "bits": request.class_bits(sizes),
        "damage": damage if request.criterion == DAMAGE else None,
    }
    if request.kind == "uniform":
        keep = request.keep
        if keep is not None and keep != int(keep):
            raise PlanError(f"uniform keeps {keep} experts; wanted a whole number.")
        return uniform_plan(table, keep=None if keep is None else int(keep), **common)
    if request.kind == "global":
        return global_plan(table, keep=request.keep, least=request.least, **common)
    return graded_plan(
        table,
        high=request.high,
        low=request.low,
        low_bits=request.low_bits or USUAL_LOW_BITS,
        **common,
    )
