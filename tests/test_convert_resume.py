"""B38's like for builds: a conversion that is killed anywhere goes on to the same bytes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_cases import THREE_LAYERS
from fresh_python import environment_with
from tiny_k3 import TEXT_SIZES, WIDE_EXPERTS, write_t1

from kimi_k3 import convert
from kimi_k3.build.folder_lock import locked_folder
from kimi_k3.build.verify import verify
from kimi_k3.conversion import conversion_journal
from kimi_k3.conversion.conversion_journal import JOURNAL, PARTIAL, ConversionJournal
from kimi_k3.conversion.conversion_run import ConversionRun, Progress
from kimi_k3.errors import ConversionError, KimiK3Error
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

#: Every so many operations on the disk a process is killed there; at 1 it passes, too.
STRIDE = 9

#: Operations at the very end that need no room: journal and lock are removed.
ENDING = 5

PROGRAM = Path(__file__).parent / "programs" / "convert_and_die.py"

#: Two MoE layers, one of two banks; a quantised class.
PLAN = ExpertPlan(
    experts=TEXT_SIZES["num_experts"],
    top_k=TEXT_SIZES["num_experts_per_token"],
    layers={1: LayerPlan((3, 1, 4), (5, 0)), 2: LayerPlan((9, 2, 6, 8))},
    bits={"kda.o_proj": 4},
)


class Conversions:
    """A process that converts in forks of itself; see its program."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self.process = process

    def run(self, out: Path, *, resume: bool = False, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order |= {"out": str(out), "resume": resume}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that converts ended"
        return json.loads(answer)

    def go_on(self, out: Path, **order: Any) -> dict[str, Any]:
        """Run as a user would: from where it is, if anything was begun."""
        begun = (out / PARTIAL / JOURNAL).exists() or (out / "config.json").exists()
        return self.run(out, resume=begun, **order)

    def finish(self, out: Path) -> None:
        answer = self.go_on(out)
        assert not answer["died"]
        assert not answer["error"], answer["error"]


@contextmanager
def conversions(source: Path, plan: Path) -> Iterator[Conversions]:
    with subprocess.Popen(
        [sys.executable, PROGRAM, source, plan],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_with({}),
    ) as process:
        yield Conversions(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "t1"
    return write_t1(folder, tokenizer=True, **THREE_LAYERS | WIDE_EXPERTS)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PLAN.save(tmp_path_factory.mktemp("plan") / "plan.json")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion leaves."""
    out = convert(source, tmp_path_factory.mktemp("whole") / "out", PLAN)
    assert verify(out, source).passed
    return files_of(out)


def files_of(out: Path) -> dict[str, bytes]:
    """Every file of a finished build; nothing else may be there."""
    assert not [path for path in out.iterdir() if path.is_dir()]
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_killed_at_any_operation_on_the_disk(
    source: Path, plan: Path, whole: dict[str, bytes], tmp_path: Path
):
    with conversions(source, plan) as children:
        undisturbed = children.run(tmp_path / "undisturbed")
        assert files_of(tmp_path / "undisturbed") == whole
        assert undisturbed["operations"] > 150
        for at in range(1, undisturbed["operations"] + 1, STRIDE):
            out = tmp_path / f"killed-{at}"
            assert children.run(out, at=at)["died"], at
            if (out / "config.json").exists():
                assert verify(out).passed, "it looks finished and is not"
            children.finish(out)
            assert files_of(out) == whole, at
            shutil.rmtree(out)


def test_killed_again_and_again_and_at_any_time(
    source: Path, plan: Path, whole: dict[str, bytes], tmp_path: Path
):
    """Each time a little more is done before the next kill."""
    with conversions(source, plan) as children:
        out, deaths, answer = tmp_path / "operations", 0, {"died": True, "error": ""}
        while answer["died"]:
            answer = children.go_on(out, at=60 + deaths)
            deaths += answer["died"]
        assert deaths > 2
        assert not answer["error"]
        assert files_of(out) == whole

        deaths = 0
        for number in range(1, 5):
            out = tmp_path / f"time-{number}"
            deaths += children.run(out, after=0.03 * number)["died"]
            children.finish(out)
            assert files_of(out) == whole
        assert deaths


def test_a_full_disk_leaves_what_was_finished(
    source: Path, plan: Path, whole: dict[str, bytes], tmp_path: Path
):
    said = set()
    with conversions(source, plan) as children:
        operations = children.run(tmp_path / "undisturbed")["operations"]
        for full in range(1, operations, 4 * STRIDE):
            out = tmp_path / f"full-{full}"
            answer = children.run(out, full=full)
            assert not answer["died"]
            if full > operations - ENDING and not answer["error"]:
                assert files_of(out) == whole
                continue
            assert answer["error"].startswith("ConversionError"), answer
            assert "No space left on device" in answer["error"]
            if out.exists():
                assert not [path for path in out.iterdir() if path.name[0] == "."]
                said.add("make room, then go on with --resume" in answer["error"])
            children.finish(out)
            assert files_of(out) == whole, full
    assert True in said


class Stop(Exception):
    """Raised in the middle of a conversion."""


def stop_after(shard: int) -> Any:
    """A progress that stops the conversion when ``shard`` is safe."""

    def watch(progress: Progress) -> None:
        if progress.finished and progress.shard == shard:
            raise Stop

    return watch


@pytest.fixture
def partial(source: Path, tmp_path: Path) -> Path:
    """A conversion that was stopped after its second shard of five."""
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, PLAN, progress=stop_after(1))
    return out


def test_what_is_not_finished_does_not_look_so(partial: Path):
    assert sorted(path.name for path in partial.iterdir()) == [
        PARTIAL,
        "model-00001-of-000005.safetensors",
        "model-00002-of-000005.safetensors",
    ]
    assert [path.name for path in (partial / PARTIAL).iterdir()] == [JOURNAL]
    report = verify(partial)
    assert "holds no config.json" in report.faults[0].what


def test_finished_shards_are_not_written_again(
    source: Path, partial: Path, whole: dict[str, bytes]
):
    times = {path: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    said, seen = [], []
    convert(source, partial, PLAN, resume=True, tell=said.append, progress=seen.append)
    assert said == ["2 of 5 shards were done before."]
    assert {progress.shard for progress in seen} == {2, 3, 4}
    assert seen[-1].bytes_done == seen[-1].bytes_all
    assert seen[-1].seconds_left == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert files_of(partial) == whole


def test_a_finished_conversion_is_left_alone(
    source: Path, whole: dict[str, bytes], partial: Path
):
    convert(source, partial, PLAN, resume=True)
    said: list[str] = []
    convert(source, partial, PLAN, resume=True, tell=said.append)
    assert said[-1].endswith("finished; there is nothing to do.")
    assert files_of(partial) == whole
    with pytest.raises(ConversionError, match="not empty: it holds config"):
        convert(source, partial, PLAN)
    with pytest.raises(ConversionError, match="another conversion, which is finished"):
        convert(source, partial, resume=True)
    shard = partial / "model-00002-of-000005.safetensors"
    shard.write_bytes(shard.read_bytes() + b" ")
    with pytest.raises(ConversionError, match=f"{shard.name} is not as it was written"):
        convert(source, partial, PLAN, resume=True)


def test_resume_is_asked_for(source: Path, partial: Path):
    with pytest.raises(ConversionError, match=r"begun \(2 shards are finished\)"):
        convert(source, partial, PLAN)


OTHERS = {
    "plan": replace(PLAN, bits={"kda.o_proj": 6}),
    "tool": PLAN,
    "mlx": PLAN,
    "device": PLAN,
    "source": PLAN,
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_conversion_does_not_go_on(
    source: Path,
    partial: Path,
    whole: dict[str, bytes],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
):
    differences, other = conversion_journal.Conditions.differences, OTHERS[what]
    if what != "plan":
        monkeypatch.setattr(
            conversion_journal.Conditions,
            "differences",
            lambda then, now: differences(then, replace(now, **{what: "another"})),
        )
    words = re.escape(conversion_journal._WORDS[what])
    with pytest.raises(ConversionError, match=f"begun otherwise: {words} was '"):
        convert(source, partial, other, resume=True)
    monkeypatch.undo()
    convert(source, partial, PLAN, resume=True)
    assert files_of(partial) == whole


def test_the_plans_story_may_be_another(source: Path, partial: Path):
    told = replace(PLAN, about={"kind": "told otherwise"})
    convert(source, partial, told, resume=True)
    found = json.loads((partial / "config.json").read_text())
    assert found["conversion"]["plan"]["about"] == {"kind": "told otherwise"}


def test_a_changed_finished_shard_is_found(source: Path, partial: Path):
    shard = partial / "model-00001-of-000005.safetensors"
    intact = shard.read_bytes()
    for damaged in (intact[:-1], intact.replace(b"BF16", b"FB16", 1)):
        shard.write_bytes(damaged)
        with pytest.raises(ConversionError, match=f"{shard.name} is not as it was"):
            convert(source, partial, PLAN, resume=True)
    shard.unlink()
    with pytest.raises(ConversionError, match=f"{shard.name} was finished and is not"):
        convert(source, partial, PLAN, resume=True)


def test_a_damaged_journal_is_found(source: Path, partial: Path):
    path = partial / PARTIAL / JOURNAL
    intact = path.read_text()
    for damaged in ("{", "[]", intact.replace("00002", "00003")):
        path.write_text(damaged)
        with pytest.raises(ConversionError, match=f"{JOURNAL} is damaged"):
            convert(source, partial, PLAN, resume=True)
    path.write_text(intact)
    journal = ConversionJournal.read(partial)
    assert journal is not None
    assert sorted(journal.finished) == [
        "model-00001-of-000005.safetensors",
        "model-00002-of-000005.safetensors",
    ]


def test_shards_whose_source_changed_are_written_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path
):
    """A shard that was damaged, and downloaded again in the meantime."""
    mine, out = Path(shutil.copytree(source, tmp_path / "mine")), tmp_path / "out"
    path = next(iter(sorted(mine.glob("*.safetensors"))))
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(Stop):
        convert(mine, out, PLAN, progress=stop_after(3))
    path.write_bytes(intact)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    said: list[str] = []
    convert(mine, out, PLAN, resume=True, tell=said.append)
    assert any("written again: their source files were changed" in x for x in said)
    assert files_of(out) == whole


def test_a_source_that_changes_meanwhile_is_found(source: Path, tmp_path: Path):
    mine, out = Path(shutil.copytree(source, tmp_path / "mine")), tmp_path / "out"

    def touch(progress: Progress) -> None:
        if progress.finished:
            for path in mine.glob("*.safetensors"):
                path.write_bytes(path.read_bytes())
                os.utime(path, ns=(1, 1 + progress.shard))

    with pytest.raises(KimiK3Error, match=r"changed after it was opened"):
        convert(mine, out, PLAN, progress=touch)


def test_only_one_process_converts_into_a_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    with (
        locked_folder(out, PARTIAL, "converted", ConversionError),
        pytest.raises(ConversionError, match="being converted by another process"),
    ):
        convert(source, out, PLAN)
    out.rmdir()

    def refuse(run: ConversionRun) -> None:
        raise Stop

    monkeypatch.setattr(ConversionRun, "write_shards", refuse)
    with pytest.raises(Stop):
        convert(source, out, PLAN)
    assert not out.exists(), "nothing was begun, and something is left"
