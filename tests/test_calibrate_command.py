"""``kimi-k3 calibrate``: what it prints, how it ends, and that it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from calibration_cases import results, samples_for, write_source
from fresh_python import environment_with, installed_command

from kimi_k3.build import calibrate as module
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.pass_progress import Progress
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.cli import main
from kimi_k3.verbs.calibrate import _Lines, progress_text

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1")


@pytest.fixture(scope="module")
def samples(source: Path) -> Path:
    path = source.parent / "samples.npz"
    samples_for(source).save(path)
    return path


def arguments(source: Path, samples: Path, out: Path, *more: str) -> list[str]:
    return [
        "calibrate",
        str(source),
        *("--samples", str(samples), "--out", str(out), "--step-tokens", "24"),
        *more,
    ]


def test_from_the_command_line(
    source: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(arguments(source, samples, out, "--memory-limit", "0.001")) == 0
    said = capsys.readouterr()
    assert said.out == (
        f"{out}: 2 layers of 16 experts, on 42 tokens of code, prose, chinese.\n"
        f"`kimi-k3 saliency {out}` shows which of them matter.\n"
    )
    lines = said.err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        f"layer {i} of 3" for i in (1, 2, 3)
    ]
    assert lines[-1].rstrip().endswith("0:00 left")

    # Again: nothing is done, and the same is said.
    assert main(arguments(source, samples, out, "--json")) == 0
    again = capsys.readouterr()
    assert again.err == (
        f"{out} holds this calibration, finished; there is nothing to do.\n"
    )
    document = json.loads(again.out)
    assert document["tokens"] == {"code": 14, "prose": 13, "chinese": 15}
    assert document["experts"] == [16, 16]

    calibrate(source, samples, tmp_path / "function", step_tokens=24)
    assert results(tmp_path / "function") == results(out)


def test_moments_off_and_what_is_missing(
    source: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(arguments(source, samples, out, "--moments", "off")) == 0
    assert not (out / "moments").exists()
    capsys.readouterr()
    for left_out, named in (
        ([], "a checkpoint folder"),
        ([str(source)], "samples with --samples"),
        ([str(source), "--samples", "general"], "a folder for the results with --out"),
    ):
        assert main(["calibrate", *left_out]) == 2
        assert f"error: name {named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--step-tokens", "0"),
        ("--step-tokens", "-1"),
        ("--memory-limit", "-1"),
        ("--memory-limit", "nan"),
        ("--memory-limit", "inf"),
    ],
)
def test_numbers_that_mean_nothing(
    option: str,
    value: str,
    source: Path,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    out = tmp_path / "out"
    for dry in ([], ["--dry-run"]):
        assert main(arguments(source, samples, out, option, value, *dry)) == 2
        error = capsys.readouterr().err
        assert value in error
        assert option.lstrip("-").replace("-", "_") in error.replace("-", "_")
        assert not out.exists()


def test_an_interrupt_says_how_to_go_on(
    source: Path,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    out, layer = tmp_path / "out", _Lines.layer

    def interrupt(self: _Lines, progress: Progress) -> None:
        layer(self, progress)
        if progress.finished and progress.layer == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "layer", interrupt)
        assert main(arguments(source, samples, out)) == 130
    error = capsys.readouterr().err
    assert "stopped. Resume with the same command: finished layers are kept" in error
    assert main(arguments(source, samples, out)) == 0
    assert "layers 0 to 1 were done before." in capsys.readouterr().err


def nano_mix(folder: Path) -> Path:
    """The mix of the trained nano's five domains, for a short calibration."""
    text = (ROOT / "benchmarks" / "nano" / "mix.toml").read_text()
    text = text.replace("samples/", f"{ROOT}/benchmarks/nano/samples/")
    for key, value in (("tokens", 1280), ("length", 64)):
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
    (folder / "mix.toml").write_text(text)
    return folder / "mix.toml"


def test_a_killed_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """B38 on the trained nano: SIGKILL from outside as soon as a layer is safe."""
    out, mix, done = tmp_path / "out", nano_mix(tmp_path), tmp_path / "undisturbed"
    nano = ROOT / "kimi_k3" / "nano" / "checkpoint"
    command = [installed_command("kimi-k3"), *arguments(nano, mix, out)]
    with subprocess.Popen(
        command,
        env=environment_with({}),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith("layer 2 of 8") for line in lines)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert main(arguments(nano, mix, out)) == 0
    assert "were done before." in capsys.readouterr().err

    assert main(arguments(nano, mix, done)) == 0
    assert results(out) == results(done)
    assert len(results(out)) == 1 + 8 + 1
    table = SaliencyTable.load(out)
    assert table.corpora == ("python", "c", "english", "chinese", "chat")
    assert table.tokens.tolist() == [256] * 5


def test_an_error_is_one_line(
    source: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "notes.txt").write_text("")
    assert main(arguments(source, samples, tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path} holds notes.txt")
    assert error.count("\n") == 1


PROGRESS = Progress(
    layer=11,
    layers=93,
    rows_done=32,
    rows=64,
    tokens=131072,
    bytes_done=2e11,
    bytes_left=1.36e12,
    seconds=400.0,
)


def test_the_line_of_a_layer():
    assert progress_text(PROGRESS) == (
        "layer 12 of 93   50%  200 GB at 500 MB/s  6:40 gone  45:20 left"
    )
    begun = replace(PROGRESS, layer=0, rows_done=0, bytes_done=0, seconds=7261)
    assert progress_text(begun) == "layer  1 of 93    0%  0 B at 0 B/s  2:01:01 gone"


def test_on_a_terminal_the_line_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(time, "monotonic", iter(range(100)).__next__)
    lines = _Lines()
    lines.samples("tokens", 5, 10)
    lines.layer(PROGRESS)
    lines.layer(replace(PROGRESS, rows_done=64, finished=True))
    lines.note("a remark")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2
    moves = [part.strip() for part in shown.split("\n")[0].split("\r")]
    assert moves[1] == "samples, tokens: 5 of 10"
    assert [m[:20] for m in moves[2:]] == [
        "layer 12 of 93   50%",
        "layer 12 of 93  100%",
    ]
    assert shown.split("\n")[1] == "a remark"


def test_its_default_is_the_function_s():
    assert module.STEP_TOKENS == 2048
