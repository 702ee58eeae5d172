"""``kimi-k3 convert`` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calibration_cases import THREE_LAYERS
from fresh_python import environment_with
from tiny_k3 import TEXT_SIZES, WIDE_EXPERTS, write_t1

from kimi_k3.build.verify import verify
from kimi_k3.cli import main
from kimi_k3.conversion.conversion_run import ConversionRun, Progress
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan
from kimi_k3.verbs.convert import _Lines, progress_text

PLAN = ExpertPlan(
    experts=TEXT_SIZES["num_experts"],
    top_k=TEXT_SIZES["num_experts_per_token"],
    layers={1: LayerPlan((0, 1, 2), (3, 4)), 2: LayerPlan((0, 1, 2, 3))},
)

PROGRESS = Progress(
    shard=3, shards=95, bytes_done=25 * 10**9, bytes_all=10**11, seconds=50
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(
        tmp_path_factory.mktemp("source") / "t1",
        tokenizer=True,
        **THREE_LAYERS | WIDE_EXPERTS,
    )


def run(*arguments: str | Path) -> object:
    return main(["convert", *map(str, arguments)])


def test_convert_by_a_plan(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, plan = tmp_path / "out", PLAN.save(tmp_path / "plan.json")
    assert run(source, out, "--plan", plan) == 0
    done = capsys.readouterr()
    assert f"{out}: 4 to 5 experts in each of 2 layers, " in done.out
    assert f"kimi-k3 verify {out} --source SOURCE" in done.out
    lines = [line for line in done.err.splitlines() if line.startswith("shard")]
    assert len(lines) == 5
    assert lines[-1].startswith("shard 5 of 5  100%  ")
    assert verify(out, source).passed


def test_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert run(source, out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "out": str(out),
        "shards": 5,
        "bytes": sum(path.stat().st_size for path in out.glob("*.safetensors")),
        "experts": {"1": 16, "2": 16},
        "plan": None,
    }


def test_refusals_are_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for arguments, message in (
        ((), "name a checkpoint folder; --help shows examples"),
        ((source,), "name a new folder for the build"),
        ((source, source), "is the source"),
        ((tmp_path / "none", tmp_path / "out"), "is not a folder"),
        (("--dry-run", "--disk-speed", "0"), "--disk-speed is 0; wanted more"),
    ):
        assert run(*arguments) != 0
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert len(error.splitlines()) == 1


def test_ctrl_c_says_how_to_go_on(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    shard = _Lines.shard

    def interrupt(lines: _Lines, progress: Progress) -> None:
        shard(lines, progress)
        if progress.finished and progress.shard == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Lines, "shard", interrupt)
    out = tmp_path / "out"
    assert run(source, out) == 130
    error = capsys.readouterr().err
    assert f"same command and --resume: finished shards are kept in {out}." in error
    monkeypatch.undo()
    assert run(source, out) != 0
    assert "--resume goes on with it" in capsys.readouterr().err
    assert run(source, out, "--resume") == 0
    assert "2 of 5 shards were done before." in capsys.readouterr().err
    assert verify(out, source).passed


def test_a_real_ctrl_c(source: Path, tmp_path: Path):
    """In a process of its own, by the signal that a terminal sends."""
    out = tmp_path / "out"
    slow = (
        "import signal, sys, time; from kimi_k3.cli import main; "
        # A process in the background may have been told to ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kimi_k3.conversion.conversion_run import ConversionRun as run; "
        "show = run._show; "
        "run._show = lambda self, shard, **how: ("
        "show(self, shard, **how), how.get('finished') and time.sleep(60)); "
        "sys.exit(main(['convert', *sys.argv[1:]]))"
    )
    assert hasattr(ConversionRun, "_show")
    with subprocess.Popen(
        [sys.executable, "-c", slow, source, out],
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with({}),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("shard 1 of 5")
        os.kill(process.pid, signal.SIGINT)
        error = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "--resume: finished shards are kept" in error
    assert run(source, out, "--resume") == 0


def test_dry_run_of_the_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--dry-run", "--disk-speed", "5") == 0
    text = capsys.readouterr().out
    assert "896 experts in each of 92 layers" in text
    assert "1,560.86 GB" in text
    assert text.count("GB/s") == 1
    assert run("--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["read"] == found["source"] == 1_560_860_324_864
    assert found["shards"] == 95


def test_dry_run_of_a_config_and_a_plan(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = PLAN.save(tmp_path / "plan.json")
    assert run("--dry-run", source, "--plan", plan, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts"] == {"1": 5, "2": 4}
    assert run(source, tmp_path / "out", "--plan", plan) == 0
    shards = (tmp_path / "out").glob("*.safetensors")
    assert found["written"] == sum(path.stat().st_size for path in shards)


def test_the_line_of_progress():
    assert progress_text(PROGRESS) == (
        "shard  4 of 95   25%  25 GB at 500 MB/s  0:50 gone  2:30 left"
    )
    begun = Progress(0, 95, 0, 10**11, 0.0, hashing="the source")
    assert progress_text(begun) == "hashing the source    0%  0 B at 0 B/s  0:00 gone"
    assert progress_text(Progress(0, 1, 0, 0, 1.0)).startswith("shard 1 of 1  100%")
