"""Builds of T1, converted by a plan, and changes to their bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_k3 import TEXT_SIZES, WIDE_EXPERTS, write_t1

from kimi_k3.checkpoint.headers import read_header
from kimi_k3.checkpoint.shard_index import INDEX
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

#: A kept list in no order at all, as bug B11 has it; the first experts of each layer.
SCRAMBLED = (9, 2, 14, 0, 7, 11, 5, 15, 3, 12, 6, 1, 10, 4, 13, 8)

#: Experts kept in layers 1 to 4.
COUNTS = (12, 9, 16, 7)

#: How many of them are in the high bank of a two-bank build; all: one bank.
HIGH_COUNTS = (5, 1, 16, 6)

#: Widths of a few classes, one of them of a fused matrix, one with groups of 32.
BITS = {"kda.qkv_proj": 8, "kda.f_b_proj": 6, "shared_experts.up_proj": 4, "lm_head": 6}


def scrambled(
    counts: tuple[int, ...] = COUNTS,
    high: tuple[int, ...] | None = None,
    **fields: Any,
) -> ExpertPlan:
    """A plan for T1 that keeps ``counts`` experts of :data:`SCRAMBLED` in each layer.

    The list is turned by a place from layer to layer. ``high`` of them are in the high
    bank; None: all.
    """
    layers = {}
    for place, (count, first) in enumerate(zip(counts, high or counts, strict=True)):
        kept = (SCRAMBLED[place:] + SCRAMBLED[:place])[:count]
        layers[place + 1] = LayerPlan(kept[:first], kept[first:])
    return ExpertPlan(
        experts=TEXT_SIZES["num_experts"],
        top_k=TEXT_SIZES["num_experts_per_token"],
        layers=layers,
        **fields,
    )


def write_source(folder: Path, *, seed: int = 0) -> Path:
    """T1 with experts wide enough for a low bank, a tokenizer and a licence."""
    write_t1(folder, seed=seed, tokenizer=True, **WIDE_EXPERTS)
    (folder / "LICENSE").write_text("Do what you like.\n")
    return folder


def stored(folder: Path, name: str) -> tuple[Path, int, int, tuple[int, ...], str]:
    """The shard of the tensor ``name``, its first byte and size, its shape and type."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    found = read_header(path).tensors[name]
    return path, found.start, found.nbytes, found.shape, found.dtype


def read_tensor(folder: Path, name: str) -> np.ndarray:
    """The bytes of a tensor, one row for each entry of its first axis."""
    path, start, nbytes, shape, _ = stored(folder, name)
    raw = path.read_bytes()[start : start + nbytes]
    return np.frombuffer(raw, np.uint8).reshape(shape[0], -1).copy()


def patch(
    folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]
) -> None:
    """Change the bytes of a tensor in place; the header and all else stay.

    ``change`` is given what :func:`read_tensor` gives. It must make a difference.
    """
    path, start, _, _, _ = stored(folder, name)
    before = read_tensor(folder, name)
    after = before.copy()
    given = change(after)
    after = after if given is None else given
    assert after.shape == before.shape
    assert (after != before).any(), f"{name} is as before"
    with path.open("r+b") as file:
        file.seek(start)
        file.write(after.tobytes())


def bank_tensors(layer: int, bank: str = "") -> list[str]:
    """Names of the tensors of a bank; all have a row an expert."""
    at = f"language_model.model.layers.{layer}.mlp.switch_mlp.{bank}"
    suffixes = (
        ("weight", "scales", "biases") if bank == "bank_lo." else ("weight", "scales")
    )
    return [
        f"{at}{matrix}.{suffix}"
        for matrix in ("gate_proj", "up_proj", "down_proj")
        for suffix in suffixes
    ]


def router_tensors(layer: int) -> tuple[str, str]:
    at = f"language_model.model.layers.{layer}.mlp."
    return f"{at}gate.weight", f"{at}e_score_correction_bias"
