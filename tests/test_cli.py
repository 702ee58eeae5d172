"""The command ``kimi-k3``: its help, its errors, and the second door ``run``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fresh_python import installed_command, run_command, run_python
from tiny_k3 import write_t2

from kimi_k3 import __version__, folder_check
from kimi_k3.cli import VERBS, main
from kimi_k3.errors import CheckpointError, KimiK3Error, RegistrationError
from kimi_k3.run import named_checkpoints, run_host
from kimi_k3.tokenizer import files
from kimi_k3.verbs.printing import progress_line
from kimi_k3.verbs.verb import Verb


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A module ``mlx_lm.k3_probe`` that exits with the code it is given."""
    import mlx_lm

    (tmp_path / "k3_probe.py").write_text(
        dedent(
            """
            import sys
            print(__name__, sys.argv[1:])
            code = sys.argv[-1]
            if code != "end":
                sys.exit(int(code) if code.isdigit() else code)
            """
        )
    )
    monkeypatch.setattr(mlx_lm, "__path__", [*mlx_lm.__path__, str(tmp_path)])
    return "mlx_lm.k3_probe"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were looked through; none is found wanting."""
    folders: list[Path] = []
    monkeypatch.setattr(files, "check_tokenizer_folder", lambda folder: None)
    monkeypatch.setattr(folder_check, "check_folder", folders.append)
    return folders


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb}" in text.replace("    ", "  ") for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_teaches(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  kimi-k3 {verb}" in capsys.readouterr().out


def test_help_is_quick():
    """No verb is imported before it is asked for."""
    done = run_python(
        [
            "-c",
            "import sys; from kimi_k3.cli import main\n"
            "try: main(['--help'])\n"
            "finally: print([m for m in sys.modules if m.startswith('mlx')])",
        ]
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_both_spellings_of_the_command():
    installed = Path(sys.executable).parent / "kimi-k3"
    for command in ([installed], [sys.executable, "-m", "kimi_k3"]):
        done = run_command([*command, "--version"])
        assert done.stdout == f"kimi-k3 {__version__}\n"
    done = run_command([installed, "run", "json.tool"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: kimi-k3 run takes a module of mlx_lm")


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"], ["run"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: kimi-k3" in capsys.readouterr().err


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "os"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: kimi-k3 run takes a module of mlx_lm or mlx_vlm")
    assert error.count("\n") == 1
    with pytest.raises(KimiK3Error):
        main(["--debug", "run", "os"])


def failing_verb(error: BaseException) -> Verb:
    def fail(options: object) -> int:
        raise error

    return Verb("fail", "  kimi-k3 fail\n", lambda parser: None, fail)


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(VERBS, "fail", failing_verb(KeyboardInterrupt()))
    assert main(["fail"]) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "stopped.")


def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [installed_command("kimi-k3"), "samples", "--list"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_that_breaks_in_a_host_is_the_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VERBS, "run", failing_verb(BrokenPipeError("a socket")))
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["run"])


def test_tracebacks_are_for_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(VERBS, "fail", failing_verb(OSError("disk full")))
    assert main(["fail"]) == 2
    assert (
        capsys.readouterr().err == "error: OSError: disk full (--debug shows where)\n"
    )
    with pytest.raises(OSError, match="disk full"):
        main(["--debug", "fail"])


def test_run_hands_everything_on(
    probe: str, checked: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    before = list(sys.argv)
    arguments = ["--model", str(tmp_path), "--flag=1", "--", "-x", "end"]
    assert main(["run", probe, *arguments]) is None
    assert capsys.readouterr().out == f"__main__ {arguments}\n"
    assert checked == [tmp_path]
    assert sys.argv == before


@pytest.mark.parametrize(("last", "code"), [("0", 0), ("7", 7), ("sorry", "sorry")])
def test_exit_codes_pass_through(
    last: str, code: object, probe: str, checked: list[Path]
):
    with pytest.raises(SystemExit) as stop:
        main(["run", probe, last])
    assert stop.value.code == code


def test_a_bad_folder_stops_before_anything_runs(
    probe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    def refuse(folder: Path) -> None:
        raise CheckpointError(f"{folder.name} is damaged")

    monkeypatch.setattr(folder_check, "check_folder", refuse)
    assert main(["run", probe, "--model", str(tmp_path), "end"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {tmp_path.name} is damaged\n")


def test_run_with_the_switch_off(probe: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_MLX", "off")
    with pytest.raises(RegistrationError, match="unset it|Unset it"):
        run_host(probe, ["end"])


@pytest.mark.parametrize(
    "module", ["mlx_lm.no_such_command", "mlx_lm.nothing.here", "mlx_lm.", "mlx_vlm.x"]
)
def test_run_of_a_module_that_is_not_there(module: str):
    with pytest.raises(KimiK3Error, match=f"has no module {module}"):
        run_host(module, [])


@pytest.mark.parametrize("module", ["os", "kimi_k3", "mlx", "mlx_lm_evil", "", "."])
def test_run_takes_modules_of_the_hosts_only(module: str):
    with pytest.raises(KimiK3Error, match="takes a module of mlx_lm or mlx_vlm"):
        run_host(module, [])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--model", "A"], ["A"]),
        (["--model=A", "--prompt", "B"], ["A"]),
        (["-m", "A"], ["A"]),
        (["-m", "20"], []),  # mlx_lm.generate: the number of tokens
        (["--hf-path", "A", "--mlx-path", "B"], ["A"]),
        (["--mod", "A"], ["A"]),
        (["--draft-model=B", "--model", "A"], ["A"]),  # a draft may be any model
        (["--path", "A"], ["A"]),
        (["--prompt", "A"], []),
        (["--model"], []),
        (["A", "--max-tokens", "20"], []),
        ([], []),
    ],
)
def test_checkpoints_among_the_arguments(arguments: list[str], found: list[str]):
    assert named_checkpoints(arguments) == found


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"config.json": {"model_file": "model.py"}}, "Code of checkpoints is never"),
        ({"tokenizer_config.json": {"tokenizer_class": "Evil"}}, "Evil"),
        ({"config.json": {"model_type": "kimi_k3_uvmax"}}, "kimi_k3_uvmax"),
        ({"config.json": {"model_type": "qwen2"}}, "not a Kimi K3"),
    ],
)
def test_what_run_refuses(
    spoil: dict[str, dict[str, str]],
    message: str,
    probe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    build = write_t2(tmp_path / "build", tokenizer=True)
    (build / "model.py").write_text("raise SystemExit('executed')")
    assert main(["run", probe, f"--model={build}", "end"]) is None
    assert capsys.readouterr().out.startswith("__main__")
    for name, changes in spoil.items():
        file = build / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert main(["run", probe, f"--model={build}", "end"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_run_of_a_folder_that_is_not_there(
    probe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["run", probe, "--model", str(tmp_path / "none"), "end"]) == 2
    assert "none is not there" in capsys.readouterr().err


def test_stock_command_through_the_door():
    done = run_python(["-m", "kimi_k3", "run", "mlx_lm.generate", "--help"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: mlx_lm.generate")
    assert "deprecated" not in done.stdout + done.stderr


def test_doctor_prints_and_exits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from kimi_k3.machine import doctor

    hosts = (doctor.HostAnswer("mlx-lm", False, "/host/kimi_k3.py", "switched off"),)
    finding = doctor.Finding("mlx-lm uses its own", "unset it", stops=True)
    report = doctor.Report({"mlx": "1.0"}, hosts, None, (finding,))
    monkeypatch.setattr(doctor, "diagnose", lambda: report)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    for part in ("mlx           1.0", "its own class: switched off", "problem: mlx-lm"):
        assert part in text
    assert text.endswith("K3 does not run here.\n")
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Report({}, (), None, ()))
    assert main(["doctor", "--json"]) == 0
    assert '"healthy": true' in capsys.readouterr().out


def test_verify_prints_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    build = write_t2(tmp_path / "build", tokenizer=True)
    assert main(["verify", str(build)]) == 0
    assert "This build is whole." in capsys.readouterr().out
    shard = next(build.glob("model*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert main(["verify", str(build), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    assert any(shard.name in finding["what"] for finding in report["findings"])


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert progress_line("read") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show = progress_line("read")
    assert show is not None
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr().err == "\rread 25%\rread 100%\n"


def test_demo_fails_with_its_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from kimi_k3.nano import demo

    def run_demo(folder: object, **options: object) -> demo.DemoReport:
        asked.append(folder)
        return demo.DemoReport((), (), (), problems, 0.0)

    asked: list[object] = []
    monkeypatch.setattr(demo, "run_demo", run_demo)
    problems = ()
    assert main(["demo", "--cache-dir", str(tmp_path)]) == 0
    problems = ("no text",)
    assert main(["demo"]) == 1
    assert asked[0] == str(tmp_path)
