"""``kimi-k3 teacher`` and ``kimi-k3 evaluate``: what they print, and how they end."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from evaluation_cases import Case, write_case
from fresh_python import environment_with, installed_command

from kimi_k3.build.pass_progress import Progress
from kimi_k3.cli import build_parser, main
from kimi_k3.evaluation.evaluate import evaluate
from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.evaluation.summary import Summary
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.verbs.streaming_options import StreamingLines

ROOT = Path(__file__).parent.parent

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def samples(case: Case) -> Path:
    path = case.source.parent / "samples.npz"
    case.samples.save(path)
    return path


def run(*arguments: str | Path) -> object:
    return main([str(argument) for argument in arguments])


def test_a_teacher_and_a_build(
    case: Case, samples: Path, tmp_path: Path, capsys: Capture
):
    teacher, out = tmp_path / "teacher", tmp_path / "out"
    made = ("teacher", case.source, "--samples", samples, "--out", teacher)
    assert run(*made) == 0
    said = capsys.readouterr()
    assert said.out == (
        f"{teacher}: final hidden states of 75 tokens of code, prose (part held_out), "
        "and the head of 576 tokens.\n"
        f"`kimi-k3 evaluate BUILD --against {teacher} --out OUT` judges a build by them.\n"
    )
    lines = said.err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        f"layer {i} of 3" for i in (1, 2, 3)
    ]
    assert lines[-1].rstrip().endswith("0:00 left")
    assert run(*made, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == 75
    assert document["dtype"] == "stored"

    assert run("evaluate", case.build, "--against", teacher, "--out", out) == 0
    said = capsys.readouterr()
    assert said.out.startswith("KL(teacher || build)")
    for shown in ("by span", "by corpus", "prose", "95%", "not checked"):
        assert shown in said.out
    lines = said.err.splitlines()
    assert lines[0].startswith("overlap with what was calibrated on: not checked")
    assert [line.split("  ")[0].rstrip() for line in lines[1:]] == [
        *(f"build: layer {i} of 3" for i in (1, 2, 3)),
        "predictions judged: 63 of 63",
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "evaluation.json",
        "predictions.npz",
    ]
    function = evaluate(case.build, teacher, tmp_path / "function")
    assert function.digest == Evaluation.load(out).digest

    # Again: nothing is done, and the same is said.
    again = ("evaluate", case.build, "--against", teacher, "--out", out, "--json")
    assert run(*again) == 0
    said = capsys.readouterr()
    assert said.err.endswith(
        f"{out} holds this evaluation, finished; there is nothing to do.\n"
    )
    assert json.loads(said.out) == Summary.load(out).to_dict()


def test_options_reach_the_run(
    case: Case, samples: Path, tmp_path: Path, capsys: Capture
):
    out = tmp_path / "out"
    options = ("--dtype", "float32", "--memory-limit", "0.001", "--part", "held_out")
    asked = ("evaluate", case.build, "--against", case.source, "--samples", samples)
    assert run(*asked, "--out", out, *options) == 0
    about = Summary.load(out).about
    assert about["teacher"]["dtype"] == about["build"]["dtype"] == "float32"
    assert (out / "teacher" / "final.json").exists()
    shown = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("teacher: layer") for line in shown) == 3
    assert run(*asked, "--out", out) == 2
    assert "of its teacher dtype differ" in capsys.readouterr().err
    assert run(*asked, "--out", out, "--restart") == 0
    assert Summary.load(out).about["build"]["dtype"] == "stored"


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
@pytest.mark.parametrize("verb", ["teacher", "evaluate"])
def test_numbers_that_mean_nothing(
    verb: str, value: str, case: Case, samples: Path, tmp_path: Path, capsys: Capture
):
    out = tmp_path / "out"
    asked: list[Any] = [verb, case.source, "--samples", samples, "--out", out]
    asked += ["--against", case.source] if verb == "evaluate" else []
    assert run(*asked, "--memory-limit", value) == 2
    assert f"--memory-limit is {value}" in capsys.readouterr().err
    assert not out.exists()


def test_what_is_missing_is_named(case: Case, tmp_path: Path, capsys: Capture):
    out = tmp_path / "out"
    for asked, named in (
        (("teacher", case.source), "samples with --samples"),
        (("teacher", case.source, "--samples", "general"), "the teacher with --out"),
        (("evaluate", case.build), "the source or teacher with --against"),
        (("evaluate", case.build, "--against", case.source), "results with --out"),
        (
            ("evaluate", case.build, "--against", case.source, "--out", out),
            "samples to judge by",
        ),
    ):
        assert run(*asked) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1
    assert not out.exists()


def test_an_interrupt_says_how_to_go_on(
    case: Case,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
):
    teacher, out, step = tmp_path / "t", tmp_path / "out", StreamingLines.step

    def interrupt(self: StreamingLines, line: str) -> None:
        step(self, line)
        if "layer 2 of 3" in line:
            raise KeyboardInterrupt

    made = ("teacher", case.source, "--samples", samples, "--out", teacher)
    asked = ("evaluate", case.build, "--against", teacher, "--out", out)
    for command, folder in ((made, teacher), (asked, out)):
        with monkeypatch.context() as patch:
            patch.setattr(StreamingLines, "step", interrupt)
            assert run(*command) == 130
        assert capsys.readouterr().err.splitlines()[-1] == (
            "stopped. Resume with the same command: finished layers are kept in "
            f"{folder}."
        )
        assert run(*command) == 0
        assert "layers 0 to 1 were done before." in capsys.readouterr().err


def nano_mix(folder: Path) -> Path:
    """The mix of the trained nano's five domains: a few tokens of each."""
    text = (ROOT / "benchmarks" / "nano" / "mix.toml").read_text()
    text = text.replace("samples/", f"{ROOT}/benchmarks/nano/samples/")
    for key, value in (("tokens", 320), ("length", 64)):
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
    (folder / "mix.toml").write_text(text)
    return folder / "mix.toml"


