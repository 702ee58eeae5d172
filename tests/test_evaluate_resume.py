"""An evaluation that is killed anywhere, or runs out of disk, goes on to the same bits."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_cases import Case, samples_for, write_case
from fresh_python import environment_with

from kimi_k3.build.pass_progress import Progress
from kimi_k3.build.row_file import RowFile
from kimi_k3.errors import EvaluationError, KimiK3Error
from kimi_k3.evaluation import evaluate as module
from kimi_k3.evaluation.evaluate import evaluate, make_teacher
from kimi_k3.evaluation.evaluation import Evaluation

PROGRAM = Path(__file__).parent / "programs" / "evaluate_and_die.py"

#: What a finished evaluation leaves.
LEFT = (
    "predictions.npz",
    "teacher/final.bin",
    "teacher/final.json",
    "teacher/head.safetensors",
    "teacher/samples.npz",
)


class Evaluations:
    """A process that evaluates in forks of itself; see its program."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self.process = process

    def run(self, out: Path, at: int = 0, after: float | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"out": str(out), "at": at, "after": after}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that evaluates ended"
        return json.loads(answer)


@contextmanager
def evaluations(case: Case, samples: Path) -> Iterator[Evaluations]:
    with subprocess.Popen(
        [sys.executable, PROGRAM, case.build, case.source, samples],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_with({"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}),
    ) as process:
        yield Evaluations(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Of two rows: there are fewer points at which to be killed."""
    case = write_case(tmp_path_factory.mktemp("case"))
    return replace(case, samples=samples_for(case.source, rows=2))


def left(out: Path) -> dict[str, bytes]:
    """Every file in ``out``."""
    files = sorted(path for path in out.rglob("*") if not path.is_dir())
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed evaluation leaves."""
    out = tmp_path_factory.mktemp("whole") / "out"
    evaluate(case.build, case.source, out, samples=case.samples)
    found = left(out)
    assert tuple(found) == LEFT
    return found


def test_killed_at_any_operation_on_the_disk(
    case: Case, whole: dict[str, bytes], tmp_path: Path
):
    case.samples.save(tmp_path / "samples.npz")
    with evaluations(case, tmp_path / "samples.npz") as children:
        undisturbed = children.run(tmp_path / "undisturbed")
        assert left(tmp_path / "undisturbed") == whole
        operations = undisturbed["operations"]
        assert operations > 60
        for at in range(1, operations + 1, 23):
            out = tmp_path / f"killed-{at}"
            assert children.run(out, at)["died"], at
            again = children.run(out)
            assert not again["error"], (at, again)
            assert left(out) == whole, at
            assert not list(out.rglob("partial")), at
            shutil.rmtree(out)


def test_killed_again_and_again_and_at_any_time(
    case: Case, whole: dict[str, bytes], tmp_path: Path
):
    case.samples.save(tmp_path / "samples.npz")
    with evaluations(case, tmp_path / "samples.npz") as children:
        out, deaths, answer = tmp_path / "operations", 0, {"died": True}
        while answer["died"]:
            answer = children.run(out, at=25 + deaths)
            deaths += answer["died"]
        assert deaths > 2
        assert not answer["error"]
        assert left(out) == whole

        out, deaths = tmp_path / "time", 0
        for tenths in range(1, 5):
            deaths += children.run(out, after=0.03 * tenths)["died"]
        assert deaths > 1
        assert not children.run(out)["error"]
        assert left(out) == whole


class Stop(Exception):
    """Raised in the middle of an evaluation."""


def stop_after(layer: int) -> Any:
    """A progress that stops when ``layer`` is safe."""

    def watch(progress: Progress) -> None:
        if progress.finished and progress.layer == layer:
            raise Stop

    return watch


@pytest.fixture
def partial(case: Case, tmp_path: Path) -> Path:
    """A teacher that was stopped after its second layer of three."""
    out = tmp_path / "teacher"
    with pytest.raises(Stop):
        make_teacher(case.source, case.samples, out, progress=stop_after(1))
    assert not (out / "final.json").exists()
    return out


def test_finished_layers_are_not_run_again(
    case: Case, partial: Path, whole: dict[str, bytes]
):
    shown: list[Progress] = []
    said: list[str] = []
    make_teacher(
        case.source, case.samples, partial, progress=shown.append, tell=said.append
    )
    assert {at.layer for at in shown} == {2}
    assert said == ["layers 0 to 1 were done before."]
    teacher = {f"teacher/{name}": data for name, data in left(partial).items()}
    assert teacher == {k: v for k, v in whole.items() if k.startswith("teacher/")}


#: Files of an unfinished run that a restart reads.
KEPT = {
    "begun": "partial/begun.json",
    "manifest": "partial/states/states.json",
    "prefix": "partial/states/prefix-?.bin",
    "block": "partial/states/block-000.bin",
}


def in_use(out: Path, pattern: str) -> Path:
    found = sorted(out.glob(pattern))
    if len(found) > 1:
        manifest = json.loads((out / "partial/states/states.json").read_text())
        found = [path for path in found if path.name == manifest["prefix"]["file"]]
    assert len(found) == 1, found
    return found[0]


def damaged(data: bytes, how: str) -> bytes:
    if how == "truncated":
        return data[:-5]
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_file_is_named_and_nothing_else_is_lost(
    case: Case, partial: Path, whole: dict[str, bytes], kind: str, how: str
):
    path = in_use(partial, KEPT[kind])
    intact = path.read_bytes()
    path.write_bytes(damaged(intact, how))
    with pytest.raises(EvaluationError) as caught:
        make_teacher(case.source, case.samples, partial)
    assert str(path) in str(caught.value)
    assert "--restart" in str(caught.value)
    path.write_bytes(intact)
    make_teacher(case.source, case.samples, partial)
    assert left(partial)["final.bin"] == whole["teacher/final.bin"]


@pytest.mark.parametrize("name", [name for name in LEFT if name.startswith("teacher/")])
@pytest.mark.parametrize("how", ["flipped", "truncated", "deleted"])
def test_a_damaged_teacher_is_named_before_any_work(
    case: Case,
    whole: dict[str, bytes],
    name: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out, teacher = tmp_path / "out", tmp_path / "teacher"
    teacher.mkdir()
    for file, data in whole.items():
        if file.startswith("teacher/"):
            (tmp_path / file).write_bytes(data)
    path = tmp_path / name
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(damaged(whole[name], how))

    def read(*_: object) -> None:
        raise AssertionError("layers were run")

    monkeypatch.setattr("kimi_k3.build.layer_stream.LayerStream.layers", read)
    with pytest.raises(KimiK3Error) as caught:
        evaluate(case.build, teacher, out)
    named = teacher if (name, how) == ("teacher/final.json", "deleted") else path
    assert str(named) in str(caught.value)
    assert not out.exists()


def test_restart_discards_what_is_damaged(
    case: Case, whole: dict[str, bytes], tmp_path: Path
):
    """The teacher too, unless it is whole: that took hours."""
    out = tmp_path / "out"
    evaluate(case.build, case.source, out, samples=case.samples)
    path = out / "teacher" / "final.bin"
    kept = path.stat().st_mtime_ns
    shown: dict[str, list[Any]] = {"teacher": [], "build": []}
    settings: dict[str, Any] = {"samples": case.samples, "restart": True}
    settings["progress"] = lambda what: shown[what].append
    evaluate(case.build, case.source, out, **settings)
    assert not shown["teacher"]
    assert shown["build"]
    assert path.stat().st_mtime_ns == kept
    path.write_bytes(damaged(path.read_bytes(), "flipped"))
    (out / "predictions.npz").write_bytes(whole["predictions.npz"][:-9])
    with pytest.raises(EvaluationError, match=r"predictions\.npz .* --restart"):
        evaluate(case.build, case.source, out, samples=case.samples)
    evaluate(case.build, case.source, out, **settings)
    assert shown["teacher"]
    assert left(out) == whole


def test_restart_leaves_files_alone_that_are_not_its_own(case: Case, tmp_path: Path):
    for name in ("samples.npz", "final.bin", "predictions.npz"):
        (tmp_path / name).write_bytes(b"mine")
    for restart in (False, True):
        with pytest.raises(
            EvaluationError, match="holds final.bin and no final states"
        ):
            make_teacher(case.source, case.samples, tmp_path, restart=restart)
        with pytest.raises(EvaluationError, match=r"predictions\.npz"):
            evaluate(
                case.build,
                case.source,
                tmp_path,
                samples=case.samples,
                restart=restart,
            )
    assert left(tmp_path) == dict.fromkeys(
        ("final.bin", "predictions.npz", "samples.npz"), b"mine"
    )


#: Which replacement of a file the full disk refuses.
FULL_AT = {
    "begun": "teacher/partial/begun.json",
    "samples": "teacher/samples.npz",
    "states": "teacher/partial/states/states.json",
    "manifest": "build/final.json",
    "result": "predictions.npz",
    "rows": "",
}


@pytest.mark.parametrize("writing", FULL_AT)
def test_a_full_disk_leaves_what_was_finished(
    case: Case,
    whole: dict[str, bytes],
    writing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out, move, flush = tmp_path / "out", Path.replace, RowFile.finish

    def full() -> OSError:
        return OSError(28, "No space left on device", str(out))

    def fails(path: Path, target: Path) -> Path:
        if Path(target) == out / FULL_AT[writing]:
            raise full()
        return move(path, target)

    def finish(file: RowFile) -> None:
        if writing == "rows" and file.path.name == "prefix-1.bin":
            raise file._unwritable(full())
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        patch.setattr(RowFile, "finish", finish)
        with pytest.raises(KimiK3Error, match="No space left on device") as caught:
            evaluate(case.build, case.source, out, samples=case.samples)
    assert "ake room" in str(caught.value)
    assert not list(out.rglob("*.unfinished"))
    evaluate(case.build, case.source, out, samples=case.samples)
    assert left(out) == whole


def test_a_disk_that_is_too_small_is_refused_before_any_work(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        EvaluationError, match=r"4,096 bytes free, .* need up to [\d,]+"
    ):
        make_teacher(case.source, case.samples, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_process_at_a_time(case: Case, tmp_path: Path):
    out = tmp_path / "out"

    def begin_another(progress: Progress) -> None:
        if progress.finished and progress.layer == 1:
            with pytest.raises(EvaluationError, match=r"another process \(number \d+"):
                evaluate(
                    case.build, case.source, out, samples=case.samples, restart=True
                )
            with pytest.raises(EvaluationError, match=r"another process \(number \d+"):
                make_teacher(case.source, case.samples, out / "teacher")

    def watch(what: str) -> Any:
        return begin_another if what == "teacher" else lambda at: None

    evaluate(case.build, case.source, out, samples=case.samples, progress=watch)
    assert (out / "predictions.npz").exists()


def test_what_a_killed_process_had_begun_is_swept_away(
    case: Case, partial: Path, whole: dict[str, bytes]
):
    for half in (".final.json", ".samples.npz", "partial/.begun.json"):
        (partial / f"{half}.unfinished").write_bytes(b"half")
    make_teacher(case.source, case.samples, partial)
    names = {name.removeprefix("teacher/") for name in LEFT if "/" in name}
    assert set(left(partial)) == names


def test_going_on_needs_no_corpus(case: Case, tmp_path: Path):
    """The samples of a mix are kept: its files may be gone by then."""
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 40)
    mix = tmp_path / "mix.toml"
    mix.write_text(
        'tokens = 32\nlength = 16\n[[corpus]]\nname = "a"\nshare = 1\n'
        'files = ["text.txt"]\n'
    )
    out = tmp_path / "out"
    with pytest.raises(Stop):
        make_teacher(case.source, mix, out, part="all", progress=stop_after(1))
    text.unlink()
    teacher = make_teacher(case.source, mix, out, part="all")
    assert teacher.samples.corpora == ("a",)
    again = make_teacher(case.source, mix, out, part="all")
    assert again.samples.fingerprint == teacher.samples.fingerprint


def test_a_finished_evaluation_is_given_back(
    case: Case, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    evaluate(case.build, case.source, out, samples=case.samples)
    # Killed between the result and the end.
    shutil.copytree(out / "teacher", out / "build")
    monkeypatch.setattr(module, "compare", None)
    said: list[str] = []
    found = evaluate(
        case.build, case.source, out, samples=case.samples, tell=said.append
    )
    assert said[-1] == (
        f"{out} holds this evaluation, finished; there is nothing to do."
    )
    assert found.digest == Evaluation.load(out).digest
    assert left(out) == whole


def test_one_bit_is_seen(whole: dict[str, bytes], tmp_path: Path):
    """Broken twin of the comparisons."""
    (tmp_path / "predictions.npz").write_bytes(whole["predictions.npz"])
    found = Evaluation.load(tmp_path)
    found.save(tmp_path)
    assert left(tmp_path)["predictions.npz"] == whole["predictions.npz"]
    kl = found.kl.copy()
    kl[3] = np.nextafter(kl[3], np.inf)
    replace(found, kl=kl).save(tmp_path)
    assert left(tmp_path)["predictions.npz"] != whole["predictions.npz"]
