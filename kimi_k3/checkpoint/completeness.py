"""Whether a checkpoint holds the model's parameters: all of them and nothing else."""

from collections import defaultdict
from collections.abc import Mapping

import mlx.core as mx

from ..config import TextArgs
from ..errors import CheckpointError
from .names import PREFIX, layer_of, parts_of, place_all
from .stored_format import PACKED

Shapes = dict[str, tuple[int, ...]]

#: Names that a message lists before it counts the rest.
SHOWN = 3

_AGAIN = "The download or the conversion is incomplete; `kimi-k3 verify` tells more."


def check_complete(
    found: Mapping[str, mx.array], wanted: Shapes, args: TextArgs
) -> None:
    """Raise CheckpointError unless ``found`` are the parameters ``wanted``.

    ``found`` are the sanitised tensors of a whole checkpoint; what could not be joined or
    unpacked is there under the names it is stored under. Names layer and count of what is
    missing, experts by their number. Reads no values.
    """
    extra = {name: tensor for name, tensor in found.items() if name not in wanted}
    missing = [name for name in wanted if name not in found]
    lost = _lost_halves(found, extra)
    if missing and not lost:
        lost = _lost_parts(extra, args)
    if lost:
        raise CheckpointError(
            f"layer {min(lost)}: {_listed(lost[min(lost)], 'missing')}"
            f"{_elsewhere(len(lost) - 1)}. {_AGAIN}"
        )
    if missing:
        raise CheckpointError(f"{_missing_text(missing)}. {_AGAIN}")
    if extra:
        raise CheckpointError(
            f"{_listed(list(extra), 'not part of the model')}. Config and shards are of "
            "different models, or another build's shards were left over in the folder."
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != tuple(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(found[name].shape)}, but config.json makes it "
                f"{tuple(shape)}. Config and shards are of different models."
            )


def _lost_halves(
    found: Mapping[str, mx.array], extra: Mapping[str, mx.array]
) -> dict[int, list[str]]:
    """Scales and biases without which a packed matrix could not be made dense."""
    lost: dict[int, list[str]] = defaultdict(list)
    for name, tensor in found.items():
        base, _, suffix = name.rpartition(".")
        if suffix != "weight" or not base.endswith((".mlp.gate", ".kv_b_proj")):
            continue
        scales = extra.get(f"{base}.scales")
        if scales is not None and f"{base}.biases" not in extra:
            lost[layer_of(base) or 0].append(f"{base.removeprefix(PREFIX)}.biases")
        elif scales is None and tensor.dtype in PACKED:
            lost[layer_of(base) or 0].append(f"{base.removeprefix(PREFIX)}.scales")
    return lost


def _lost_parts(extra: Mapping[str, mx.array], args: TextArgs) -> dict[int, list[str]]:
    """What is missing of parameters that are stored in parts, by layer."""
    stored: dict[str, dict[str, dict[int, mx.array]]] = {}
    for name, placement in place_all(extra, args).items():
        if placement.part is not None:
            base, _, suffix = placement.key.rpartition(".")
            parts = stored.setdefault(base, {}).setdefault(suffix, {})
            parts[placement.part] = extra[name]
    lost: dict[int, list[str]] = defaultdict(list)
    for base, suffixes in stored.items():
        weights, scales, biases = (
            suffixes.get(suffix, {}) for suffix in ("weight", "scales", "biases")
        )
        for part in range(parts_of(base, args)):
            missing = []
            if part not in weights:
                missing.append("weight")
            if part not in scales and _is_packed(weights.get(part), bool(scales)):
                missing.append("scales")
            if part in scales and part not in biases and scales[part].dtype != mx.uint8:
                missing.append("biases")
            for suffix in missing:
                lost[layer_of(base) or 0].append(_part_name(base, suffix, part))
    return lost


def _is_packed(weight: mx.array | None, others_are: bool) -> bool:
    """Whether a part has scales: by its codes, or, without them, as the others do."""
    return others_are if weight is None else weight.dtype in PACKED


def _part_name(base: str, suffix: str, part: int) -> str:
    module = base.rpartition(".")[2]
    if ".switch_mlp." in base:
        return f"expert {part} {module}.{suffix}"
    return f"{module.replace('qkv', 'qkv'[part])}.{suffix}"


def _missing_text(missing: list[str]) -> str:
    by_layer: dict[int, list[str]] = defaultdict(list)
    for name in missing:
        layer = layer_of(name)
        by_layer[-1 if layer is None else layer].append(name)
    first = min(by_layer, key=lambda layer: (layer < 0, layer))
    place = "outside the layers" if first < 0 else f"layer {first}"
    names = [name.removeprefix(PREFIX) for name in by_layer[first]]
    return f"{place}: {_listed(names, 'missing')}{_elsewhere(len(by_layer) - 1)}"


def _listed(names: list[str], what: str) -> str:
    count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{count} {what} ({', '.join(names[:SHOWN])}{more})"


def _elsewhere(places: int) -> str:
    if not places:
        return ""
    return f", and tensors of {places} more layer{'s' if places > 1 else ''}"
