"""Attention residuals: the mixture, and which layer reads and stores what."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle_model
import pytest
from closeness import assert_close, relative_error
from loading import recorded
from oracle_pair import MODULE, SIZES, Pair, float64, make_pair

from kimi_k3.models.attention_residuals import ResidualStack, ScoreProjection, mix

EPS = 1e-5


def random_mix(
    blocks: int, tokens: int, hidden: int = 48
) -> tuple[list, mx.array, dict]:
    """Residuals (2, tokens, hidden) of very different sizes, and the two vectors."""
    keys = mx.random.split(mx.random.key(10 * tokens + blocks), blocks + 3)
    shape = (2, tokens, hidden)
    stored = [
        10.0 ** (i - 1) * mx.random.normal(shape, key=keys[i]) for i in range(blocks)
    ]
    vectors = {
        "norm": 1 + 0.3 * mx.random.normal((hidden,), key=keys[-2]),
        "proj": 0.5 * mx.random.normal((1, hidden), key=keys[-1]),
    }
    return stored, mx.random.normal(shape, key=keys[-3]), vectors


def ours(stored: list, prefix: mx.array, vectors: dict, eps: float = EPS) -> mx.array:
    stack = ResidualStack(eps)
    for residual in stored:
        stack.push(residual)
    norm, projection = nn.RMSNorm(prefix.shape[-1]), ScoreProjection(prefix.shape[-1])
    norm.weight, projection.weight = vectors["norm"], vectors["proj"]
    return mix(stack, prefix, norm, projection)


def truth(
    stored: list, prefix: mx.array, vectors: dict, eps: float = EPS
) -> np.ndarray:
    rows = [
        oracle_model.mix(
            [float64(residual[row]) for residual in stored],
            float64(prefix[row]),
            float64(vectors["norm"]),
            float64(vectors["proj"]),
            eps,
        )[0]
        for row in range(len(prefix))
    ]
    return np.stack(rows)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_mix_is_the_oracle(blocks: int, tokens: int) -> None:
    case = random_mix(blocks, tokens)
    assert_close(ours(*case), truth(*case), rel=MODULE, where="mix", dtype=mx.float32)


def test_epsilon_counts_for_small_residuals() -> None:
    stored, prefix, vectors = random_mix(2, 33)
    stored = [1e-3 * residual for residual in stored]
    case = (stored, 1e-3 * prefix, vectors)
    assert_close(ours(*case), truth(*case), rel=MODULE, where="small")
    assert relative_error(ours(*case, eps=1e-6), truth(*case)) > 10 * MODULE


def test_an_empty_stack_hands_on() -> None:
    _, prefix, vectors = random_mix(1, 3)
    assert ours([], prefix, vectors) is prefix


def test_a_mix_of_normed_rows_is_seen() -> None:
    """Broken twin: scores from plain rows, or another order of the stack's norm."""
    stored, prefix, vectors = random_mix(3, 33)
    broken = {"norm": vectors["norm"][::-1], "proj": vectors["proj"]}
    want = truth(stored, prefix, vectors)
    assert relative_error(ours(stored, prefix, broken), want) > 100 * MODULE
    assert relative_error(ours(stored[:2], prefix, vectors), want) > 100 * MODULE


@pytest.fixture(scope="module", params=[1, 2, 3, 12, None], ids=lambda n: f"block{n}")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """Five layers with a block size below, at and above their number, and without."""
    folder: Path = tmp_path_factory.mktemp("t1")
    return make_pair(folder, attn_res_block_size=request.param)


def walk(pair: Pair, seen: dict, row: int, *, block_start: int = 0) -> dict:
    """The schedule in float64, from what the model's own attention and MLPs returned.

    ``block_start`` shifts the layers that store a block, which is a mistake.
    """
    oracle, size = pair.oracle, pair.oracle.config["attn_res_block_size"]
    running = float64(pair.model.model.embed_tokens(seen["input_ids"])[row])
    stack: list[np.ndarray] = []
    wanted = {}
    for i in range(len(oracle.layers)):
        at = f"layers.{i}."
        wanted[f"{at}attn_in"], _ = oracle.residual(i, "self_attention", stack, running)
        attended = float64(seen[f"{at}attn_out"][row])
        if size and (i + block_start) % size == 0:
            stack.append(running)
            running = attended
        else:
            running = running + attended
        wanted[f"{at}mlp_in"], _ = oracle.residual(i, "mlp", stack, running)
        running = running + float64(seen[f"{at}mlp_out"][row])
        wanted[f"{at}out"] = running
    last = "model.output_attn_res"
    wanted["output_res_out"], _ = oracle.mix_with(oracle.weights, last, stack, running)
    if stack:
        wanted["block_residual"] = np.stack(stack, axis=1)
    return wanted


@pytest.fixture(scope="module")
def seen(pair: Pair) -> dict:
    """A forward pass of two rows of 33 tokens, watched from outside."""
    ids = mx.arange(66).reshape(2, 33) * 17 % pair.oracle.config["vocab_size"]
    with recorded(pair.model) as seen:
        pair.model(ids)
        mx.eval(seen)
    return {**seen, "input_ids": ids}


def test_the_schedule_is_the_oracle(pair: Pair, seen: dict) -> None:
    """Each layer's two inputs, the running sum and the stored blocks."""
    size = pair.oracle.config["attn_res_block_size"]
    assert ("block_residual" in seen) == (size is not None)
    for row in range(2):
        wanted = walk(pair, seen, row)
        assert len(wanted) >= 3 * len(pair.oracle.layers) + 1
        for name, want in wanted.items():
            assert_close(seen[name][row], want, rel=MODULE, where=name)


@pytest.mark.parametrize("pair", [2, 3, 12], indirect=True)
def test_another_schedule_is_seen(pair: Pair, seen: dict) -> None:
    """Broken twin: blocks that are stored one layer early."""
    wanted = walk(pair, seen, 0, block_start=1)
    assert relative_error(seen["layers.4.out"][0], wanted["layers.4.out"]) > 0.01
