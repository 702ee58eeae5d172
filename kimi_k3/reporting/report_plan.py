"""A plan under what a calibration of its source recorded, for a report."""

import copy
from pathlib import Path
from typing import Any

from ..build import saliency_plot
from ..build.saliency import FILE_NAME as SALIENCY
from ..build.saliency import SaliencyTable
from ..build.saliency_report import saliency_report
from ..checkpoint.folder import read_config
from ..errors import EvaluationError
from ..planning import plan_plot
from ..planning.expert_plan import ExpertPlan
from ..planning.plan_report import PlanReport, plan_report
from ..planning.plan_sizes import SourceSizes
from .report_build import saliency_table
from .report_facts import BuildFacts
from .report_pictures import Picture
from .report_results import Source
from .report_tables import Table

#: Captions of pictures that other rooms draw, by the file's name.
_CAPTIONS = {
    "retention": "Saliency kept against experts kept.",
    "concentration": "Share of each layer's saliency in its most salient experts.",
    "ranks": "Saliency of the experts of each layer, by rank.",
    "overlap": "Experts that corpora have in common among their most salient.",
    "load": "Tokens of the busiest expert, and experts that no token chose.",
    "allocation": "What the plan makes of every expert.",
    "layers": "Experts that the plan keeps in each layer, and their saliency.",
    "bytes": "Where the bytes of the plan are.",
}


class Calibration:
    """A saliency table and the file that it came from."""

    def __init__(self, table: SaliencyTable, source: Source) -> None:
        self.table, self.source = table, source

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        path = Path(path)
        file = path / SALIENCY if path.is_dir() else path
        return cls(SaliencyTable.load(file), Source.of(file))

    def draw(self, out: Path) -> list[Picture]:
        files = saliency_plot.draw(self.table, saliency_report(self.table), out)
        return [_captioned(file) for file in files]


def plan_of(facts: BuildFacts, path: str | Path | None) -> ExpertPlan | None:
    """The plan in the build, or in the file ``path``, which must be the same."""
    recorded = None if facts.record is None else facts.record.plan
    if path is None:
        return recorded
    plan = ExpertPlan.load(path)
    if recorded is not None and recorded.digest != plan.digest:
        raise EvaluationError(
            f"{path} is another plan ({plan.digest}) than the one that {facts.name} was "
            f"made by ({recorded.digest}). Leave --plan out: the build holds its own."
        )
    kept = {layer.layer: layer.experts for layer in facts.layers if layer.experts}
    planned = {number: len(layer.order) for number, layer in plan.layers.items()}
    if kept != planned:
        raise EvaluationError(
            f"{path} keeps other numbers of experts than {facts.name} has. Name the plan "
            "that the build was made by."
        )
    return plan


def plan_shown(
    build: str | Path, plan: ExpertPlan, calibration: Calibration
) -> PlanReport:
    """The figures of ``plan`` under what ``calibration`` recorded."""
    table = calibration.table
    layers = dict(zip(table.layers.tolist(), table.experts.tolist(), strict=True))
    if layers != dict.fromkeys(plan.layers, plan.experts):
        raise EvaluationError(
            f"{calibration.source.name} is a calibration of another model: its layers and "
            "experts are not those that the build was made of. Leave it out, or name the "
            "build's own."
        )
    sizes = SourceSizes.of(_source_config(read_config(Path(build)), plan))
    return plan_report(plan, sizes, table)


def saliency_tables(
    shown: PlanReport | None, plan: ExpertPlan | None, calibration: Calibration
) -> list[Table]:
    """What the plan keeps of what ``calibration`` found; [] without a plan."""
    if shown is None or plan is None:
        return []
    same = plan.about.get("saliency") == calibration.table.digest
    return [saliency_table(shown, str(calibration.source), planned_from=same)]


def _source_config(config: dict[str, Any], plan: ExpertPlan) -> dict[str, Any]:
    """The config of what a build with ``config`` was made of, as far as sizes go."""
    source = copy.deepcopy(config)
    for key in ("quantization", "conversion"):
        source.pop(key, None)
    text = source["text_config"]
    for key in ("expert_counts", "expert_bank_split"):
        text.pop(key, None)
    text["num_experts"] = plan.experts
    return source


def draw_plan(
    plan: ExpertPlan | None,
    shown: PlanReport | None,
    calibration: Calibration | None,
    out: Path,
) -> list[Picture]:
    if plan is None or shown is None or calibration is None:
        return []
    return [
        _captioned(file) for file in plan_plot.draw(plan, shown, calibration.table, out)
    ]


def _captioned(file: Path) -> Picture:
    caption = _CAPTIONS.get(file.stem, file.stem)
    return Picture(file, f"{caption} The table of saliency has figures.", caption)
