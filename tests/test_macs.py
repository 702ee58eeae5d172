"""Predicted speed on Macs: arithmetic on published figures, one of them met."""

import json

import pytest

from kimi_k3.errors import KimiK3Error
from kimi_k3.machine.hardware import Machine, memory_for_gpu
from kimi_k3.machine.macs import GIB, MACS, PUBLISHED, REACHED, Mac, predict

LARGEST = Mac("M3 Ultra", 512, 819e9)


def test_the_published_build_is_met():
    """450 GB, 25.8 + 60.8 GB a token: 9.5 tokens/s at most, 5.51 measured."""
    (found,) = predict(450_000_000_000, 86.6e9, [LARGEST])
    assert found.ceiling == pytest.approx(9.46, abs=0.005)
    assert found.expected == pytest.approx(PUBLISHED["tokens_per_second"], rel=0.005)
    assert REACHED == 0.58
    assert found.fits
    assert found.arithmetic == ("819 GB/s / 86.60 GB = 9.46 tokens/s; × 0.58 = 5.49")


def test_memory_is_what_macos_leaves():
    assert memory_for_gpu(64 * GIB) == 56 * GIB
    assert memory_for_gpu(512 * GIB) == 480 * GIB
    assert LARGEST.usable == 480 * GIB
    assert Mac("M3 Ultra", 512, 819e9, count=2).usable == 960 * GIB


@pytest.mark.parametrize("excess", [0, 1])
def test_fits_to_the_byte(excess: int):
    (found,) = predict(480 * GIB + excess, 1e9, [LARGEST])
    assert found.fits == (not excess)
    assert found.room == -excess
    assert found.to_dict()["fits"] == found.fits


def test_several_machines_read_their_parts():
    one, two, four = predict(
        10**12, 50e9, [Mac("M3 Ultra", 512, 819e9, count=n) for n in (1, 2, 4)]
    )
    assert (two.ceiling, four.ceiling) == (2 * one.ceiling, 4 * one.ceiling)
    assert [one.fits, two.fits, four.fits] == [False, True, True]
    assert two.machine.label == "2 × M3 Ultra, 512 GB"
    assert two.arithmetic.startswith("2 × 819 GB/s / 50.00 GB")


def test_the_table_is_of_single_names_and_plain():
    labels = [mac.label for mac in MACS]
    assert len(set(labels)) == len(labels) == 8
    found = [p.to_dict() for p in predict(10**11, 10**10)]
    assert [p["name"] for p in found] == labels
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("read", [0, -1, 2e9, float("nan")])
def test_a_token_reads_some_of_the_bytes(read: float):
    with pytest.raises(KimiK3Error, match="a token is said to read"):
        predict(10**9, read)


@pytest.mark.parametrize("change", [{"memory": 0}, {"bandwidth": 0.0}, {"count": 0}])
def test_no_such_machine(change: dict):
    with pytest.raises(KimiK3Error, match=f"{next(iter(change))} is 0"):
        Mac(**{"name": "M0", "memory": 1, "bandwidth": 1.0} | change)


def test_doctor_gives_the_same_memory():
    """The command that doctor prints leaves the GPU what a prediction counts on."""
    from kimi_k3.machine.doctor import wired_limit_findings

    memory = 512 * GIB
    machine = Machine(
        "macOS", "26.2", "arm64", "M3 Ultra", True, memory, 384 * GIB, wired_limit_mb=0
    )
    (finding,) = wired_limit_findings(machine)
    assert f"iogpu.wired_limit_mb={LARGEST.usable // 2**20}" in str(finding)