def test_a_killed_command_goes_on(tmp_path: Path, capsys: Capture):
    """B57 on the trained nano and itself: SIGKILL as soon as a layer is safe."""
    out, mix = tmp_path / "out", nano_mix(tmp_path)
    asked = ("evaluate", NANO_FOLDER, "--against", NANO_FOLDER, "--samples", mix)
    command = [installed_command("kimi-k3"), *map(str, asked), "--out", str(out)]
    with subprocess.Popen(
        command,
        env=environment_with({}),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith("teacher: layer 2 of 8") for line in lines)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert run(*asked, "--out", out) == 0
    assert "were done before." in capsys.readouterr().err
    assert run(*asked, "--out", tmp_path / "undisturbed") == 0
    found = Evaluation.load(out)
    assert found.digest == Evaluation.load(tmp_path / "undisturbed").digest
    assert found.kl.max() <= 1e-7
    assert found.corpora == ("python", "c", "english", "chinese", "chat")
    assert {"text", "markup"} <= found.groups("span").keys()
    # Trained: a wrong token or place would show in the perplexity of its own words.
    assert found.teacher_nll.mean() < 4


def test_the_guide_s_commands_are_understood():
    """Every verb and option of them is there."""
    page = (ROOT / "docs" / "evaluating.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("kimi-k3 ")]
    assert len(commands) > 12
    for command in commands:
        arguments = shlex.split(command, comments=True)[1:]
        assert build_parser().parse_args(arguments).verb == arguments[0]


def test_on_a_terminal_the_line_moves(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("time.monotonic", iter(range(100)).__next__)
    lines = StreamingLines()
    at = Progress(1, 3, 2, 4, 64, 1e9, 2e9, 10.0)
    lines.of("build")(at)
    lines.judged(5, 10)
    lines.judged(10, 10)
    shown = capsys.readouterr().err
    moves = [part.strip() for part in shown.split("\r") if part.strip()]
    assert moves == [
        "build: layer 2 of 3   50%  1 GB at 100 MB/s  0:10 gone  0:20 left",
        "predictions judged: 5 of 10",
        "predictions judged: 10 of 10",
    ]
