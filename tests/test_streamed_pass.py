"""A pass layer by layer gives the whole model's logits, resumed or not."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, assert_same, relative_error
from golden_data import Case
from loading import load_float32, load_stored
from streaming import embedded, final_states, random_tokens, run_layers, streamed
from tiny_k3 import write_t1, write_t2

from kimi_k3.build.hidden_states import EMBEDDED, HiddenStates
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.streamed_pass import (
    embed_rows,
    finish,
    run_layer,
    scratch_bytes,
    stored_blocks,
)
from kimi_k3.errors import NotFiniteError, ScratchError, TokenizerError

#: Largest relative error of the streamed logits against the whole model's, float32.
LOGITS = 1e-5

#: The same with other numbers of rows a step.
STEPS = 1e-6

#: What Moonshot's code differs by, as in the golden tests.
GOLDEN = 1e-4

ROWS, LENGTH = 5, 12


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("t1"))


@pytest.fixture(scope="module")
def tokens(t1: Path) -> np.ndarray:
    return random_tokens(LayerStream(t1), ROWS, LENGTH)


@pytest.fixture(scope="module")
def whole(t1: Path, tokens: np.ndarray) -> mx.array:
    """The whole model's logits in float32."""
    return load_float32(t1)(mx.array(tokens))


def check(folder: Path, scratch: Path) -> None:
    tokens = random_tokens(LayerStream(folder), ROWS, LENGTH)
    model = load_stored(folder)
    got = streamed(folder, tokens, scratch, step=ROWS)
    assert_same(got, model(mx.array(tokens)), where="in one step, as stored")
    model.set_dtype(mx.float32)
    want = model(mx.array(tokens))
    got = streamed(folder, tokens, scratch, step=2, dtype=mx.float32)
    assert_close(got, want, rel=LOGITS, where="in steps, in float32")


def test_logits_of_a_build(build: Case, tmp_path: Path):
    check(build.folder, tmp_path)


def test_logits_of_a_source(golden: Case, tmp_path: Path):
    check(golden.folder, tmp_path)


@pytest.mark.parametrize(
    "variant",
    [{"tie_word_embeddings": True}, {"attn_res_block_size": None}],
    ids=["tied", "no-residual-mix"],
)
def test_logits_of_a_variant(variant: dict[str, Any], tmp_path: Path):
    check(write_t1(tmp_path / "source", **variant), tmp_path / "scratch")


def test_logits_of_two_banks(tmp_path: Path):
    check(write_t2(tmp_path / "build"), tmp_path / "scratch")


def test_final_states_are_those_of_moonshots_code(golden: Case, tmp_path: Path):
    want = golden.expected("golden_text")
    stream = LayerStream(golden.folder, dtype=mx.float32)
    states = embedded(stream, np.array(want["input_ids"]), tmp_path)
    run_layers(stream, states)
    got = final_states(stream, states)
    assert_close(got, want["final_hidden"], rel=GOLDEN, where=golden.name)


def test_rows_per_step_change_nothing(t1, tokens, whole, tmp_path):
    for step in (1, 2, ROWS, 100):
        got = streamed(t1, tokens, tmp_path, step=step, dtype=mx.float32)
        assert_close(got, whole, rel=STEPS, where=f"{step} rows a step")


def test_one_token_a_row(t1: Path, tmp_path: Path):
    tokens = random_tokens(LayerStream(t1), 3, 1)
    want = load_float32(t1)(mx.array(tokens))
    got = streamed(t1, tokens, tmp_path, dtype=mx.float32)
    assert_close(got, want, rel=LOGITS)


def test_padding_behind_a_row_changes_nothing_before_it(t1, tokens, whole, tmp_path):
    padded = tokens.copy()
    padded[:, 8:] = 0
    got = streamed(t1, padded, tmp_path, dtype=mx.float32)
    assert_close(got[:, :8], whole[:, :8], rel=STEPS)
    assert relative_error(got, whole) > 1e-2


def float32_pass(t1: Path, tokens: np.ndarray, scratch: Path, spoil: Any) -> mx.array:
    """Logits of a pass in which ``spoil(states, index)`` follows each layer."""
    stream = LayerStream(t1, dtype=mx.float32)
    states = embedded(stream, tokens, scratch)
    run_layers(stream, states, after=lambda index: spoil(states, index))
    with stream.head() as head:
        return head(final_states(stream, states))


