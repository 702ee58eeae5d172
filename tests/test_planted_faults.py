"""Faults planted in the package's own kernels are caught: the tests of the tests.

Each fault changes a line or two of a kernel's text. It must be reported by a sanitizer,
or move the result away from the reference's by far more than the tests of that kernel
allow. Unchanged kernels pass the same checks.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from expert_matrices import bank_pair
from metalsim import MetalSimError
from simulated import run_kernels

from kimi_k3.kernels.attention_residual_mix import inverse_rms
from kimi_k3.machine.kernels_check import compare

pytestmark = pytest.mark.usefixtures("simulator")

RIGHT, WRONG = 1e-5, 1e-2

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def normal(*shape: int, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal(shape, np.float32))


#: Six experts, three in each bank, among them the last of both; 63 is no multiple of 4.
SLOTS: dict[str, Any] = {
    "ids": mx.array([[0, 2, 3, 5]]),
    "weights": mx.array([[0.4, 0.3, 0.2, 0.1]]),
}


def gate_up() -> dict[str, Any]:
    banks = [bank_pair("mxfp4", "affine2-64", 3, 6, 63, 64, seed=s) for s in (1, 2)]
    named = {"gate": banks[0], "up": banks[1], "beta": 4.0, "linear_beta": 25.0}
    return {"x": 3 * normal(1, 64), **SLOTS, **named}


def down() -> dict[str, Any]:
    bank = bank_pair("mxfp4", "affine2-64", 3, 6, 63, 64, seed=3)
    return {"hidden": normal(1, 4, 64), **SLOTS, "down": bank, "dtype": mx.float32}


def mix() -> dict[str, Any]:
    return {
        "blocks": normal(2, 1, 1, 256),
        "blocks_inverse_rms": inverse_rms(normal(2, 1, 1, 256), 1e-5),
        "prefix": normal(1, 1, 256, seed=1),
        "norm_weight": normal(256, seed=2),
        "projection": normal(256, seed=3) / 16,
        "eps": 1e-5,
    }


def logits() -> dict[str, Any]:
    return {"x": normal(1, 1, 64), "weight": normal(33, 64, seed=1)}


def choice() -> dict[str, Any]:
    return {
        "logits": normal(1, 2, 33),
        "correction_bias": normal(33, seed=1),
        "top_k": 4,
        "groups": 1,
        "top_groups": 1,
        "renormalize": True,
        "scale": 1.0,
    }


def decode() -> dict[str, Any]:
    H, K, T, width = 2, 32, 3, 4
    return {
        "qkv": normal(1, T, 3 * H * K),
        "gate": normal(1, T, H * K, seed=1),
        "beta": normal(1, T, H, seed=2),
        "output_gate": normal(1, T, H * K, seed=3),
        "conv_state": normal(1, width - 1, 3 * H * K, seed=4),
        "state": normal(1, H, K, K, seed=5),
        "conv_weight": normal(3 * H * K, width, 1, seed=6),
        "A_log": normal(H, seed=7),
        "dt_bias": normal(H * K, seed=8),
        "norm_weight": normal(K, seed=9),
        "lower_bound": -5.0,
        "norm_eps": 1e-5,
    }


def recurrence() -> dict[str, Any]:
    B, T, H, K = 1, 3, 2, 32
    return {
        "query": 0.1 * normal(B, T, H, K),
        "key": 0.1 * normal(B, T, H, K, seed=1),
        "value": normal(B, T, H, K, seed=2),
        "log_decay": -mx.abs(normal(B, T, H, K, seed=3)),
        "beta": mx.sigmoid(normal(B, T, H, seed=4)),
        "state": normal(B, H, K, K, seed=5),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "expert_gate_up": gate_up,
    "expert_down_combine": down,
    "attention_residual_mix": mix,
    "router_logits": logits,
    "select_experts": choice,
    "kda_decode": decode,
    "kda_recurrence": recurrence,
}


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
