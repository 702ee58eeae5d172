"""Which shards a folder has, what its index says of them, and whether both agree."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingShardError
from .headers import ShardHeader, is_text, read_header
from .names import layer_of

INDEX = "model.safetensors.index.json"

#: The files that mlx-lm loads, whatever the index says.
LOADED = "model*.safetensors"

_LONGEST_NAME = 255


@dataclass(frozen=True)
class ShardIndex:
    """``model.safetensors.index.json``: tensor name to shard file name.

    ``total_size`` is None if the index does not say, ``file`` None if there is no
    index, as a build of one shard may have it.
    """

    file: Path | None
    shard_of: dict[str, str]
    total_size: int | None = None

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.shard_of.values()))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}). Download it again."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object. Download it again.")
    return content


def read_index(folder: Path) -> ShardIndex:
    """The index of ``folder``; of a build of one shard, what that shard holds."""
    path = folder / INDEX
    if not path.exists():
        return _without_index(folder)
    content = read_json(path)
    shard_of = content.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(
            f"{path} has no weight_map, which says where each tensor lies. Download it "
            "again."
        )
    checked: set[str] = set()
    for name, shard in shard_of.items():
        if isinstance(shard, str) and shard in checked and is_text(name):
            continue
        named = isinstance(shard, str) and Path(shard).name == shard
        if not named or len(shard) > _LONGEST_NAME or not is_text(name + shard):
            raise CheckpointError(
                f"{path}: weight_map places {ascii(name)[:120]} in "
                f"{ascii(shard)[:120]}, which is not the name of a file in the folder. "
                "Download it again."
            )
        checked.add(shard)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return ShardIndex(path, shard_of, total if type(total) is int else None)


def _without_index(folder: Path) -> ShardIndex:
    shards = sorted(folder.glob(LOADED))
    if not shards:
        raise CheckpointError(
            f"{folder} holds no {LOADED} and no {INDEX}: there are no weights in it. "
            "Download the checkpoint, or name the folder that has them."
        )
    if len(shards) > 1:
        raise CheckpointError(
            f"{folder} holds {len(shards)} shards but no {INDEX} to tell whether these "
            "are all. Download the index too."
        )
    header = read_header(shards[0])
    return ShardIndex(None, dict.fromkeys(header.tensors, shards[0].name))


def read_shards(
    folder: Path, index: ShardIndex
) -> tuple[dict[str, ShardHeader], list[CheckpointError]]:
    """Headers of the index's shards by file name, and what is wrong with the others."""
    headers: dict[str, ShardHeader] = {}
    faults: list[CheckpointError] = []
    for shard in index.shards:
        if not (folder / shard).is_file():
            faults.append(_missing_shard(shard, index))
            continue
        try:
            headers[shard] = read_header(folder / shard)
        except CheckpointError as fault:
            faults.append(fault)
    return headers, faults


def _missing_shard(shard: str, index: ShardIndex) -> MissingShardError:
    names = [name for name, where in index.shard_of.items() if where == shard]
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return MissingShardError(
        f"shard {shard} named by {INDEX} is not there ({count}, {_layers(names)}); "
        "download it again."
    )


def _layers(names: Iterable[str]) -> str:
    """``layer 3``, ``layers 3-5, 9``, and what lies outside the layers."""
    found = {layer_of(name) for name in names}
    layers = sorted(layer for layer in found if layer is not None)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    parts = [f"layer{'s' if len(layers) > 1 else ''} {text}"] if layers else []
    return " and ".join([*parts, "outside the layers"] if None in found else parts)


def index_faults(
    folder: Path, index: ShardIndex, headers: dict[str, ShardHeader]
) -> list[CheckpointError]:
    """Contradictions between the index, the headers and the files of the folder."""
    named = set(index.shards)
    faults = [
        CheckpointError(
            f"{path.name} is not named by {INDEX}, but mlx-lm loads every {LOADED}: it "
            "was left over from another build. Move it out of the folder."
        )
        for path in sorted(folder.glob(LOADED))
        if path.name not in named
    ]
    holders = Counter(name for h in headers.values() for name in h.tensors)
    listed: dict[str, set[str]] = {shard: set() for shard in headers}
    for name, shard in index.shard_of.items():
        if shard in listed:
            listed[shard].add(name)
    for shard, header in headers.items():
        faults += _shard_faults(shard, header, listed[shard], index, holders)
    return faults


def _shard_faults(
    shard: str,
    header: ShardHeader,
    listed: set[str],
    index: ShardIndex,
    holders: Counter[str],
) -> list[CheckpointError]:
    faults = []
    lacking = sorted(listed - set(header.tensors))
    if lacking:
        others = "" if not holders[lacking[0]] else "; another shard holds it"
        faults.append(
            CheckpointError(
                f"{INDEX} places {lacking[0]} in {shard}, which does not hold it"
                f"{others} ({len(lacking)} such tensors). Index and shards are of "
                "different builds; download both again from one place."
            )
        )
    surplus = sorted(set(header.tensors) - listed)
    if surplus:
        where = index.shard_of.get(surplus[0])
        said = f"places it in {where}" if where else "does not name it"
        faults.append(
            CheckpointError(
                f"{shard} holds {surplus[0]}, but {INDEX} {said} ({len(surplus)} such "
                "tensors). Index and shards are of different builds; download both "
                "again from one place."
            )
        )
    return faults