def test_a_wrong_block_shows(t1, tokens, whole, tmp_path):
    """Broken twin: two rows of the second block change places."""

    def swap(states: HiddenStates, index: int) -> None:
        if index == 2:
            rows = states._blocks[1]._rows
            rows[0], rows[4] = rows[4], rows[0]

    got = float32_pass(t1, tokens, tmp_path / "a", lambda *_: None)
    assert_close(got, whole, rel=LOGITS)
    got = float32_pass(t1, tokens, tmp_path / "b", swap)
    assert relative_error(got, whole) > 1e-3


def test_a_lost_block_shows(t1, tokens, whole, tmp_path):
    """Broken twin."""

    def lose(states: HiddenStates, index: int) -> None:
        if index == 4:
            states._blocks.pop()

    got = float32_pass(t1, tokens, tmp_path, lose)
    assert relative_error(got, whole) > 1e-3


def test_a_skipped_layer_shows(t1, tokens, whole, tmp_path):
    """Broken twin."""
    stream = LayerStream(t1, dtype=mx.float32)
    states = embedded(stream, tokens, tmp_path)
    for index, layer, _ in stream.layers():
        if index != 3:
            run_layer(layer, index, states, 3)
            states.commit(index)
    with stream.head() as head:
        got = head(final_states(stream, states))
    assert relative_error(got, whole) > 1e-3


@pytest.mark.parametrize("limit", [0, 20_000, 1 << 30], ids=["disk", "both", "memory"])
def test_where_states_wait_changes_nothing(t1, tokens, tmp_path, limit):
    want = streamed(t1, tokens, tmp_path)
    assert_same(streamed(t1, tokens, tmp_path, limit=limit), want, where=str(limit))


def test_a_resumed_pass_gives_the_same_bits(t1, tokens, tmp_path):
    """Stopped after each layer in turn, by a process that then ends."""
    stream = LayerStream(t1)
    states = embedded(stream, tokens, tmp_path / "whole")
    run_layers(stream, states)
    want = final_states(stream, states)
    for last in range(EMBEDDED, stream.num_layers):
        scratch = tmp_path / str(last)
        first = LayerStream(t1)
        run_layers(first, embedded(first, tokens, scratch), stop=last + 1)
        again = LayerStream(t1)
        states = HiddenStates.open(scratch, memory_limit=(last % 2) << 30)
        assert states.layer == last
        run_layers(again, states)
        assert_same(final_states(again, states), want, where=f"after {last}")
        left = [again.nbytes(i) for i in range(last + 1, again.num_layers)]
        assert again.bytes_read == sum(left) + again.nbytes("output")


def test_resuming_one_layer_too_late_shows(t1, tokens, tmp_path):
    """Broken twin: what a commit under a wrong number would do."""
    stream = LayerStream(t1)
    states = embedded(stream, tokens, tmp_path / "whole")
    run_layers(stream, states)
    want = final_states(stream, states)
    states = embedded(stream, tokens, tmp_path / "late")
    run_layers(stream, states, stop=2)
    states.layer = 2
    run_layers(stream, states)
    assert relative_error(final_states(stream, states), want) > 1e-3


def test_observers_hear_of_rows_before_the_layer_runs(t1, tokens, tmp_path):
    stream = LayerStream(t1)
    states = embedded(stream, tokens, tmp_path)
    for index, layer, _ in stream.layers():
        events: list[Any] = []
        attention = layer.self_attn

        def noted(x: mx.array, *rest: Any, run: Any = attention, to=events) -> Any:
            to.append(x.shape[0])
            return run(x, *rest)

        layer.self_attn = noted  # type: ignore[assignment]
        run_layer(layer, index, states, 2, events.append)
        layer.self_attn = attention
        states.commit(index)
        assert events == [range(0, 2), 2, range(2, 4), 2, range(4, 5), 1]


def test_a_layer_can_be_run_again(t1, tokens, tmp_path):
    """Until its states are committed, those before it are there."""
    stream = LayerStream(t1)
    states = embedded(stream, tokens, tmp_path)
    run_layers(stream, states, stop=2)
    for index, layer, _ in stream.layers(2):
        run_layer(layer, index, states, 2)
        run_layer(layer, index, states, 3)
        states.commit(index)
    want = streamed(t1, tokens, tmp_path / "once")
    with stream.head() as head:
        assert_same(head(final_states(stream, states)), want, where="run twice")


