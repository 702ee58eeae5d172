"""B38: a calibration that is killed anywhere goes on to the same bits."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibration_cases import results, samples_for, write_source
from fresh_python import environment_with

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.pass_progress import Progress
from kimi_k3.build.row_file import RowFile
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.samples import Samples
from kimi_k3.errors import CalibrationError, KimiK3Error, PartialResultError

PROGRAM = Path(__file__).parent / "programs" / "calibrate_and_die.py"
STEP = 24


class Calibrations:
    """A process that calibrates in forks of itself; see its program."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self.process = process

    def run(self, out: Path, at: int = 0, after: float | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"out": str(out), "at": at, "after": after}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that calibrates ended"
        return json.loads(answer)


@contextmanager
def calibrations(source: Path, samples: Path, moments: bool) -> Iterator[Calibrations]:
    with subprocess.Popen(
        [sys.executable, PROGRAM, source, samples, str(int(moments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_with({"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}),
    ) as process:
        yield Calibrations(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1")


@pytest.fixture(scope="module")
def samples(source: Path) -> Samples:
    return samples_for(source)


@pytest.fixture(scope="module")
def whole(
    source: Path, samples: Samples, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What an undisturbed calibration leaves."""
    out = tmp_path_factory.mktemp("whole") / "out"
    calibrate(source, samples, out, step_tokens=STEP)
    found = results(out)
    assert len(found) == 1 + 3 + 1  # the table, the layers' moments, the head's
    assert not (out / "partial").exists()
    return found


def test_killed_at_any_operation_on_the_disk(
    source: Path, samples: Samples, whole: dict[str, bytes], tmp_path: Path
):
    samples.save(tmp_path / "samples.npz")
    with calibrations(source, tmp_path / "samples.npz", moments=True) as children:
        undisturbed = children.run(tmp_path / "undisturbed")
        assert results(tmp_path / "undisturbed") == whole
        assert undisturbed["operations"] > 100
        points = range(1, undisturbed["operations"] + 1, 11)
        for at in points:
            out = tmp_path / f"killed-{at}"
            assert children.run(out, at)["died"], at
            again = children.run(out)
            assert not again["error"], (at, again)
            assert results(out) == whole, at
            assert not (out / "partial").exists()
            shutil.rmtree(out)


def test_killed_again_and_again_and_at_any_time(
    source: Path, samples: Samples, tmp_path: Path
):
    """Without moments; each time a little more is done before the next kill."""
    samples.save(tmp_path / "samples.npz")
    with calibrations(source, tmp_path / "samples.npz", moments=False) as children:
        children.run(tmp_path / "undisturbed")
        started = time.monotonic()
        children.run(tmp_path / "timed")  # the first run also waits for its program
        seconds = time.monotonic() - started
        whole = results(tmp_path / "undisturbed")
        assert list(whole) == ["saliency.npz"]
        out, deaths, answer = tmp_path / "operations", 0, {"died": True}
        while answer["died"]:
            answer = children.run(out, at=25 + deaths)
            deaths += answer["died"]
        assert deaths > 2
        assert not answer["error"]
        assert results(out) == whole

        out, deaths = tmp_path / "time", 0
        for tenths in range(1, 8):
            deaths += children.run(out, after=seconds * tenths / 10)["died"]
        assert deaths > 2
        assert not children.run(out)["error"]
        assert results(out) == whole


class Stop(Exception):
    """Raised in the middle of a calibration."""


def stop_after(layer: int) -> Any:
    """A progress that stops the calibration when ``layer`` is safe."""

    def watch(progress: Progress) -> None:
        if progress.finished and progress.layer == layer:
            raise Stop

    return watch


@pytest.fixture
def partial(source: Path, samples: Samples, tmp_path: Path) -> Path:
    """A calibration that was stopped after its second layer of three."""
    out = tmp_path / "out"
    with pytest.raises(Stop):
        calibrate(source, samples, out, step_tokens=STEP, progress=stop_after(1))
    assert not (out / "saliency.npz").exists()
    return out


def test_finished_layers_are_not_run_or_read_again(
    source: Path,
    samples: Samples,
    partial: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
):
    opened: list[LayerStream] = []
    init = LayerStream.__init__

    def noted(self: LayerStream, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(LayerStream, "__init__", noted)
    seen, said = [], []
    calibrate(
        source,
        samples,
        partial,
        step_tokens=STEP,
        progress=seen.append,
        tell=said.append,
    )
    assert {progress.layer for progress in seen} == {2}
    stream = opened[0]
    assert stream.bytes_read == stream.nbytes(2) + stream.nbytes("output")
    assert seen[-1].bytes_done == stream.nbytes(2)
    assert said == ["layers 0 to 1 were done before."]
    assert results(partial) == whole


KEPT = {
    "run": "calibration.json",
    "sums": "partial/layer-001.npz",
    "dense-layer": "partial/layer-000.npz",
    "moments": "moments/layer-001.npz",
    "manifest": "partial/states/states.json",
    "prefix": "partial/states/prefix-?.bin",
    "block": "partial/states/block-000.bin",
}


def in_use(out: Path, pattern: str) -> Path:
    """The file of ``pattern`` that a restart reads."""
    found = sorted(out.glob(pattern))
    if len(found) > 1:
        manifest = json.loads((out / "partial/states/states.json").read_text())
        found = [path for path in found if path.name == manifest["prefix"]["file"]]
    assert len(found) == 1, found
    return found[0]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_damaged_file_is_named_and_nothing_else_is_lost(
    source: Path,
    samples: Samples,
    partial: Path,
    whole: dict[str, bytes],
    kind: str,
    damage: str,
):
    path = in_use(partial, KEPT[kind])
    intact = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(flipped(intact) if damage == "flipped" else intact[:-5])
    with pytest.raises(KimiK3Error) as caught:
        calibrate(source, samples, partial, step_tokens=STEP)
    named = path.parent if path.name == "states.json" else path
    assert str(named) in str(caught.value)
    assert isinstance(caught.value, PartialResultError)
    assert "--restart" in str(caught.value)
    path.write_bytes(intact)
    calibrate(source, samples, partial, step_tokens=STEP)
    assert results(partial) == whole


def test_restart_leaves_files_alone_that_are_not_its_own(
    source: Path, samples: Samples, tmp_path: Path
):
    (tmp_path / "saliency.npz").write_bytes(b"a copy of mine")
    (tmp_path / "moments").mkdir()
    for restart in (True, False):
        with pytest.raises(CalibrationError, match="holds moments, and no calibration"):
            calibrate(source, samples, tmp_path, step_tokens=STEP, restart=restart)
    assert (tmp_path / "saliency.npz").read_bytes() == b"a copy of mine"
    assert not (tmp_path / "partial").exists()


def test_restart_discards_what_is_damaged(
    source: Path, samples: Samples, partial: Path, whole: dict[str, bytes]
):
    (partial / "partial" / "layer-000.npz").write_bytes(b"nothing")
    (partial / "calibration.json").write_text("{")
    seen: list[Progress] = []
    calibrate(
        source,
        samples,
        partial,
        step_tokens=STEP,
        restart=True,
        progress=seen.append,
    )
    assert seen[0].layer == 0
    assert results(partial) == whole


def test_a_record_of_another_run_is_found(
    source: Path, samples: Samples, partial: Path, tmp_path: Path
):
    """Broken twin: whole files in the wrong place."""
    other = tmp_path / "other"
    with pytest.raises(Stop):
        calibrate(source, samples, other, step_tokens=12, progress=stop_after(1))
    record = partial / "partial" / "layer-001.npz"
    shutil.copy(other / "partial" / "layer-001.npz", record)
    with pytest.raises(PartialResultError, match=r"layer-001\.npz .* another run"):
        calibrate(source, samples, partial, step_tokens=STEP)
    shutil.copy(partial / "partial" / "layer-000.npz", record)
    with pytest.raises(PartialResultError, match=r"layer-001\.npz is of layer 0"):
        calibrate(source, samples, partial, step_tokens=STEP)


#: What is being written when the disk is full, and by which replacement of a file.
FULL_AT = {
    "moments": "moments/layer-002.npz",
    "sums": "partial/layer-002.npz",
    "result": "saliency.npz",
    "states": "partial/states/states.json",
    "rows": "",
}


@pytest.mark.parametrize("writing", FULL_AT)
def test_a_full_disk_leaves_what_was_finished(
    source: Path,
    samples: Samples,
    whole: dict[str, bytes],
    writing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out, layers = tmp_path / "out", -1

    def full() -> OSError:
        return OSError(28, "No space left on device", str(out))

    def fails(path: Path, target: Path) -> Path:
        nonlocal layers
        layers += Path(target).name == "states.json"
        if layers != 0 and Path(target) == out / FULL_AT[writing]:
            raise full()
        return move(path, target)

    def finish(file: RowFile) -> None:
        if writing == "rows" and layers == 1:
            raise file._unwritable(full())
        flush(file)

    move, flush = Path.replace, RowFile.finish
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        patch.setattr(RowFile, "finish", finish)
        with pytest.raises(KimiK3Error, match="No space left on device") as caught:
            calibrate(source, samples, out, step_tokens=STEP)
    for said in ("make room", "start", str(out)):
        assert said in str(caught.value)
    assert not list(out.rglob("*.unfinished"))
    calibrate(source, samples, out, step_tokens=STEP)
    assert results(out) == whole


def test_one_process_at_a_time(source: Path, samples: Samples, tmp_path: Path):
    out = tmp_path / "out"

    def begin_another(progress: Progress) -> None:
        if progress.finished and progress.layer == 1:
            with pytest.raises(
                CalibrationError, match=r"by another process \(number \d+"
            ):
                calibrate(source, samples, out, step_tokens=STEP, restart=True)

    calibrate(source, samples, out, step_tokens=STEP, progress=begin_another)
    assert (out / "saliency.npz").exists()


def test_what_a_killed_process_had_begun_is_swept_away(
    source: Path, samples: Samples, partial: Path, whole: dict[str, bytes]
):
    for half in (
        ".calibration.json",
        ".samples.npz",
        ".saliency.npz",
        "moments/.layer-002.npz",
        "moments/.head.npz",
        "partial/.layer-002.npz",
    ):
        (partial / f"{half}.unfinished").write_bytes(b"half")
    calibrate(source, samples, partial, step_tokens=STEP)
    assert results(partial) == whole
    assert sorted(p.name for p in partial.iterdir()) == [
        "calibration.json",
        "moments",
        "saliency.npz",
        "samples.npz",
    ]


def test_one_bit_is_seen(tmp_path: Path, whole: dict[str, bytes]):
    """Broken twin of the comparisons."""
    path = tmp_path / "saliency.npz"
    path.write_bytes(whole["saliency.npz"])
    table = SaliencyTable.load(path)
    assert table.save(path).read_bytes() == whole["saliency.npz"]
    sums = table.reap_sum.copy()
    sums[0, 0, 0] = np.nextafter(sums[0, 0, 0], np.inf)
    replace(table, reap_sum=sums).save(path)
    assert path.read_bytes() != whole["saliency.npz"]
