"""``kimi-k3 plan --dry-run``: what a plan and its conversion come to, without weights."""

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from .dry_run import add_dry_run, disk_speeds
from .printing import print_report

if TYPE_CHECKING:
    from ..conversion.conversion_cost import ConversionCost
    from ..planning.make_plan import PlanResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only a dry run has."""
    add_dry_run(
        parser,
        "print all that, and bytes, disk and hours of the conversion, and write no plan "
        "(but pictures, with --plot); without a calibration for a saliency curve as "
        "published (assumed)",
    )


@dataclass(frozen=True)
class DryRun:
    """What would be planned, and what converting by it would take."""

    result: "PlanResult"
    cost: "ConversionCost"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plan, conversion = self.result.report.to_dict(), self.cost.to_dict()
        return {"plan": plan, "conversion": conversion}

    def text(self) -> str:
        """For a reader: the plan, then the conversion."""
        return f"{self.result.report.text()}\n\nconverting by it\n\n{self.cost.text()}"


def dry_run(options: argparse.Namespace) -> int:
    """Print what ``options`` would come to."""
    from .plan import draw_pictures, refuse_undrawable

    refuse_undrawable(options)
    found = rehearse(options)
    if options.out:
        print(
            f"--dry-run writes no plan: {options.out} is left as it is", file=sys.stderr
        )
    draw_pictures(found.result, options)
    print_report(found, options.json)
    return 0


def rehearse(options: argparse.Namespace) -> DryRun:
    """Plan as ``options`` say, from the calibration they name or an assumed one."""
    from ..conversion.conversion_cost import conversion_cost
    from ..planning.make_plan import plan, source_config
    from .plan import request_of

    speeds = disk_speeds(options, PlanError)
    config = source_config(options.source)
    request = request_of(options)
    if options.saliency:
        result = plan(options.saliency, options.source, **request)
    else:
        result = _plan_assumed(config, request)
    return DryRun(result, conversion_cost(config, result.plan, disk_speeds=speeds))


def _plan_assumed(config: Any, request: dict[str, Any]) -> "PlanResult":
    from ..planning.assumed_saliency import ASSUMED, assumed_table
    from ..planning.make_plan import plan_with
    from ..planning.plan_request import PlanRequest
    from ..planning.plan_sizes import SourceSizes
    from ..planning.scores import DAMAGE

    asked = PlanRequest(**request)
    if asked.criterion == DAMAGE:
        raise PlanError(
            "without a calibration there is no measured damage. Name its folder, or take "
            "another criterion."
        )
    sizes = SourceSizes.of(config)
    table = assumed_table(sizes.args.text_config)
    if asked.weights is not None:
        raise PlanError(
            "without a calibration there are no corpora to weigh. Name its folder, or "
            "leave --weight out."
        )
    return plan_with(asked, table, sizes, assumed=ASSUMED)
