"""Whether a checkpoint holds the model's parameters: all of them and nothing else."""

from collections import defaultdict
from collections.abc import Iterable

from ..config import TextArgs
from ..errors import CheckpointError
from .names import PREFIX, Placement, layer_of, parts_of, place_all

Shapes = dict[str, tuple[int, ...]]

#: Names that a message lists before it counts the rest.
SHOWN = 3

_AGAIN = "The download or the conversion is incomplete; `kimi-k3 verify` tells more."


def check_complete(found: Shapes, wanted: Shapes, args: TextArgs) -> None:
    """Raise CheckpointError unless ``found`` are the parameters ``wanted``.

    ``found`` are the sanitised tensors of a whole checkpoint; parts of a parameter that
    could not be joined are there under the names they are stored under. Names layer and
    count of what is missing, experts by their number.
    """
    extra = [name for name in found if name not in wanted]
    missing = [name for name in wanted if name not in found]
    if missing and (lost := _lost_parts(place_all(extra, args).values(), args)):
        raise CheckpointError(
            f"layer {min(lost)}: {_listed(lost[min(lost)], 'missing')}"
            f"{_elsewhere(len(lost) - 1)}. {_AGAIN}"
        )
    if missing:
        raise CheckpointError(f"{_missing_text(missing)}. {_AGAIN}")
    if extra:
        raise CheckpointError(
            f"{_listed(extra, 'not part of the model')}. Config and shards are of "
            "different models, or another build's shards were left over in the folder."
        )
    for name, shape in wanted.items():
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(found[name])}, but config.json makes it "
                f"{tuple(shape)}. Config and shards are of different models."
            )


def _lost_parts(
    placements: Iterable[Placement], args: TextArgs
) -> dict[int, list[str]]:
    """What is missing of parameters that are stored in parts, by layer."""
    stored: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for placement in placements:
        if placement.part is not None:
            base, _, suffix = placement.key.rpartition(".")
            stored[base][suffix].add(placement.part)
    lost: dict[int, list[str]] = defaultdict(list)
    for base, suffixes in stored.items():
        packed = "scales" in suffixes or "biases" in suffixes
        for suffix in ("weight", "scales") if packed else ("weight",):
            for part in sorted(set(range(parts_of(base, args))) - suffixes[suffix]):
                lost[layer_of(base) or 0].append(_part_name(base, suffix, part))
    return lost


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
