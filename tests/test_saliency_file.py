"""saliency.npz: no damage goes unseen, and nothing in it is run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saliency_tables import big_table, samples_of, small_table

from kimi_k3.build import saliency
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.sealed_npz import write_sealed
from kimi_k3.errors import SaliencyError


def test_a_file_gives_the_table_back(tmp_path: Path) -> None:
    table = small_table(samples=samples_of("ä", "字") | {"part": "calibration"})
    file = table.save(tmp_path)
    assert file == tmp_path / "saliency.npz"
    for place in (tmp_path, file, str(file)):
        loaded = SaliencyTable.load(place)
        assert loaded.digest == table.digest
        assert (loaded.corpora, loaded.samples) == (table.corpora, table.samples)
    assert [path.name for path in tmp_path.iterdir()] == ["saliency.npz"]


def test_the_same_table_is_the_same_file(tmp_path: Path) -> None:
    files = [small_table().save(tmp_path / name) for name in ("one.npz", "two.npz")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_numpy_reads_the_file(tmp_path: Path) -> None:
    table = small_table()
    with np.load(table.save(tmp_path)) as archive:
        assert np.array_equal(archive["reap_sum"], table.reap_sum)
        assert json.loads(str(archive["corpora"])) == ["code", "python"]


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_table().save(tmp_path)
    before = file.read_bytes()

    def fail(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        small_table(1).save(tmp_path)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_no_flipped_byte_goes_unseen(tmp_path: Path) -> None:
    """Each byte either does not matter or is missed by name; nothing else is raised."""
    table = small_table()
    file = table.save(tmp_path)
    whole = file.read_bytes()
    seen = []
    for position in range(0, len(whole), 13):
        damaged = bytearray(whole)
        damaged[position] ^= 0x5A
        file.write_bytes(damaged)
        try:
            assert SaliencyTable.load(file).digest == table.digest
        except SaliencyError as error:
            seen.append(str(error))
    assert all(str(file) in message for message in seen)
    assert len(seen) > 0.5 * len(whole) / 13


@pytest.mark.parametrize("length", [0, 1, 100, 5000, -1])
def test_a_truncated_file(length: int, tmp_path: Path) -> None:
    file = small_table().save(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(SaliencyError, match="damaged.*intact copy, or calibrate again"):
        SaliencyTable.load(file)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(SaliencyError, match="saliency.npz is not there"):
        SaliencyTable.load(tmp_path)
    file = tmp_path / "some.npz"
    np.savez(file, a=np.zeros(3))
    with pytest.raises(SaliencyError, match="holds something else, wanted a saliency"):
        SaliencyTable.load(file)
    write_sealed(file, "samples", 1, {"a": np.zeros(3)})
    with pytest.raises(SaliencyError, match="holds samples, wanted a saliency table"):
        SaliencyTable.load(file)
    write_sealed(file, saliency.KIND, 1, {"a": np.zeros(3)})
    with pytest.raises(SaliencyError, match="does not hold what a saliency table"):
        SaliencyTable.load(file)


def test_a_newer_version(tmp_path: Path) -> None:
    file = tmp_path / "saliency.npz"
    write_sealed(file, saliency.KIND, 2, small_table()._arrays())
    with pytest.raises(SaliencyError, match="version 2; this version.*reads version 1"):
        SaliencyTable.load(file)


def test_a_changed_value_in_a_well_formed_file(tmp_path: Path) -> None:
    file = small_table().save(tmp_path)
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["reap_sum"] = arrays["reap_sum"] * 2
    np.savez(file, **arrays)
    with pytest.raises(SaliencyError, match="was changed after it was written"):
        SaliencyTable.load(file)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)

    def __init__(self, folder: Path):
        self.folder = folder


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    file, trap = tmp_path / "saliency.npz", tmp_path / "sprung"
    np.savez(file, kind=np.array([Trap(trap)], dtype=object))
    with pytest.raises(SaliencyError, match="damaged"):
        SaliencyTable.load(file)
    assert not trap.exists()
    with np.load(file, allow_pickle=True) as archive:
        assert archive["kind"] is not None
    assert trap.exists()  # the trap works


def test_full_size_is_quick(tmp_path: Path) -> None:
    big_table().save(tmp_path)
    started = time.process_time()
    table = SaliencyTable.load(tmp_path)
    table.score("reap_mean", {"code": 0.7, "chinese": 0.3})
    assert time.process_time() - started < 5  # of the processor; about 0.1 s
    assert table.shape == (5, 92, 896)
