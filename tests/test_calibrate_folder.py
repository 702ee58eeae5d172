"""A calibration's folder: what in it is its own, and who may write to it."""

import errno
import fcntl
from pathlib import Path

import pytest

from kimi_k3.build import journal
from kimi_k3.build.journal import Begun, Conditions, discard_all, locked, read_begun
from kimi_k3.errors import CalibrationError, PartialResultError

CONDITIONS = Conditions("source", "samples", True, 24, "tool", "mlx", "device")

OWN = (
    "saliency.npz",
    "samples.npz",
    "moments/layer-001.npz",
    "moments/head.npz",
    "partial/layer-001.npz",
    "partial/states/states.json",
    "partial/states/prefix-0.bin",
    "partial/states/block-000.bin",
)
FOREIGN = ("partial/thesis.txt", "partial/deep/layer-001.npz", "moments/mine.txt")


def write(out: Path, *names: str) -> None:
    for name in names:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")


def files(out: Path) -> set[str]:
    return {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_of_other_things_is_left_as_it_was(tmp_path: Path, restart: bool):
    """Even one with a folder of the name that partial results have."""
    mine = ("partial/thesis.txt", "partial/deep/a.txt", "saliency.npz", "samples.npz")
    write(tmp_path, *mine, ".samples.npz.unfinished")
    (tmp_path / ".samples.npz.unfinished").rename(tmp_path / ".mine.unfinished")
    with locked(tmp_path):
        if restart:
            discard_all(tmp_path)
        with pytest.raises(CalibrationError, match=r"holds .*, and no calibration"):
            read_begun(tmp_path)
    assert files(tmp_path) == {*mine, ".mine.unfinished"}
    only = tmp_path / "only"
    write(only, "partial/thesis.txt")
    with (
        pytest.raises(CalibrationError, match=r"holds partial/thesis\.txt, and no"),
        locked(only),
    ):
        read_begun(only)
    assert files(only) == {"partial/thesis.txt"}


def test_partial_results_without_a_beginning_are_kept(tmp_path: Path):
    """The error says that a copy would do: it must not delete what that is for."""
    write(tmp_path, *OWN)
    with pytest.raises(PartialResultError, match="from a copy"), locked(tmp_path):
        read_begun(tmp_path)
    assert files(tmp_path) == set(OWN)


def test_restart_and_the_end_delete_their_own_only(tmp_path: Path):
    write(tmp_path, *OWN, *FOREIGN)
    Begun(CONDITIONS, "mix").save(tmp_path)
    with locked(tmp_path):
        journal.Journal(tmp_path, CONDITIONS).close()
    assert files(tmp_path) == {
        *FOREIGN,
        *(name for name in OWN if "partial" not in name),
        "calibration.json",
    }
    write(tmp_path, *OWN)
    with locked(tmp_path):
        discard_all(tmp_path)
    assert files(tmp_path) == set(FOREIGN)


def test_nothing_is_left_of_a_start_that_failed(tmp_path: Path):
    out = tmp_path / "out"
    with locked(out):
        pass
    assert not out.exists()
    write(out, *OWN)
    with locked(out):
        discard_all(out)
    assert not out.exists()


def test_a_lock_that_its_holder_removed_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Opened before another process ended, and locked after: it is taken anew."""
    flock, removed = fcntl.flock, []

    def late(file: object, how: int) -> None:
        if not removed:
            removed.append((tmp_path / "out/partial/lock").unlink())
            (tmp_path / "out/partial").rmdir()
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path / "out"):
        assert (tmp_path / "out/partial/lock").exists()
        with (
            pytest.raises(CalibrationError, match="by another process"),
            locked(tmp_path / "out"),
        ):
            pass
    assert removed


def test_a_disk_without_locks_is_not_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CalibrationError, match="cannot be locked: Operation not"),
        locked(tmp_path / "out"),
    ):
        pass
