"""Copies of small checkpoints, damaged in one way each."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from golden_data import DATA

import kimi_k3
from kimi_k3.build.verify import verify
from kimi_k3.errors import KimiK3Error
from kimi_k3.folder_check import check_folder

#: A two-bank build of the wild, 8 layers in 10 shards.
GRADED = DATA / "formats" / "D-pn-graded-q8"

INDEX = "model.safetensors.index.json"

Tensors = dict[str, mx.array]


def refuse(folder: Path, kind: type[KimiK3Error], message: str) -> None:
    """Folder check and ``load`` raise ``kind`` with ``message``; verify lists it."""
    for look in (check_folder, kimi_k3.load):
        with pytest.raises(kind, match=message) as caught:
            look(folder)
        assert caught.type is kind
        assert len(str(caught.value)) < 600
    report = verify(folder)
    assert not report.passed
    assert any(re.search(message, fault.what) for fault in report.faults)


def copy_folder(source: Path, target: Path) -> Path:
    """A copy of the files of ``source`` in the new folder ``target``."""
    return Path(shutil.copytree(source, target))


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply ``change`` to the object in ``path``, in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_json(folder / "config.json", change)


def edit_text_config(folder: Path, **values: Any) -> None:
    edit_config(folder, lambda config: config["text_config"].update(values))


def edit_map(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Apply ``change`` to the index's tensor name → shard."""
    edit_json(folder / INDEX, lambda index: change(index["weight_map"]))


def load_shard(path: Path) -> Tensors:
    tensors: Any = mx.load(str(path))
    mx.eval(tensors)  # the file may be written over
    return tensors


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Apply ``change`` to the tensors of each shard; the index is made to fit."""
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob("model*.safetensors")):
        tensors = load_shard(path)
        change(tensors)
        mx.save_safetensors(str(path), tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def drop_tensors(folder: Path, *parts: str) -> None:
    """Remove the tensors whose names hold one of ``parts``."""

    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if any(part in n for part in parts)]:
            del tensors[name]

    edit_tensors(folder, drop)


def replace_tensor(
    folder: Path, name: str, change: Callable[[mx.array], mx.array]
) -> None:
    """Put ``change(tensor)`` in the place of the tensor ``name``, which must exist."""
    done = []

    def replace(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = change(tensors[name])
            done.append(name)

    edit_tensors(folder, replace)
    assert done, f"{folder} has no tensor {name}"


# The four builds of the wild that come broken, made from an intact one.


def missing_shard(folder: Path) -> None:
    (folder / "model-00005-of-00010.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    with (folder / "model-00007-of-00010.safetensors").open("r+b") as file:
        assert file.seek(0, 2) == 159442
        file.truncate(158418)


def expert_counts(folder: Path) -> None:
    def raise_one(config: dict[str, Any]) -> None:
        counts = config["text_config"]["expert_counts"]
        assert counts[2] == 14
        counts[2] = 15

    edit_config(folder, raise_one)


def bank_lo_missing(folder: Path) -> None:
    drop_tensors(folder, "model.layers.3.block_sparse_moe.switch_mlp.bank_lo.")
