"""Hidden states come back as they were put away, whatever happens in between."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_same

from kimi_k3.build import row_file
from kimi_k3.build.hidden_states import EMBEDDED, MANIFEST, HiddenStates
from kimi_k3.build.row_file import RowFile
from kimi_k3.errors import DamagedScratchError, ScratchError

ROWS, LENGTH, HIDDEN = 6, 4, 8

ARRAY = ROWS * LENGTH * HIDDEN * 2

MUCH = 1 << 30

#: Layers that push a block, of five.
PUSHES = (0, 2, 4)


def state(layer: int, dtype: mx.Dtype = mx.bfloat16, rows: int = ROWS) -> mx.array:
    """Numbers (rows, T, D) that no other layer has."""
    rng = np.random.default_rng(layer + 10)
    return mx.array(rng.standard_normal((rows, LENGTH, HIDDEN))).astype(dtype)


def new(folder: Path, limit: int = MUCH, dtype: mx.Dtype = mx.bfloat16) -> HiddenStates:
    return HiddenStates(ROWS, LENGTH, HIDDEN, dtype, folder, limit)


def put(states: HiddenStates, layer: int, step: int = 4) -> None:
    """Write the state after ``layer``; a layer of ``PUSHES`` stores the one before."""
    for start in range(0, ROWS, step):
        stop = min(start + step, ROWS)
        pushed = None
        if layer in PUSHES:
            pushed = states.read(start, stop)[0]
        states.write(start, state(layer)[start:stop], pushed)


def fill(states: HiddenStates, last: int) -> HiddenStates:
    """Bring ``states`` from where it is to the state after layer ``last``."""
    first = EMBEDDED if states.layer is None else states.layer + 1
    for layer in range(first, last + 1):
        put(states, layer)
        states.commit(layer)
    return states


def check(
    states: HiddenStates, layer: int, steps: tuple[int, ...] = (1, 4, ROWS)
) -> None:
    """Whether ``states`` is the state after ``layer``, read ``steps`` rows at once."""
    assert states.layer == layer
    blocks = [state(i - 1) for i in PUSHES if i <= layer]
    assert states.blocks == len(blocks)
    for step in steps:
        for start in range(0, ROWS, step):
            stop = min(start + step, ROWS)
            prefix, stored = states.read(start, stop)
            assert_same(prefix, state(layer)[start:stop], where="prefix")
            assert (stored is None) == (not blocks)
            if stored is not None:
                want = mx.stack(blocks)[:, start:stop]
                assert_same(stored, want, where="blocks")


@pytest.mark.parametrize("limit", [0, ARRAY, 3 * ARRAY, MUCH])
def test_states_come_back(tmp_path: Path, limit: int):
    states = new(tmp_path, limit)
    for layer in range(EMBEDDED, 5):
        fill(states, layer)
        check(states, layer)
        check(HiddenStates.open(tmp_path, limit), layer)
        assert states.held_bytes == min(limit, (1 + states.blocks) * ARRAY)


def test_a_wrong_row_is_noticed(tmp_path: Path):
    """Broken twin of :func:`check`: two rows change places."""
    states = fill(new(tmp_path), 1)
    rows = states._blocks[0]._rows
    rows[1], rows[2] = rows[2], rows[1]
    with pytest.raises(AssertionError, match="blocks: .* values differ"):
        check(states, 1)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_types_are_kept(tmp_path: Path, dtype: mx.Dtype):
    """All bit patterns of a type that has 16 of them, also those that are no number."""
    states = new(tmp_path, 0, dtype)
    bits = mx.arange(ROWS * LENGTH * HIDDEN).astype(mx.uint16) * 337
    values = state(0, dtype)
    if dtype.size == 2:
        values = mx.view(bits, dtype).reshape(ROWS, LENGTH, HIDDEN)
    states.write(0, values)
    states.commit(EMBEDDED)
    kind = mx.uint16 if dtype.size == 2 else mx.uint32
    for found in (states, HiddenStates.open(tmp_path, MUCH)):
        assert found.dtype == dtype
        got, _ = found.read(0, ROWS)
        assert_same(mx.view(got, kind), mx.view(values, kind), where=str(dtype))
    size = ROWS * LENGTH * HIDDEN * dtype.size
    assert (tmp_path / "prefix-0.bin").stat().st_size == size


def test_a_layer_may_hand_on_another_type(tmp_path: Path):
    states = fill(new(tmp_path), 0)
    states.write(0, state(1, mx.float32))
    states.commit(1)
    for found in (states, HiddenStates.open(tmp_path, 0)):
        prefix, blocks = found.read(0, ROWS)
        assert_same(prefix, state(1, mx.float32), where="prefix")
        assert blocks is not None
        assert blocks.dtype == mx.bfloat16


def test_what_is_not_committed_is_not_there(tmp_path: Path):
    states = fill(new(tmp_path), 1)
    put(states, 2)
    check(states, 1)
    check(HiddenStates.open(tmp_path, 0), 1)


def test_rows_that_were_not_written_are_missed(tmp_path: Path):
    states = fill(new(tmp_path), 1)
    with pytest.raises(ScratchError, match="rows of the state after layer 2"):
        states.commit(2)
    states.write(0, state(2)[:4], state(1)[:4])
    with pytest.raises(ScratchError, match="rows of the state after layer 2"):
        states.commit(2)
    states.write(4, state(2)[4:])
    with pytest.raises(ScratchError, match="rows of the state after layer 2"):
        states.commit(2)  # rows of the block
    check(HiddenStates.open(tmp_path, 0), 1)


class Killed(BaseException):
    """The process ends here."""


def kill_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """End the run at the ``count``-th step that reaches the disk."""
    left = count

    def dying(module: Any, name: str) -> None:
        real = getattr(module, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, step)

    for module, name in (
        (RowFile, "write"),
        (row_file.os, "fsync"),
        (Path, "replace"),
        (json, "dump"),
    ):
        dying(module, name)


def test_a_run_that_is_killed_anywhere_goes_on(tmp_path: Path):
    """At every step of every layer, the disk holds one whole state."""
    found = set()
    for count in range(60):
        folder = tmp_path / str(count)
        states = new(folder, ARRAY)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, count)
            try:
                fill(states, 4)
            except Killed:
                pass
            else:
                break
        if HiddenStates.exist(folder):
            again = HiddenStates.open(folder, ARRAY)
            found.add(again.layer)
            check(again, again.layer or 0, (4,))
        else:
            found.add(None)
            again = new(folder, ARRAY)
        check(fill(again, 4), 4, (4,))
    else:
        raise AssertionError("the run never ended")
    assert found == {None, EMBEDDED, 0, 1, 2, 3, 4}


def test_a_half_written_manifest_would_be_noticed(tmp_path: Path):
    """Broken twin: what a write in place could leave behind."""
    fill(new(tmp_path), 1)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(DamagedScratchError, match=r"states\.json is not as it was"):
        HiddenStates.open(tmp_path, 0)


FILES = ("prefix-0.bin", "block-000.bin", "block-001.bin")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """States after layer 3 with two blocks, in ``FILES``."""
    states = fill(new(tmp_path), 3)
    names = [file.path.name for file in (states._prefix, *states._blocks) if file]
    assert names == list(FILES)
    return tmp_path


@pytest.mark.parametrize("limit", [0, MUCH])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(stored: Path, name: str, limit: int):
    raw = bytearray((stored / name).read_bytes())
    raw[200] ^= 4
    (stored / name).write_bytes(raw)
    with pytest.raises(DamagedScratchError, match=rf"{name} has another .* row 3"):
        HiddenStates.open(stored, limit)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_during_a_run(stored: Path, name: str):
    states = HiddenStates.open(stored, 0)
    raw = bytearray((stored / name).read_bytes())
    raw[200] ^= 4
    (stored / name).write_bytes(raw)
    states.read(0, 3)
    with pytest.raises(DamagedScratchError, match=rf"{name} has another .* row 3"):
        states.read(2, 5)


@pytest.mark.parametrize("name", FILES)
def test_a_short_file_is_found(stored: Path, name: str):
    raw = (stored / name).read_bytes()
    (stored / name).write_bytes(raw[:-1])
    with pytest.raises(DamagedScratchError, match=rf"{name} ends after \d+ bytes"):
        HiddenStates.open(stored, 0)
    (stored / name).unlink()
    with pytest.raises(DamagedScratchError, match=rf"{name} cannot be read .No such"):
        HiddenStates.open(stored, 0)


def edit(folder: Path, **values: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text()) | values
    (folder / MANIFEST).write_text(json.dumps(content))


def test_an_edited_manifest_is_found(stored: Path):
    edit(stored, layer=2)
    with pytest.raises(DamagedScratchError, match=r"states\.json is not as it was"):
        HiddenStates.open(stored, 0)
    (stored / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedScratchError, match=r"states\.json is not as it was"):
        HiddenStates.open(stored, 0)
    (stored / MANIFEST).write_text("[]")
    with pytest.raises(DamagedScratchError, match=r"states\.json is not as it was"):
        HiddenStates.open(stored, 0)


def test_another_format_is_refused(tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kimi_k3.build.hidden_states.FORMAT", 2)
        fill(new(tmp_path), 1)
    with pytest.raises(ScratchError, match="has format 2, wanted 1"):
        HiddenStates.open(tmp_path, 0)


def test_a_folder_without_states(tmp_path: Path):
    assert not HiddenStates.exist(tmp_path)
    with pytest.raises(ScratchError, match="holds no hidden states"):
        HiddenStates.open(tmp_path, 0)
    with pytest.raises(ScratchError, match="no state is committed"):
        new(tmp_path).read(0, 1)


def test_a_folder_with_states_is_not_begun_anew(stored: Path):
    with pytest.raises(ScratchError, match="holds the hidden states of a run already"):
        new(stored)
    states = HiddenStates.open(stored, 0)
    states.remove()
    assert list(stored.iterdir()) == []
    new(stored)


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ScratchError, match=r"file/states cannot be made: Not a dir"):
        new(tmp_path / "file" / "states")


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may have more than half an array's bytes, as if the disk were full.

    Not for a whole test: the limit holds for pytest's own output as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ARRAY // 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_the_last_state_stays(stored: Path):
    states = HiddenStates.open(stored, MUCH)
    named = r"prefix-1\.bin cannot be written: File too large"
    for _ in range(2):
        with pytest.raises(ScratchError, match=named), small_disk():
            put(states, 4)
        check(HiddenStates.open(stored, 0), 3)
        check(states, 3)


def test_the_run_goes_on_when_there_is_room(stored: Path):
    states = HiddenStates.open(stored, ARRAY)
    with pytest.raises(ScratchError, match="make room"), small_disk():
        put(states, 4, step=1)
    check(states, 3)
    check(fill(states, 4), 4)
    check(HiddenStates.open(stored, 0), 4)


def test_memory_above_the_limit_is_given_back(tmp_path: Path):
    rows, length, hidden = 64, 64, 64
    size = rows * length * hidden * 2
    for limit, held in ((0, 0), (size, 1), (3 * size, 3), (MUCH, 4)):
        before = mx.get_active_memory()
        folder = tmp_path / str(limit)
        states = HiddenStates(rows, length, hidden, mx.bfloat16, folder, limit)
        mx.reset_peak_memory()
        for layer in range(EMBEDDED, 6):
            for start in range(0, rows, 4):
                values = mx.full((4, length, hidden), layer, mx.bfloat16)
                pushed = values + 1 if layer % 2 == 0 else None
                states.write(start, values, pushed)
            states.commit(layer)
        assert states.blocks == 3
        assert states.held_bytes == held * size
        found = mx.get_active_memory() - before
        assert held * size <= found < (held + 0.2) * size
        # The sums before a layer and after it are not both held whole.
        assert mx.get_peak_memory() - before < (held + 0.7) * size
        del states
