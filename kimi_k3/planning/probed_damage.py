"""Damage in nats: errors inside layers, scaled by what probes saw of the answers.

Errors tell the experts of one layer apart, and the widths of one class. How much a layer
or a class matters to the next token they do not tell; a table of probes does.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..errors import PlanError
from .damage import Damage
from .probe_table import ProbeTable

#: Less than any divergence that matters; keeps logarithms finite.
_LEAST = 1e-9


def probed(
    damage: Damage, probes: ProbeTable, weights: Mapping[str, float] | None = None
) -> Damage:
    """``damage`` in nats of KL(source ‖ build) of the next token.

    Dropping an expert costs its part of what dropping half of its layer's experts
    together did; the low bank, its part of what the whole layer in the low bank did,
    or would have done where that was not tried. A
    width that no probe tried lies on the line between its neighbours' logarithms.

    Args:
        weights: corpus → share of the text, as ``SaliencyTable.shares`` takes them.

    Raises PlanError for probes of another checkpoint, or without the low width.
    """
    if dict(probes.source) != dict(damage.source):
        raise PlanError(
            "the probes are of another checkpoint than the calibration. Run `kimi-k3 "
            "damage` on the same source."
        )
    widths = probes.low_bits.tolist()
    if damage.low_bits not in widths:
        raise PlanError(
            f"a low bank of {damage.low_bits} bits was not probed; there are "
            f"{', '.join(map(str, widths))}. Run `kimi-k3 damage` with --low-bits."
        )
    fallen = probes.mean(probes.drop_divergence, weights)
    lowered = probes.mean(probes.low_divergence, weights)
    lowered = _everywhere(lowered[widths.index(damage.low_bits)], fallen)
    dropped = (damage.drop * probes.dropped).sum(axis=1)
    drop = damage.drop * _ratio(fallen, dropped, damage.drop.sum(axis=1))
    low = damage.low * _ratio(lowered, damage.low.sum(axis=1), None)
    of_class = probes.mean(probes.class_divergence, weights)
    tried = dict(zip(probes.classes, of_class, strict=True))
    return replace(
        damage,
        drop=drop,
        low=np.minimum(low, drop),
        classes={
            name: _between(by_bits, probes.bits, tried[name])
            if name in tried
            else by_bits
            for name, by_bits in damage.classes.items()
        },
        origin={**damage.origin, "probes": probes.digest},
        nats=True,
    )


def _everywhere(lowered: np.ndarray, fallen: np.ndarray) -> np.ndarray:
    """(L,) nats of the low bank; of layers that were not tried (NaN) by what they fell.

    A layer that misses half of its experts much misses their bits as much.
    """
    tried = ~np.isnan(lowered)
    ratio = lowered[tried].sum() / max(fallen[tried].sum(), _LEAST)
    return np.where(tried, lowered, ratio * fallen)


def _ratio(
    nats: np.ndarray, errors: np.ndarray, instead: np.ndarray | None
) -> np.ndarray:
    """(L, 1): nats for an error of 1; where nothing of error was tried, of ``instead``."""
    if instead is not None:
        errors = np.where(errors > 0, errors, instead)
    found = np.maximum(nats, _LEAST) / np.where(errors > 0, errors, 1.0)
    return found[:, None]


def _between(
    errors: Mapping[int, float], bits: np.ndarray, nats: np.ndarray
) -> dict[int, float]:
    """Nats at every width of ``errors``, from those at the probed ``bits``."""
    points = sorted(
        (errors[width], max(found, _LEAST))
        for width, found in zip(bits.tolist(), nats.tolist(), strict=True)
        if errors.get(width, 0) > 0
    )
    if not points:
        return dict(errors)
    known = np.log([error for error, _ in points])
    values = np.maximum.accumulate(np.log([found for _, found in points]))
    return {
        width: float(np.exp(np.interp(np.log(error), known, values))) if error else 0.0
        for width, error in errors.items()
    }
