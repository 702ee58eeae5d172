"""Which probes a checkpoint gets, and how many of them go through it in one pass."""

from collections.abc import Sequence

import numpy as np

from ..checkpoint.names import layer_of
from ..config import TextArgs
from ..models import Model
from .matrix_classes import affine_format, class_matrices, inputs_of
from .probes import NO_LAYER, ClassProbe, DropProbe, LowProbe, Probe

#: Widths that classes are tried at; others lie between.
PROBED_BITS = (8, 4, 3)

#: Layers whose experts are tried in a low bank, spread evenly: quantising all experts of
#: a layer is dear at full size, and layers that forgive one cut forgive the other.
LOW_LAYERS = 12


def all_probes(
    model: Model,
    dropped: np.ndarray,
    *,
    bits: Sequence[int] = PROBED_BITS,
    low_bits: Sequence[int] = (2,),
) -> list[Probe]:
    """Every probe of the lazily built ``model``.

    In the order of their first layers, so that a pass shares as much as it can.

    Args:
        dropped: (L, E) bool, the experts of each MoE layer that are dropped together.
    """
    text = model.args.text_config
    firsts: dict[str, int] = {}
    for name, path, module in class_matrices(model):
        if affine_format(4, inputs_of(module)) is None:
            continue
        layer = layer_of(path)
        first = NO_LAYER if layer is None else layer
        firsts[name] = min(first, firsts.get(name, first))
    probes: list[Probe] = [
        ClassProbe(name, width, first)
        for name, first in sorted(firsts.items())
        for width in bits
    ]
    layers = text.moe_layers
    spread = np.linspace(0, len(layers) - 1, min(LOW_LAYERS, len(layers)))
    for at in spread.round().astype(int).tolist():
        probes += [LowProbe(layers[at], width) for width in low_bits]
    for layer, out in zip(layers, dropped, strict=True):
        if out.any():
            probes.append(DropProbe(layer, tuple(np.flatnonzero(out).tolist())))
    return sorted(probes, key=lambda probe: probe.first)


def lesser_halves(share: np.ndarray, experts: Sequence[int], top_k: int) -> np.ndarray:
    """(L, E) bool: of each layer the half that matters least, but never too many.

    Args:
        share: (L, E), how much each expert matters. experts: (L,) how many there are.
    """
    dropped = np.zeros(share.shape, bool)
    for row, of_layer, total in zip(dropped, share, experts, strict=True):
        order = np.argsort(of_layer[:total], kind="stable")
        row[order[: min(total // 2, total - top_k)]] = True
    return dropped


def state_bytes(text: TextArgs, tokens: int) -> int:
    """Hidden states of one probe: the residual sum and all blocks, in float32."""
    size = text.attn_res_block_size
    blocks = 0 if size is None else -(-text.num_hidden_layers // size)
    return 4 * (1 + blocks) * tokens * text.hidden_size


def passes_of(
    probes: Sequence[Probe], text: TextArgs, tokens: int, memory: int
) -> list[list[Probe]]:
    """``probes`` by pass: as many as ``memory`` bytes hold beside the source's states."""
    at_once = max(1, memory // state_bytes(text, tokens) - 1)
    return [list(probes[at : at + at_once]) for at in range(0, len(probes), at_once)]


def work_of(some: Sequence[Probe], layers: int) -> list[int]:
    """How many forward passes go through each layer in one pass, the source's included."""
    return [1 + sum(probe.first <= layer for probe in some) for layer in range(layers)]
