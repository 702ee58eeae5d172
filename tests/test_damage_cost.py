"""What measuring damage takes: counted against a run, and the release in figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from calibration_cases import CORPORA, samples_for, write_source
from tiny_k3 import WIDE_EXPERTS

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.cli import main
from kimi_k3.errors import PlanError
from kimi_k3.planning import measure, probe_damage
from kimi_k3.planning.damage_cost import damage_cost
from kimi_k3.planning.probe_run import run_probes


def test_a_run_does_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_source(tmp_path / "t1", **WIDE_EXPERTS)
    calibration = tmp_path / "calibration"
    # Rows as long as windows, so that counts of tokens agree.
    samples = samples_for(source, rows=3, length=256)
    calibrate(source, samples, calibration)
    memory, read = 40 * 768 * 64 * 4, 0
    ran: list[tuple[int, int]] = []

    def counted(stream: LayerStream, tokens: Any, *args: Any, **options: Any) -> Any:
        nonlocal read
        before = stream.bytes_read
        found = run_probes(stream, tokens, *args, **options)
        ran.append((len(args[1]), tokens.size))
        read += stream.bytes_read - before
        return found

    monkeypatch.setattr(probe_damage, "run_probes", counted)
    measure.damage(source, calibration, tokens=768, memory=memory)
    config = json.loads((source / "config.json").read_text())
    said = damage_cost(config, tokens=768, memory=memory, corpora=len(CORPORA))
    assert said.probes == sum(probes for probes, _ in ran)
    assert said.passes == len(ran) > 1
    assert {tokens for _, tokens in ran} == {said.tokens}
    # A_log is stored with padding, which is counted as it is stored by default.
    assert read == pytest.approx(said.read * len(ran) / (len(ran) + 1), rel=1e-3)


def test_the_release():
    said = damage_cost(full_size_config())
    assert (said.probes, said.passes, said.tokens) == (170, 3, 4096)
    assert said.read == 4 * said.stored
    without = damage_cost(full_size_config(), probes=False)
    assert (without.probes, without.passes, without.flop) == (0, 0, 0)
    assert without.read == said.stored
    # More memory, fewer passes; another corpus without room has a window of its own.
    assert damage_cost(full_size_config(), memory=128 * 10**9).passes == 2
    assert damage_cost(full_size_config(), corpora=20).tokens == 20 * 256


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["damage", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["probes"] == 170
    assert main(["damage", "--dry-run"]) == 0
    assert "170 probes of 4,096 tokens, in 3 passes" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"tokens": 0}, {"memory": 0}, {"corpora": 0}])
def test_refused(options: dict[str, int]):
    with pytest.raises(PlanError):
        damage_cost(full_size_config(), **options)  # type: ignore[arg-type]
