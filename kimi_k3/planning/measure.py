"""``kimi_k3.damage``: everything that ``kimi-k3 damage`` measures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import measure_damage as errors
from . import probe_damage
from .damage_table import DamageTable
from .probe_table import ProbeTable


@dataclass(frozen=True)
class Measured:
    """What every choice of a plan costs: errors, and how far the answers move.

    ``probes`` is None where they were not asked for.
    """

    table: DamageTable
    probes: ProbeTable | None


def damage(
    source: str | Path,
    calibration: str | Path,
    *,
    low_bits: Sequence[int] = (2,),
    experts_per_layer: int = errors.EXPERTS,
    rows: int = errors.ROWS,
    probes: bool = True,
    tokens: int = probe_damage.TOKENS,
    memory: int = probe_damage.MEMORY,
    restart: bool = False,
    progress: Callable[[errors.Progress], None] | None = None,
    probes_progress: Callable[[probe_damage.Pass], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Measured:
    """Measure ``source`` for plans; both files are kept in the folder ``calibration``.

    Args:
        low_bits, experts_per_layer, rows, restart, progress, tell: as
            :func:`~.measure_damage.measure_damage` takes them.
        probes: also change one part of the model after the other.
        tokens, memory, probes_progress: as :func:`~.probe_damage.measure_probes` takes
            them (``progress`` there).

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then.
    """
    table = errors.measure_damage(
        source,
        calibration,
        low_bits=low_bits,
        experts_per_layer=experts_per_layer,
        rows=rows,
        restart=restart,
        progress=progress,
        tell=tell,
    )
    if not probes:
        return Measured(table, None)
    found = probe_damage.measure_probes(
        source,
        calibration,
        table,
        tokens=tokens,
        memory=memory,
        restart=restart,
        progress=probes_progress,
    )
    return Measured(table, found)
