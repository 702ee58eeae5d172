"""``kimi-k3 plan``: which experts stay, at which width, and what comes of it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from . import plan_dry_run
from .printing import add_json_argument, print_report
from .saliency import corpus_weight, refuse_unfinished, stated_once
from .verb import Verb

if TYPE_CHECKING:
    from ..planning.make_plan import PlanResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "saliency",
        nargs="?",
        help="the folder that calibrate filled, or a saliency.npz",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="where the plan goes, a JSON file"
    )
    parser.add_argument(
        "--kind",
        default="budget",
        metavar="KIND",
        help="uniform: the same number in each layer; global: the best of all layers; "
        "graded: two widths, the same numbers in each layer; budget (default): for every "
        "expert and class the width that loses least",
    )
    parser.add_argument(
        "--source",
        metavar="FOLDER",
        help="the calibrated checkpoint or its config.json; no weights are needed "
        "(default: the released Kimi K3)",
    )
    _add_sizes(parser.add_argument_group("how large"))
    _add_choice(parser.add_argument_group("what matters"))
    _add_widths(parser.add_argument_group("widths"))
    parser.add_argument(
        "--plot", metavar="FOLDER", help="draw pictures (PNG) there; needs matplotlib"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FILE if it is there"
    )
    add_json_argument(parser)
    plan_dry_run.add_arguments(parser)


def _add_sizes(group: Any) -> None:
    group.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="bytes of the build, in 1e9; leave room for KV cache and macOS",
    )
    group.add_argument(
        "--per-token",
        type=float,
        metavar="GB",
        help="budget: bytes that a decoded token may read; an M3 Ultra reads 819 GB/s",
    )
    group.add_argument(
        "--keep",
        type=float,
        metavar="N",
        help="uniform: experts of each layer; global: on average",
    )
    group.add_argument(
        "--high", type=int, metavar="N", help="graded: experts of a layer in mxfp4"
    )
    group.add_argument(
        "--low", type=int, metavar="N", help="graded: experts of a layer at --low-bits"
    )
    group.add_argument(
        "--least",
        type=int,
        metavar="N",
        help="global, budget: experts that every layer keeps (default: top-k)",
    )


def _add_choice(group: Any) -> None:
    group.add_argument(
        "--criterion",
        default="reap_sum",
        metavar="NAME",
        help="reap_sum (default), reap_mean, relative, frequency, gate, or damage: "
        "errors that `kimi-k3 damage` measured",
    )
    group.add_argument(
        "--weight",
        action="append",
        type=corpus_weight,
        metavar="CORPUS=SHARE",
        help="let a corpus stand for this share of the text; those not named for none",
    )
    group.add_argument(
        "--probes",
        choices=("on", "off"),
        default="on",
        help="damage in nats, if `kimi-k3 damage` has probed (default: on)",
    )


def _add_widths(group: Any) -> None:
    group.add_argument(
        "--low-bits",
        type=int,
        metavar="BITS",
        help="graded, budget: of the low bank: 2 (default), 3 or 4",
    )
    group.add_argument(
        "--bits",
        action="append",
        type=_class_bits,
        metavar="[CLASS=]BITS",
        help="of all matrices besides routed experts, or of a class of them, as "
        "kda.o_proj=6; default: 16, and what budget chooses",
    )
    group.add_argument(
        "--allow-bits",
        nargs="+",
        type=int,
        metavar="BITS",
        help="budget: widths that it may choose for classes (default: 16 8 6 5 4 3)",
    )


#: What the options are called that :class:`~..planning.plan_request.PlanRequest` knows
#: by other names.
SPELLING = {
    "keep": "--keep",
    "high": "--high",
    "low": "--low",
    "low_bits": "--low-bits",
    "least": "--least",
    "memory": "--memory",
    "bytes_per_token": "--per-token",
    "allowed_bits": "--allow-bits",
}


def _class_bits(text: str) -> tuple[str, int]:
    name, _, bits = text.rpartition("=")
    return name, int(bits)


def run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return plan_dry_run.dry_run(options)
    if not options.saliency:
        raise PlanError(
            "name the folder of a calibration, or use --dry-run; --help shows examples."
        )
    if not options.out:
        raise PlanError("name a file for the plan with --out; --help shows examples.")
    out = Path(options.out)
    refuse_existing(out, options.force)
    refuse_unfinished(Path(options.saliency))
    refuse_undrawable(options)
    from ..planning.make_plan import plan

    result = plan(options.saliency, options.source, **request_of(options))
    draw_pictures(result, options)
    result.plan.save(out)
    print(f"written: {out}", file=sys.stderr)
    print_report(result.report, options.json)
    return 0


def request_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the options ask for, in bytes, as ``PlanRequest`` takes it."""
    return {
        "kind": options.kind,
        "keep": options.keep,
        "high": options.high,
        "low": options.low,
        "low_bits": options.low_bits,
        "least": options.least,
        "memory": _bytes("--memory", options.memory),
        "bytes_per_token": _bytes("--per-token", options.per_token),
        "criterion": options.criterion,
        "weights": stated_once(options.weight),
        "probes": options.probes == "on",
        "bits": _named_once(options.bits),
        "allowed_bits": options.allow_bits,
        "spelling": SPELLING,
    }


