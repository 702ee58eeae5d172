"""What a teacher will take = what a real run does; the release in figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_cases import samples_for

from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.cli import main
from kimi_k3.evaluation.evaluate import make_teacher
from kimi_k3.nano import NANO_FOLDER


def cost(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["teacher", "--dry-run", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_real_run_takes_as_much(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    streams: list[LayerStream] = []
    init = LayerStream.__init__

    def noted(self: LayerStream, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        streams.append(self)

    monkeypatch.setattr(LayerStream, "__init__", noted)
    samples = samples_for(NANO_FOLDER, rows=3)
    samples.save(tmp_path / "samples.npz")
    most = 0

    def watch(_: Any) -> None:
        nonlocal most
        files = (tmp_path / "out").rglob("*.bin")
        most = max(most, sum(path.stat().st_size for path in files))

    make_teacher(NANO_FOLDER, samples, tmp_path / "out", progress=watch)
    want = cost(capsys, NANO_FOLDER, "--samples", tmp_path / "samples.npz")
    assert want["read"] == streams[0].bytes_read
    final = (tmp_path / "out" / "final.bin").stat().st_size
    assert want["disk"]["final hidden states"] == final
    states = {
        k: v for k, v in want["disk"].items() if "hidden states, " in k or "res" in k
    }
    assert sum(states.values()) == most
    head = (tmp_path / "out" / "head.safetensors").stat().st_size
    assert want["disk"]["head"] < head < want["disk"]["head"] + 1000
    assert want["kept"] == final + want["disk"]["head"]


def test_the_release(capsys: pytest.CaptureFixture[str]):
    """14 kB a token and the head, of 1.56 TB that are read once."""
    found = cost(capsys, "--samples", "general", "--memory-limit", "64")
    tokens = found["rows"] * found["length"]
    assert found["disk"]["final hidden states"] == tokens * 7168 * 2
    assert found["disk"]["head"] == 163840 * 7168 * 2
    assert 1.559e12 < found["read"] < 1.561e12
    assert found["memory"]["hidden states held"] <= 64e9


def test_what_is_printed(capsys: pytest.CaptureFixture[str]):
    command = ["teacher", "--dry-run", str(NANO_FOLDER), "--samples", "general"]
    assert main([*command, "--disk-speed", "6", "--memory-limit", "0"]) == 0
    text = capsys.readouterr().out
    assert "128 rows of 2,048 tokens, one at a time" in text
    assert "hidden states held" not in text.partition("disk while it runs")[0]
    assert text.count("6 GB/s") == 3


@pytest.mark.parametrize("option", ["--memory-limit", "--disk-speed"])
def test_numbers_that_mean_nothing(option: str, capsys: pytest.CaptureFixture[str]):
    assert main(["teacher", "--dry-run", option, "-1"]) == 2
    assert option in capsys.readouterr().err
