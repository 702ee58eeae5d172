"""``kimi-k3 doctor``: what it reports and what it finds wrong."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kimi_k3 import registration
from kimi_k3.machine import doctor, hardware
from kimi_k3.machine.doctor import (
    NOT_INSTALLED,
    HostAnswer,
    Report,
    ask_host,
    diagnose,
    host_findings,
    machine_findings,
    package_findings,
)
from kimi_k3.machine.hardware import Machine, read_machine, read_wired_limit

GIB = 2**30

STUDIO = Machine(
    system="macOS",
    system_version="26.1",
    processor="arm64",
    device="Apple M3 Ultra (gpu)",
    gpu=True,
    memory=512 * GIB,
    gpu_memory=464 * GIB,
    wired_limit_mb=0,
)


@pytest.fixture
def hosts_own(monkeypatch: pytest.MonkeyPatch) -> str:
    """mlx-lm's own class in place of ours; gives its file."""
    upstream = registration.load_upstream("mlx_lm.models.kimi_k3")
    monkeypatch.setitem(sys.modules, "mlx_lm.models.kimi_k3", upstream)
    return str(upstream.__file__)


def test_this_environment(monkeypatch: pytest.MonkeyPatch):
    """mlx-vlm is left out: its import alone takes seconds."""
    monkeypatch.setattr(doctor, "HOSTS", {"mlx-lm": "mlx_lm.models.kimi_k3"})
    report = diagnose()
    assert report.healthy
    assert {"kimi-k3-mlx", "python", *doctor.PACKAGES} == set(report.versions)
    (answer,) = report.hosts
    assert answer.ours
    assert registration.is_ours(answer.file)
    assert "start-up file" in answer.reason
    assert json.loads(json.dumps(report.to_dict()))["healthy"] is True


def test_hosts_own_class_stops_k3(hosts_own: str):
    answer = ask_host("mlx-lm")
    assert (answer.ours, answer.file) == (False, hosts_own)
    (finding,) = host_findings(answer)
    assert finding.stops
    assert "uses its own kimi_k3 class" in finding.what


@pytest.mark.parametrize(
    ("switch", "finder", "reason"),
    [
        ("off", True, "KIMI_K3_MLX=off is set"),
        ("", False, "no start-up file"),
        ("", True, "imported before"),
    ],
)
def test_why_the_host_answers(
    switch: str,
    finder: bool,
    reason: str,
    hosts_own: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("KIMI_K3_MLX", switch)
    others = [f for f in sys.meta_path if not isinstance(f, registration.Finder)]
    ours = [registration.Finder("test")] if finder else []
    monkeypatch.setattr(sys, "meta_path", [*ours, *others])
    answer = ask_host("mlx-lm")
    assert reason in answer.reason
    (finding,) = host_findings(answer)
    assert ("unset KIMI_K3_MLX" in finding.remedy) == (switch == "off")


def test_host_without_our_code_is_no_fault():
    answer = HostAnswer("mlx-vlm", False, "/host/kimi_k3.py", "none yet")
    if registration.our_file(doctor.HOSTS["mlx-vlm"]) is None:
        assert host_findings(answer) == []
    else:
        assert host_findings(answer)[0].stops


@pytest.mark.parametrize(("host", "stops"), [("mlx-lm", [True]), ("mlx-vlm", [])])
def test_missing_host(host: str, stops: list[bool], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    answer = ask_host(host)
    assert answer == HostAnswer(host, None, None, NOT_INSTALLED)
    assert [finding.stops for finding in host_findings(answer)] == stops


def test_old_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "host_version", lambda host: "0.31.0")
    (finding,) = host_findings(ask_host("mlx-lm"))
    assert finding.stops
    assert "mlx-lm 0.31.0 is too old" in finding.what


def test_host_that_breaks(monkeypatch: pytest.MonkeyPatch):
    broken = ModuleType("mlx_lm.models.kimi_k3")
    monkeypatch.setitem(sys.modules, "mlx_lm.models.kimi_k3", broken)
    answer = ask_host("mlx-lm")
    assert answer.ours is None
    assert "AttributeError" in answer.reason
    assert host_findings(answer)[0].stops


def test_missing_packages():
    versions: dict[str, str | None] = dict.fromkeys(doctor.PACKAGES, "1.0")
    assert package_findings(versions) == []
    (finding,) = package_findings(versions | {"tiktoken": None})
    assert (finding.what, finding.stops) == ("tiktoken is not installed", True)


def test_mlx_that_does_not_import(monkeypatch: pytest.MonkeyPatch):
    def fail() -> Machine:
        raise ImportError("libmlx.so is missing")

    monkeypatch.setattr(doctor, "HOSTS", {})
    monkeypatch.setattr(doctor, "read_machine", fail)
    report = diagnose()
    assert report.machine is None
    assert not report.healthy
    assert 'pip install "kimi-k3-mlx[cpu]"' in report.findings[-1].remedy


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpu_memory": 480 * GIB}, None),
        ({"gpu_memory": 384 * GIB}, "sysctl iogpu.wired_limit_mb=491520"),
        (
            {"memory": 64 * GIB, "gpu_memory": 48 * GIB},
            "sysctl iogpu.wired_limit_mb=57344",
        ),
        ({"wired_limit_mb": 512 * 1024 - 100}, "sysctl iogpu.wired_limit_mb=491520"),
        ({"gpu_memory": 480 * GIB, "system_version": "14.6"}, "macOS 15 or newer"),
        ({"wired_limit_mb": None}, None),
        ({"memory": 8 * GIB, "gpu_memory": 5 * GIB}, None),
    ],
)
def test_macs(changes: dict, expected: str | None):
    findings = machine_findings(replace(STUDIO, **changes))
    assert not any(finding.stops for finding in findings)
    if expected is None:
        assert findings == []
    else:
        (finding,) = findings
        assert expected in finding.remedy


def test_intel_python_on_a_mac_stops_k3():
    findings = machine_findings(replace(STUDIO, processor="x86_64", gpu_memory=None))
    assert [finding.stops for finding in findings] == [True]
    assert not Report({}, (), STUDIO, tuple(findings)).healthy


def test_linux():
    server = replace(STUDIO, system="Linux", wired_limit_mb=None, gpu_memory=None)
    assert machine_findings(server) == []
    (finding,) = machine_findings(replace(server, gpu=False))
    assert "CPU" in finding.what
    assert not finding.stops


def test_reading_this_machine():
    machine = read_machine()
    assert machine.memory > GIB
    assert machine.gpu == ("(gpu)" in machine.device)
    assert (machine.wired_limit_mb is None) == (machine.system != "macOS")


@pytest.mark.parametrize(
    ("script", "limit"),
    [("echo 458752", 458752), ("echo 0", 0), ("exit 1", None), ("echo what", None)],
)
def test_reading_the_wired_limit(script: str, limit: int | None, tmp_path: Path):
    program = tmp_path / "sysctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert read_wired_limit(command=(str(program),)) == limit


def test_no_sysctl_at_all(tmp_path: Path):
    assert hardware.read_wired_limit(command=(str(tmp_path / "none"),)) is None
