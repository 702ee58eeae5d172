"""Chunked prefill is one shot, and a row of a batch is that row alone (B07, B08)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_close, relative_error
from loading import load_float32
from mlx_lm.generate import BatchGenerator
from tiny_k3 import t0_model, write_t2

from kimi_k3.models.kda import KimiDeltaAttention

CLOSE = 1e-4
NEW_TOKENS = 12

LENGTHS = {
    "long": (31, 5, 17),
    "shorter than the convolution": (1, 2, 3),
    "mixed": (1, 40),
}


@pytest.fixture(scope="module", params=["one bank", "two banks"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    if request.param == "one bank":
        return t0_model()
    return load_float32(write_t2(tmp_path_factory.mktemp("t2") / "build"))


def prompt(length: int) -> list[int]:
    return [(37 * i + 11 * length) % 97 for i in range(length)]


def run_in_pieces(model: Any, ids: list[int], split: list[int]) -> mx.array:
    """All logits (T, vocab) of a prefill in pieces of the given sizes."""
    cache, pieces, start = model.make_cache(), [], 0
    for size in split:
        piece = mx.array([ids[start : start + size]])
        pieces.append(model(piece, cache=cache))
        mx.eval(pieces[-1], [entry.state for entry in cache])
        start += size
    assert start == len(ids)
    return mx.concatenate(pieces, axis=1)[0]


def in_steps(length: int, step: int) -> list[int]:
    whole, rest = divmod(length, step)
    return [step] * whole + ([rest] if rest else [])


SPLITS = {
    "one": [40],
    "7, 13, 20": [7, 13, 20],
    "singles": [1] * 40,
    "pairs": [2] * 20,
    "3, 1, 36": [3, 1, 36],
    "exactly a step": in_steps(40, 40),
    "a step and one": in_steps(40, 39),
    "steps of 8": in_steps(40, 8),
    "steps of 13": in_steps(40, 13),
}


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_one_shot(model: Any, split: str) -> None:
    ids = prompt(40)
    want = model(mx.array([ids]))[0]
    got = run_in_pieces(model, ids, SPLITS[split])
    assert_close(got, want, rel=CLOSE, where=split)


@contextmanager
def forgetting(change: Callable[[Any], None]) -> Iterator[None]:
    """KDA layers that see their cache only after ``change`` was done to it."""
    original = KimiDeltaAttention.__call__

    def mistaken(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is not None:
            change(cache)
        return original(self, x, mask, cache)

    KimiDeltaAttention.__call__ = mistaken
    try:
        yield
    finally:
        KimiDeltaAttention.__call__ = original


def drop_state(cache: Any) -> None:
    cache[1] = None


def drop_convolution(cache: Any) -> None:
    cache[0] = None


def transpose_state(cache: Any) -> None:
    if cache[1] is not None:
        cache[1] = cache[1].swapaxes(-1, -2)


@pytest.mark.parametrize("change", [drop_state, drop_convolution, transpose_state])
def test_a_lost_state_is_seen(model: Any, change: Callable) -> None:
    """Broken twin: what other software lost between chunks."""
    ids = prompt(40)
    want = model(mx.array([ids]))[0]
    with forgetting(change):
        got = run_in_pieces(model, ids, [7, 13, 20])
    assert relative_error(got, want) > 100 * CLOSE


def alone(model: Any, ids: list[int]) -> tuple[mx.array, list[int]]:
    """Log-probabilities (vocab,) after ``ids`` and the greedy tokens that follow."""
    cache = model.make_cache()
    logits = model(mx.array([ids]), cache=cache)[0, -1]
    first = logits - mx.logsumexp(logits)
    tokens = [int(mx.argmax(logits))]
    while len(tokens) < NEW_TOKENS:
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
        tokens.append(int(mx.argmax(logits)))
    return first, tokens


@pytest.fixture(scope="module")
def truth(model: Any) -> dict[int, tuple[mx.array, list[int]]]:
    """What each prompt gives alone, by its length."""
    lengths = {length for row in LENGTHS.values() for length in row}
    return {length: alone(model, prompt(length)) for length in lengths}


def in_batch(model: Any, prompts: list[list[int]], step: int) -> list[Any]:
    """The same for all prompts together, through mlx-lm's batch generator."""
    generator = BatchGenerator(model, max_tokens=NEW_TOKENS, prefill_step_size=step)
    rows = generator.insert(prompts)
    first: dict[int, mx.array] = {}
    tokens: dict[int, list[int]] = {row: [] for row in rows}
    while responses := generator.next_generated():
        for response in responses:
            first.setdefault(response.uid, response.logprobs)
            tokens[response.uid].append(response.token)
    return [(first[row], tokens[row]) for row in rows]


@pytest.mark.parametrize("step", [4, 8, 2048])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_row_of_a_batch_is_the_row_alone(
    model: Any, truth: dict, lengths: str, step: int
) -> None:
    prompts = [prompt(length) for length in LENGTHS[lengths]]
    for ids, row in zip(prompts, in_batch(model, prompts, step), strict=True):
        first, tokens = row
        want_first, want_tokens = truth[len(ids)]
        where = f"{len(ids)} tokens"
        assert float(mx.abs(first - want_first).max()) < CLOSE, where
        assert tokens == want_tokens, where


def test_a_late_row_disturbs_nobody(model: Any, truth: dict) -> None:
    """A third prompt joins while two rows decode; the first of them ends early."""
    generator = BatchGenerator(model, max_tokens=NEW_TOKENS, prefill_step_size=8)
    lengths = [31, 5]
    rows = generator.insert([prompt(n) for n in lengths], max_tokens=[6, NEW_TOKENS])
    tokens: dict[int, list[int]] = {}
    steps = 0
    while responses := generator.next_generated():
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
        steps += 1
        if steps == 3:
            rows += generator.insert([prompt(17)])
            lengths.append(17)
    for row, length in zip(rows, lengths, strict=True):
        count = 6 if length == 31 else NEW_TOKENS
        assert tokens[row] == truth[length][1][:count], f"{length} tokens"


def forget_lengths(cache: Any) -> None:
    cache.lengths = None


def test_forgotten_lengths_are_seen(model: Any, truth: dict) -> None:
    """Broken twin: the convolution state taken at the padded end of a row."""
    lengths = LENGTHS["long"]
    with forgetting(forget_lengths):
        rows = in_batch(model, [prompt(length) for length in lengths], 8)
    wrong = 0
    for length, (first, _) in zip(lengths, rows, strict=True):
        wrong += float(mx.abs(first - truth[length][0]).max()) > 100 * CLOSE
    assert wrong >= 1
