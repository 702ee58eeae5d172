"""Faults planted in the package's own kernels are caught: the tests of the tests.

Each fault changes a line or two of a kernel's text. It must be reported by a sanitizer,
or move the result away from the reference's by far more than the tests of that kernel
allow. Unchanged kernels pass the same checks.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
from kernel_cases import CASES
from metalsim import MetalSimError
from simulated import run_kernels

from kimi_k3.machine.kernels_check import compare

pytestmark = pytest.mark.usefixtures("simulator")

RIGHT, WRONG = 1e-5, 1e-2

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in a kernel's text, at its place ``nth``, or everywhere.

    ``report`` is what ``sanitizer`` says; without one the numbers must be wrong.
    """

    kernel: str
    old: str
    new: str
    sanitizer: str | None = None
    report: str = ""
    nth: int | None = None


def races(kernel: str, nth: int) -> Fault:
    return Fault(kernel, BARRIER, "", "thread", "data race", nth)


OVERRUN = "heap-buffer-overflow"
UNINITIALISED = "use-of-uninitialized-value|uninitialised"

#: Each bank of SLOTS has three experts, so this reads nothing that is not there.
OTHER_BANK = "int(ids[slot]); expert += expert < split ? split : -split;"

FAULTS = {
    "missing barrier: down": races("expert_down_combine", 0),
    "missing barrier: mix": races("attention_residual_mix", 0),
    "missing barrier: its norm": races("attention_residual_mix", 1),
    "missing barrier: convolution": races("kda_decode", 0),
    "missing barrier: norms": races("kda_decode", 1),
    "missing barrier: outputs": races("kda_decode", 2),
    "overrun: rows written by gate and up": Fault(
        "expert_gate_up", "row0 + r < uint(INNER)", "true", "address", OVERRUN
    ),
    "overrun: rows read by gate and up": Fault(
        "expert_gate_up",
        "metal::min(row0 + r, rows - 1)",
        "(row0 + r)",
        "address",
        OVERRUN,
    ),
    "overrun: rows read by down": Fault(
        "expert_down_combine",
        "metal::min(row0 + r, rows - 1)",
        "(row0 + r)",
        "address",
        OVERRUN,
    ),
    "overrun: experts of the router": Fault(
        "router_logits", "&& first + row < E", "", "address", OVERRUN
    ),
    "overrun: experts to choose from": Fault(
        "select_experts", "if (e < E)", "if (true)", "address", OVERRUN
    ),
    "overrun: values of a token": Fault(
        "kda_recurrence",
        "at_token * V + row]",
        "at_token * V + row + 1]",
        "address",
        OVERRUN,
    ),
    "not written: a slot's hidden values": Fault(
        "expert_gate_up",
        "if (lane == 0 &&",
        "if (lane == 0 && r > 0 &&",
        "memory",
        "never written",
    ),
    "not set: the sums": Fault(
        "expert_down_combine", "totals[r] = 0.0f;", ";", "memory", UNINITIALISED
    ),
    "wrong bank: gate and up": Fault("expert_gate_up", "int(ids[slot]);", OTHER_BANK),
    "wrong bank: down": Fault("expert_down_combine", "int(ids[slot]);", OTHER_BANK),
    "wrong split: down": Fault(
        "expert_down_combine", "expert < split", "expert <= split", "address", OVERRUN
    ),
    "wrong expert: down": Fault("expert_down_combine", "expert - split", "0"),
    "stale scale: mxfp4": Fault(
        "expert_down_combine",
        "kimi_k3_e8m0(scales[at / GROUP])",
        "kimi_k3_e8m0(scales[0])",
    ),
    "stale scale: affine": Fault(
        "expert_gate_up", "float(scales[at / GROUP]) * sum", "float(scales[0]) * sum"
    ),
    "stale bias: affine": Fault(
        "expert_gate_up", "float(biases[at / GROUP])", "float(biases[0])"
    ),
    "stale weight of a slot": Fault(
        "expert_down_combine", "weights[slot]", "weights[token]"
    ),
    "wrong order: choice": Fault(
        "select_experts", "ranking[j] > best", "ranking[j] < best"
    ),
    "forgotten: decay": Fault("kda_recurrence", "memory[j] *= ", "memory[j] + "),
}


def texts_of(kernel: str) -> list[tuple[Any, str]]:
    """Where a kernel's text lies: its source and, if it has one, its header."""
    module = importlib.import_module(f"kimi_k3.kernels.{kernel}")
    return [(module, name) for name in ("_SOURCE", "HEADER") if hasattr(module, name)]


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = 0
    for module, name in texts_of(fault.kernel):
        parts = getattr(module, name).split(fault.old)
        planted += len(parts) - 1
        if fault.nth is None:
            text = fault.new.join(parts)
        else:
            head, tail = parts[: fault.nth + 1], parts[fault.nth + 1 :]
            text = fault.old.join(head) + fault.new + fault.old.join(tail)
            text = text if tail else fault.old.join(parts)
        monkeypatch.setattr(module, name, text)
    assert planted > (fault.nth or 0), f"{fault.old!r} is not in {fault.kernel}"


def run(kernel: str, sanitizer: str | None = None) -> float:
    """How far the kernel is from its reference."""
    module = importlib.import_module(f"kimi_k3.kernels.{kernel}")
    given = CASES[kernel]()
    want = getattr(module, f"{kernel}_reference")(**given)
    with run_kernels(sanitizer=sanitizer) as launches:
        got = getattr(module, kernel)(**given)
    assert launches.count(f"kimi_k3_{kernel}") == 1
    return compare(got, want)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    fault = FAULTS[name]
    plant(fault, monkeypatch)
    if fault.sanitizer:
        with pytest.raises(MetalSimError, match=fault.report):
            run(fault.kernel, fault.sanitizer)
    else:
        assert not run(fault.kernel) <= WRONG


@pytest.mark.parametrize("kernel", list(CASES))
def test_without_a_fault_the_same_case_is_right(kernel: str):
    assert run(kernel) <= RIGHT


def test_every_kernel_has_a_fault():
    assert {fault.kernel for fault in FAULTS.values()} == set(CASES)