def test_a_layer_that_gives_nan_is_named(t1, tokens, tmp_path):
    stream = LayerStream(t1)
    states = embedded(stream, tokens, tmp_path)
    for index, layer, _ in stream.layers():
        if index == 1:
            weight = layer.post_attention_layernorm.weight
            layer.post_attention_layernorm.weight = weight * float("nan")
            with pytest.raises(
                NotFiniteError, match=r"layer 1 gives NaN .* rows 0 to 1"
            ):
                run_layer(layer, index, states, 2)
            break
        run_layer(layer, index, states, 2)
        states.commit(index)
    assert HiddenStates.open(tmp_path, 0).layer == 0


@pytest.mark.parametrize("bad", [-1, 576])
def test_ids_of_another_tokenizer_are_refused(t1, tokens, tmp_path, bad):
    wrong = tokens.copy()
    wrong[2, 3] = bad
    with pytest.raises(TokenizerError, match=rf"{bad}.*576 of them"):
        embedded(LayerStream(t1), wrong, tmp_path)
    assert not HiddenStates.exist(tmp_path)


def test_too_small_a_disk_is_refused_first(t1, tokens, tmp_path, monkeypatch):
    args = LayerStream(t1).args
    assert stored_blocks(args) == 3
    wanted = scratch_bytes(args, ROWS, LENGTH)
    assert wanted == (2 + 3) * ROWS * LENGTH * 64 * 2
    disk = shutil.disk_usage(tmp_path)
    for free in (wanted - 1, wanted):
        usage = type(disk)(disk.total, disk.used, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        scratch = tmp_path / str(free)
        if free < wanted:
            with pytest.raises(ScratchError, match=rf"{free:,} bytes free.*{wanted:,}"):
                embedded(LayerStream(t1), tokens, scratch)
        else:
            embedded(LayerStream(t1), tokens, scratch)


def test_the_scratch_disk_is_what_was_said(t1, tokens, tmp_path):
    stream = LayerStream(t1)
    states, most = embedded(stream, tokens, tmp_path), []

    def measure(_: int) -> None:
        most.append(sum(file.stat().st_size for file in tmp_path.glob("*.bin")))

    run_layers(stream, states, after=measure)
    assert states.blocks == stored_blocks(stream.args)
    assert max(most) == scratch_bytes(stream.args, ROWS, LENGTH)
    states.remove()
    assert list(tmp_path.iterdir()) == []


def test_steps_of_no_rows_are_refused(t1, tokens, tmp_path):
    with pytest.raises(ValueError, match="rows_per_step is 0"):
        embed_rows(LayerStream(t1), tokens, tmp_path, memory_limit=0, rows_per_step=0)


def test_memory_of_a_step_does_not_depend_on_the_rows(t1, tmp_path):
    """States on disk: 4 rows and 24 rows take as much memory, 4 at once."""
    peaks = []
    for rows in (4, 24, 24):
        stream = LayerStream(t1)
        tokens = random_tokens(stream, rows, 64)
        step = 4 if len(peaks) < 2 else 24
        states = embedded(stream, tokens, tmp_path / str(len(peaks)), limit=0)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        run_layers(stream, states, step=step)
        for _ in finish(stream, states, step):
            pass
        peaks.append(mx.get_peak_memory() - before)
    few, many, at_once = peaks
    assert many < 1.1 * few
    assert at_once > 2 * few  # what the figure above would be if rows were kept


def test_held_states_take_their_own_memory_only(t1: Path, tmp_path: Path):
    """Blocks do not keep the stack alive that they were cut from."""
    stream = LayerStream(t1)
    tokens = random_tokens(stream, 24, 64)
    before = mx.get_active_memory()
    states = embedded(stream, tokens, tmp_path)
    run_layers(stream, states, step=4)
    held = mx.get_active_memory() - before
    assert states.held_bytes == (1 + 3) * 24 * 64 * 64 * 2
    assert states.held_bytes <= held < 1.05 * states.held_bytes