def refuse_existing(out: Path, force: bool) -> None:
    """A plan may be the only one that tells what a build holds: keep what is there."""
    if out.is_dir():
        raise PlanError(f"{out} is a folder; name a file, as {out / 'plan.json'}.")
    if out.exists() and not force:
        raise PlanError(
            f"{out} is there already. Name another file, or add --force to replace it."
        )


def refuse_undrawable(options: argparse.Namespace) -> None:
    """Say before the work, not after it, that nothing can draw its pictures."""
    if options.plot:
        from ..build.pictures import require_matplotlib

        require_matplotlib()


def draw_pictures(result: "PlanResult", options: argparse.Namespace) -> None:
    if not options.plot:
        return
    from ..planning.plan_plot import draw

    shown = result.plan, result.report, result.table
    for file in draw(*shown, options.plot, result.drop):
        print(f"drawn: {file}", file=sys.stderr)


def _bytes(option: str, gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not 0 < gigabytes < float("inf"):
        raise PlanError(f"{option} is {gigabytes:g} GB; wanted more than 0.")
    return round(gigabytes * 1e9)


def _named_once(bits: list[tuple[str, int]] | None) -> dict[str, int] | None:
    named = dict(bits or ())
    if len(named) < len(bits or ()):
        names = ", ".join(name or "all" for name, _ in bits or ())
        raise PlanError(f"--bits names a class twice: {names}. Give each once.")
    return named or None


VERB = Verb(
    "choose which experts stay, and every width, from a calibration",
    "  kimi-k3 plan ./calibration --memory 450 --out plan.json\n"
    "  kimi-k3 plan ./calibration --memory 450 --per-token 60 --out plan.json\n"
    "  kimi-k3 plan ./calibration --kind uniform --keep 242 --bits 8 --out plan.json\n"
    "  kimi-k3 plan ./calibration --kind graded --high 121 --low 205 --bits 8 \\\n"
    "                             --out plan.json --plot ./pictures\n"
    "  kimi-k3 plan ./calibration --memory 450 --weight code=0.7 --weight chinese=0.3 \\\n"
    "                             --out audit.json\n"
    "  kimi-k3 plan --dry-run --memory 450        before anything is calibrated\n"
    "  kimi-k3 convert ./Kimi-K3 ./build --plan plan.json\n\n"
    "Prints what stays (experts, saliency by corpus), sizes to the byte, bytes that a\n"
    "token reads and tokens a second that Macs can reach with it; docs/planning.md\n"
    "explains each figure. GB are 1e9 bytes of weights: a 512 GB Mac has 515 for the\n"
    "GPU, of which the KV cache needs some. Classes of matrices are named as in the\n"
    "table of sizes. Run `kimi-k3 damage` before to plan by how far the answers move:\n"
    "it tells which layers and which matrices matter. The plan is a JSON file that\n"
    "convert reads and puts into the build.\n",
    add_arguments,
    run,
)
