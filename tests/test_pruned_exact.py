"""A pruned build is the full model whose dropped experts can never be chosen (B11)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error, to_numpy
from damage import copy_folder
from loading import load_float32, load_stored
from mlx.utils import tree_flatten
from small_builds import (
    COUNTS,
    HIGH_COUNTS,
    SCRAMBLED,
    bank_tensors,
    patch,
    router_tensors,
    scrambled,
    write_source,
)

from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.conversion.convert import convert
from kimi_k3.models import Model
from kimi_k3.planning.expert_plan import ExpertPlan

#: Enough tokens that each layer's router drops some expert that it would have chosen.
PROMPT = mx.array([[7, 300, 12, 99, 5, 250, 31, 8, 411, 77, 2, 160]])
ANSWER = (64, 9, 500, 31, 212)

#: Of the largest logit: two sums of float32 in another order.
CLOSE = 1e-5

#: The same where one of the two models multiplies packed weights and the other dense
#: ones: each product is rounded otherwise.
PACKED = 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def pruned(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12, 9, 16 and 7 of 16 experts in no order, all as the source has them."""
    return convert(source, tmp_path_factory.mktemp("pruned") / "build", scrambled())


@pytest.fixture(scope="module")
def masked(source: Path) -> np.ndarray:
    """What the source answers, if it cannot choose what the plan drops."""
    return answers(mask(load_float32(source), scrambled()))


@pytest.fixture
def copy(pruned: Path, tmp_path: Path) -> Path:
    return copy_folder(pruned, tmp_path / "build")


def mask(model: Any, plan: ExpertPlan) -> Any:
    """``model`` with a bias of minus infinity for every expert that ``plan`` drops."""
    for layer in plan.layers:
        dropped = [e for e in range(plan.experts) if e not in plan.order(layer)]
        if dropped:
            moe = model.layers[layer].mlp
            moe.e_score_correction_bias[mx.array(dropped)] = -mx.inf
    return model


def answers(model: Any) -> np.ndarray:
    """Logits of a prompt and of the tokens behind it, one by one, (1, T, vocab)."""
    cache = model.make_cache()
    logits = [model(PROMPT, cache=cache)]
    logits += [model(mx.array([[token]]), cache=cache) for token in ANSWER]
    return to_numpy(mx.concatenate(logits, axis=1))


def test_the_kept_lists_are_scrambled_and_matter(source: Path, masked: np.ndarray):
    assert SCRAMBLED[:4] == (9, 2, 14, 0)
    assert sorted(SCRAMBLED) == list(range(16))
    assert all(
        tuple(sorted(plan.order)) != plan.order for plan in scrambled().layers.values()
    )
    assert relative_error(answers(load_float32(source)), masked) > 1e-2


def test_a_pruned_build_is_the_masked_model(pruned: Path, masked: np.ndarray):
    got = answers(load_float32(pruned))
    prompt = PROMPT.shape[1]
    assert_close(got[:, :prompt], masked[:, :prompt], rel=CLOSE, where="prefill")
    assert_close(got[:, prompt:], masked[:, prompt:], rel=CLOSE, where="decode")


def rotate_router(build: Path) -> None:
    for name in router_tensors(1):
        patch(build, name, lambda rows: np.roll(rows, 1, axis=0))


def source_order_of_biases(build: Path) -> None:
    """Biases of the kept experts, but in the source's order."""
    for layer in scrambled().layers:
        order = np.argsort(scrambled().order(layer))
        patch(build, router_tensors(layer)[1], lambda rows, order=order: rows[order])


def swap_experts(build: Path) -> None:
    for name in bank_tensors(2):
        patch(build, name, lambda rows: rows[[1, 0, *range(2, len(rows))]])


BROKEN: dict[str, Callable[[Path], None]] = {
    "router rotated by one": rotate_router,
    "biases not reordered": source_order_of_biases,
    "two experts swapped": swap_experts,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_twin_is_not(copy: Path, masked: np.ndarray, fault: str):
    BROKEN[fault](copy)
    assert relative_error(answers(load_float32(copy)), masked) > 100 * CLOSE


def test_two_banks_are_the_masked_model_with_their_weights(
    source: Path, tmp_path: Path
):
    """The full model, dense, with what the low bank stands for in its experts' place."""
    plan = scrambled(COUNTS, HIGH_COUNTS)
    model = load_float32(convert(source, tmp_path / "build", plan))
    full = dense_model(source)
    weights = dict[str, mx.array](tree_flatten(full.parameters()))  # type: ignore[call-overload]
    for layer, kept in plan.layers.items():
        if not kept.low:
            continue
        experts = model.layers[layer].mlp.switch_mlp
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            name = f"language_model.model.layers.{layer}.mlp.switch_mlp.{matrix}.weight"
            weights[name][mx.array(kept.low)] = dense(experts.bank_lo[matrix])
    full.load_weights(list(weights.items()))
    want = answers(mask(full, plan))
    assert_close(answers(model), want, rel=PACKED)
    # Not with the source's own experts, nor with the lists in another order.
    assert relative_error(answers(mask(dense_model(source), plan)), want) > 1e-2
    other = scrambled(COUNTS, (6, 1, 16, 6))
    broken = load_float32(convert(source, tmp_path / "other", other))
    assert relative_error(answers(broken), want) > 100 * PACKED


def dense(module: Any) -> mx.array:
    """The weights of a quantised module in float32."""
    stored = StoredFormat(module.mode, module.bits, module.group_size)
    return stored.dequantize(module.weight, module.scales, module.get("biases"))


def dense_model(source: Path) -> Any:
    """The source's model in float32, its experts too."""
    stored = load_float32(source)
    model = Model(stored.args)
    weights = dict[str, mx.array](tree_flatten(stored.parameters()))  # type: ignore[call-overload]
    for path, module in stored.named_modules():
        if "scales" in module:
            weights[f"{path}.weight"] = dense(module)
            for part in ("scales", "biases"):
                weights.pop(f"{path}.{part}", None)
    model.load_weights(list(weights.items()))
    model.eval()
    return model


def test_keeping_everything_changes_no_bit(source: Path, tmp_path: Path):
    """In the stored types; and keeping everything in another order changes nothing."""
    want = load_stored(source)(PROMPT)
    identity = convert(source, tmp_path / "identity")
    assert mx.array_equal(load_stored(identity)(PROMPT), want)
    turned = convert(source, tmp_path / "turned", scrambled((16, 16, 16, 16)))
    assert_close(
        answers(load_float32(turned)), answers(load_float32(source)), rel=CLOSE
    )
