"""Every build of the wild through mlx-lm's loader: its logits and its tensors."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_close, assert_same, relative_error
from expected_parameters import expected_parameters
from golden_data import Case
from loading import load_float32, load_stored
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from kimi_k3.errors import KimiK3Error
from kimi_k3.folder_check import check_folder

LOGITS = 3e-4


@pytest.fixture(scope="module")
def stored_model(build: Case) -> Any:
    return load_stored(build.folder)


@pytest.fixture(scope="module")
def parameters(stored_model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(stored_model.parameters()))  # type: ignore[arg-type]


def check_parameters(got: dict[str, mx.array], want: dict[str, mx.array]) -> None:
    """Every parameter is the stored tensor, bit for bit, and none is left over."""
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:4]
    for name, tensor in want.items():
        if name.endswith("mlp.gate.weight") and tensor.dtype == mx.float32:
            # A router that is stored quantised is computed to float32 on either side.
            assert_close(got[name], tensor, rel=1e-6, where=name, dtype=mx.float32)
        else:
            assert_same(got[name], tensor, where=name)


def test_build_gives_the_expected_logits(build: Case) -> None:
    expected = build.expected("expected_logits")
    model = load_float32(build.folder)
    got = model(expected["input_ids"])
    assert_close(got, expected["logits"], rel=LOGITS, where=build.name)


def test_parameters_are_the_stored_tensors(
    build: Case, parameters: dict[str, mx.array]
) -> None:
    check_parameters(parameters, expected_parameters(build))


def test_source_parameters_are_the_stored_tensors(golden: Case) -> None:
    model = load_stored(golden.folder)
    got: Any = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    check_parameters(got, expected_parameters(golden))


def swap_rows(tensor: mx.array, i: int, j: int) -> mx.array:
    order = list(range(len(tensor)))
    order[i], order[j] = order[j], order[i]
    return tensor[mx.array(order)]


@pytest.mark.parametrize(
    "kind", ["down_proj.weight", "scales", "gate.weight", "correction_bias", "A_log"]
)
def test_two_swapped_rows_are_found(
    build: Case, parameters: dict[str, mx.array], kind: str
) -> None:
    """Broken twin: in each layer in turn, two experts (or heads) change places."""
    want = expected_parameters(build)
    place = ".self_attn." if kind == "A_log" else ".mlp."
    tried = 0
    for name in want:
        if not name.endswith(kind) or place not in name or len(want[name]) < 2:
            continue
        if place == ".mlp." and ".layers.0." in name:
            continue  # the dense layer has no experts
        broken = dict(parameters)
        broken[name] = swap_rows(broken[name], 0, len(want[name]) - 1)
        mentioned = {name: want[name]}
        with pytest.raises(AssertionError, match="values differ|relative error"):
            check_parameters({name: broken[name]}, mentioned)
        tried += 1
    assert tried > 0


def test_logits_notice_swapped_experts(build: Case) -> None:
    """Broken twin: the first and the last row of one router, bias included."""
    expected = build.expected("expected_logits")
    model = load_float32(build.folder)
    moe = model.layers[2].mlp
    last = len(moe.gate.weight) - 1
    moe.gate.weight = swap_rows(moe.gate.weight, 0, last)
    moe.e_score_correction_bias = swap_rows(moe.e_score_correction_bias, 0, last)
    got = model(expected["input_ids"])
    assert relative_error(got, expected["logits"]) > 10 * LOGITS


#: What names the fault of each broken build.
FAULTS = {
    "bank-lo-missing": r"layer 3: expert_bank_split is 6 of 7 .*bank_lo",
    "expert-counts": r"layer 2: .*expert_counts says 15 .* 14 ",
    "missing-shard": r"model-00005-of-00010\.safetensors .*56 tensors, layer 3",
    "truncated-shard": r"model-00007-of-00010\.safetensors is 158418 bytes .*159442",
    "turboquant-marker": r"turboquant build \(quantization\.rotation",
}

#: What is said where mlx-lm reads the shards before it asks our class.
AT_LOAD = FAULTS | {
    "missing-shard": r"layer 3: 29 tensors are missing",
    "truncated-shard": r"incomplete download",
}


def test_a_broken_build_is_refused_by_the_folder_check(broken: Path) -> None:
    with pytest.raises(KimiK3Error, match=FAULTS[broken.name]):
        check_folder(broken)


@pytest.mark.filterwarnings("ignore:this build stores the router")
def test_a_broken_build_is_refused_at_load(broken: Path) -> None:
    kind = RuntimeError if broken.name == "truncated-shard" else KimiK3Error
    with pytest.raises(kind, match=AT_LOAD[broken.name]):
        load_model(broken)
