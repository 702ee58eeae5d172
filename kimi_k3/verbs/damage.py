"""``kimi-k3 damage``: what every choice of a plan costs, measured."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from . import damage_dry_run
from .printing import add_json_argument
from .progress_lines import ProgressLines, bytes_text, duration_text
from .verb import Verb

if TYPE_CHECKING:
    from ..planning.damage_table import DamageTable
    from ..planning.measure import Measured
    from ..planning.measure_damage import Progress
    from ..planning.probe_damage import Pass
    from ..planning.probe_table import ProbeTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", help="a checkpoint folder in Moonshot's own format"
    )
    parser.add_argument(
        "calibration",
        nargs="?",
        help="the folder of a finished calibration of it, with moments",
    )
    parser.add_argument(
        "--low-bits",
        type=int,
        nargs="+",
        default=[2],
        metavar="BITS",
        help="widths of the low bank to measure: 2, 3, 4 (default: 2)",
    )
    parser.add_argument(
        "--experts-per-layer",
        type=int,
        metavar="N",
        help="experts to quantise in each layer, spread over the ranking; the others "
        "get the layer's mean (default: 16)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows of a matrix to quantise at most, spread over it (default: 1024)",
    )
    parser.add_argument(
        "--probes",
        choices=("on", "off"),
        default="on",
        help="also change one part of the model after the other and see how far its "
        "answers move (default: on)",
    )
    parser.add_argument(
        "--probe-tokens",
        type=int,
        metavar="N",
        help="tokens of the calibration to look at then, an equal part of each corpus "
        "(default: 4096)",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        default=64,
        metavar="GB",
        help="hidden states of probes to hold at once (default: 64)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="discard what was measured before and start over",
    )
    add_json_argument(parser)
    damage_dry_run.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return damage_dry_run.dry_run(options)
    for name, given in (
        ("a checkpoint folder", options.source),
        ("the folder of its calibration", options.calibration),
    ):
        if not given:
            raise PlanError(f"name {name}; --help shows examples.")
    from ..planning.measure import damage
    from ..planning.measure_damage import EXPERTS, ROWS
    from ..planning.probe_damage import TOKENS

    lines = _Lines()
    experts, rows, tokens = (
        options.experts_per_layer,
        options.rows,
        options.probe_tokens,
    )
    try:
        found = damage(
            options.source,
            options.calibration,
            low_bits=options.low_bits,
            experts_per_layer=EXPERTS if experts is None else experts,
            rows=ROWS if rows is None else rows,
            probes=options.probes == "on",
            tokens=TOKENS if tokens is None else tokens,
            memory=damage_dry_run.memory_of(options),
            restart=options.restart,
            progress=lines.layer,
            probes_progress=lines.probes,
            tell=lines.note,
        )
    except KeyboardInterrupt:
        lines.note(
            "stopped. Go on with the same command: finished layers, and finished passes "
            f"of probes, are kept in {options.calibration}."
        )
        return 130
    finally:
        lines.end()
    _print(found, Path(options.calibration), options.json)
    return 0


def _print(found: "Measured", calibration: Path, as_json: bool) -> None:
    table, probes = found.table, found.probes
    if as_json:
        document = {
            "out": str(calibration),
            "low_bits": list(table.low_bits),
            "low": _low_damage(table),
            "classes": {
                name: dict(zip(map(str, table.bits), map(float, row), strict=True))
                for name, row in zip(table.classes, table.classes_damage, strict=True)
            },
            "digest": table.digest,
            "probes": None if probes is None else probes.digest,
        }
        print(json.dumps(document, indent=2))
        return
    print(_text(table, calibration / "damage.npz"))
    if probes is not None:
        print(f"\n{_probes_text(probes, calibration)}")
    print("\n`kimi-k3 plan` takes it with --criterion damage.")


def _probes_text(probes: "ProbeTable", calibration: Path) -> str:
    """What the probes saw, over all corpora as they were recorded."""
    width = max(map(len, probes.classes))
    texts = ", ".join(
        f"{name} {tokens:,}"
        for name, tokens in zip(probes.corpora, probes.tokens.tolist(), strict=True)
    )
    lines = [
        f"{calibration / 'probes.npz'}: tokens of {texts}.",
        "How far the distribution of the next token moves, KL in nats, if one part is cut:",
        "",
        f"{'a class at':<{width}}  "
        + "  ".join(f"{bits:>7} b" for bits in probes.bits),
    ]
    of_class = probes.mean(probes.class_divergence, None)
    for name, row in zip(probes.classes, of_class, strict=True):
        lines.append(f"{name:<{width}}  " + "  ".join(f"{value:9.2g}" for value in row))
    lines += ["", f"{'a layer':<{width}}      half dropped   all in the low bank"]
    drop = probes.mean(probes.drop_divergence, None)
    low = probes.mean(probes.low_divergence, None)
    for at, layer in enumerate(probes.layers):
        found = ", ".join(
            f"{row[at]:.2g} at {bits} bits"
            for bits, row in zip(probes.low_bits, low, strict=True)
            if row[at] == row[at]  # no number: not tried
        )
        lines.append(f"{f'layer {layer}':<{width}}  {drop[at]:16.2g}   {found}")
    return "\n".join(lines)


def _low_damage(table: "DamageTable") -> dict[str, float]:
    """Low width → mean damage of a layer all of whose experts have it."""
    means = table.low.sum(axis=2).mean(axis=1)
    return {
        str(bits): float(mean) for bits, mean in zip(table.low_bits, means, strict=True)
    }


def _text(table: "DamageTable", out: Path) -> str:
    low = ", ".join(
        f"{mean:.3f} at {bits} bits" for bits, mean in _low_damage(table).items()
    )
    width = max(map(len, table.classes))
    lines = [
        f"{out}: {len(table.layers)} layers. Dropping all experts of a layer has damage "
        f"1; a low bank of all of them {low}.",
        "",
        f"{'damage of a class at':<{width}}  "
        + "  ".join(f"{bits:>7} b" for bits in table.bits[1:]),
    ]
    for name, row in zip(table.classes, table.classes_damage, strict=True):
        lines.append(
            f"{name:<{width}}  " + "  ".join(f"{value:9.2g}" for value in row[1:])
        )
    return "\n".join(lines)


class _Lines(ProgressLines):
    """A line a layer."""

    def layer(self, progress: "Progress") -> None:
        """Show how far it is."""
        width, left = len(str(progress.layers)), progress.seconds_left
        speed = progress.bytes_done / max(progress.seconds, 1e-9)
        parts = [
            f"layer {progress.layer + 1:{width}} of {progress.layers}",
            f"{bytes_text(progress.bytes_done)} at {bytes_text(speed)}/s",
            f"{duration_text(progress.seconds)} gone",
        ]
        if left is not None:
            parts.append(f"{duration_text(left)} left")
        self.step("  ".join(parts))

    def probes(self, progress: "Pass") -> None:
        """Show how far the probes are."""
        self.step(
            f"probes, pass {progress.number} of {progress.passes}: layer "
            f"{progress.layer} of {progress.layers}  "
            f"{duration_text(progress.seconds)} gone  "
            f"{duration_text(progress.seconds_left)} left"
        )


VERB = Verb(
    "measure what dropping experts and each width would cost, for `kimi-k3 plan`",
    "  kimi-k3 damage ./Kimi-K3 ./calibration\n"
    "  kimi-k3 damage ./Kimi-K3 ./calibration --low-bits 2 3 4 --experts-per-layer 32\n"
    "  kimi-k3 damage --dry-run --memory-limit 128     before the weights are there\n\n"
    "CALIBRATION must have been made of this source, with moments. The source is read\n"
    "once, a layer at a time. Of every expert the share of what its layer's experts\n"
    "write is computed, which is what dropping it costs; some experts of each layer,\n"
    "and every class of other matrices, are quantised as a conversion would do it, and\n"
    "the errors weighed with what each matrix was seen to read. Dropping all experts of\n"
    "a layer has damage 1. Then probes: each class of matrices at fewer bits, and each\n"
    "layer's experts in a low bank or half of them dropped, one change at a time, while\n"
    "text goes through; what the answers do tells how much each part matters. That\n"
    "reads the source once more for as many probes as fit in memory (a pass). Stopped,\n"
    "the same command goes on behind the last finished layer, or pass of probes.\n",
    add_arguments,
    run,
)
