"""Gate, up and SiTU of routed pairs: kernel, reference and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close
from expert_matrices import (
    DENSE,
    WIDTHS,
    bank_pair,
    is_wrong,
    make_matrix,
    neighbours,
    oracle_gate_up,
    routed_slots,
)
from simulated import run_kernels, same_in_every_order, under_sanitizers

from kimi_k3.kernels import _quantized_rows
from kimi_k3.kernels import expert_gate_up as module
from kimi_k3.kernels._quantized_rows import BankedMatrix
from kimi_k3.kernels._tuned import Tiling
from kimi_k3.kernels.expert_gate_up import expert_gate_up, expert_gate_up_reference

NAME = "kimi_k3_expert_gate_up"

#: Float32 against float64.
EXACT = 1e-5


def case(
    high: str = "mxfp4",
    low: str = "affine2-64",
    *,
    tokens: int = 3,
    slots: int = 4,
    split: int = 3,
    experts: int = 7,
    width: int = 128,
    inner: int = 33,
    dtype: mx.Dtype = mx.float32,
) -> dict[str, Any]:
    ids, weights = routed_slots(tokens, slots, experts)
    x = 3 * mx.random.normal((tokens, width), key=mx.random.key(tokens))
    return {
        "x": x.astype(dtype),
        "ids": ids,
        "weights": weights,
        "gate": bank_pair(high, low, split, experts, inner, width),
        "up": bank_pair(high, low, split, experts, inner, width, seed=9),
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def check(given: dict[str, Any], **more: Any) -> None:
    with run_kernels() as launches:
        got = expert_gate_up(**given, **more)
    assert launches.count(NAME) == 1
    want = oracle_gate_up(**given)
    assert_close(got, want, rel=EXACT, where="kernel", dtype=mx.float32)
    if given["x"].dtype == mx.float32:
        reference = expert_gate_up_reference(**given)
        assert_close(reference, want, rel=EXACT, where="reference")


@pytest.mark.usefixtures("simulated_kernels")
class TestKernel:
    @pytest.mark.parametrize(("high", "low"), neighbours())
    def test_every_width(self, high: str, low: str) -> None:
        check(case(high, low))

    @pytest.mark.parametrize("tokens", [1, 2, 33, 65])
    def test_tokens(self, tokens: int) -> None:
        check(case(tokens=tokens))

    @pytest.mark.parametrize("split", [0, 1, 6, 7])
    def test_any_split(self, split: int) -> None:
        check(case(split=split))

    @pytest.mark.parametrize(
        ("width", "inner"), [(1, 1), (33, 63), (63, 33), (1000, 5), (1, 1000)]
    )
    def test_odd_sizes(self, width: int, inner: int) -> None:
        sizes: dict[str, Any] = {"width": width, "inner": inner, "tokens": 9}
        check(case("f32", "bf16", **sizes, experts=18, split=9))

    @pytest.mark.parametrize("inner", [1, 63, 1000])
    def test_ragged_rows_of_quantised_experts(self, inner: int) -> None:
        check(case(inner=inner, width=544 if inner < 1000 else 64, low="affine3-32"))

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_half_activations(self, dtype: mx.Dtype) -> None:
        check(case(dtype=dtype))

    @pytest.mark.parametrize("tiling", [(1, 1), (2, 4), (8, 2), (3, 3)])
    def test_any_tiling(self, tiling: tuple[int, int]) -> None:
        check(case(), tiling=Tiling(*tiling))

    def test_without_linear_beta(self) -> None:
        check({**case(), "linear_beta": None})

    def test_scales_of_float32(self) -> None:
        given = case("affine4-32", "mxfp4")
        for name in ("gate", "up"):
            high = make_matrix("affine4-32", 3, 33, 128, dtype=mx.float32)
            given[name] = BankedMatrix(high, given[name].low, 3)
        check(given)

    def test_order_and_garbage_change_nothing(self) -> None:
        given = case(tokens=5)
        want = oracle_gate_up(**given)
        got = same_in_every_order(lambda: expert_gate_up(**given))
        assert_close(got, want, rel=EXACT)

    @pytest.mark.parametrize("low", ["affine2-32", "affine3-32"])
    def test_sanitizers(self, low: str) -> None:
        given = case(low=low, tokens=2, slots=2, split=1, experts=2, width=32, inner=9)
        under_sanitizers(lambda: expert_gate_up(**given))

    def test_a_slot_without_weight_reads_nothing(self) -> None:
        given = case(tokens=2)
        given["weights"][0, 1] = 0
        want = expert_gate_up_reference(**given)
        given["ids"][0, 1] = 2**30
        with run_kernels(sanitizer="address"):
            got = expert_gate_up(**given)
        assert not got[0, 1].any()
        assert_close(got, want, rel=EXACT)

    @pytest.mark.parametrize(
        ("place", "right", "wrong"),
        [
            ("_SOURCE", "expert < split", "expert <= split"),
            ("_SOURCE", "ulong(expert - split)", "ulong(expert)"),
            ("_SOURCE", "slot / TOP_K", "slot"),
            ("HEADER", "scales[at / GROUP]", "scales[at / K * K / GROUP]"),
            ("HEADER", "row0 + r, rows - 1", "row0, rows - 1"),
            ("HEADER", "KIMI_K3_CHUNK; start < uint(K)", "KIMI_K3_CHUNK; start < 64"),
        ],
    )
    def test_planted_faults_are_seen(
        self, monkeypatch: pytest.MonkeyPatch, place: str, right: str, wrong: str
    ) -> None:
        source = getattr(module, place)
        assert right in source
        monkeypatch.setattr(module, place, source.replace(right, wrong))
        given = case()
        # Room behind the low bank, so that a wrong bank is a wrong value here.
        given["gate"], given["up"] = (
            BankedMatrix(banked.high, make_matrix("affine2-64", 9, 33, 128, seed=3), 3)
            for banked in (given["gate"], given["up"])
        )
        want = oracle_gate_up(**given)
        assert is_wrong(lambda: expert_gate_up(**given), want)


def test_unknown_storage_takes_the_reference() -> None:
    given = case()
    wide = make_matrix("f32", 3, 33, 128)
    mixed = BankedMatrix(wide, given["up"].low, 3)
    with run_kernels() as launches:
        got = expert_gate_up(**{**given, "up": mixed})
    assert not launches.records
    assert_close(got, oracle_gate_up(**{**given, "up": mixed}), rel=EXACT)


def test_every_width_of_mlx_has_a_reader() -> None:
    for name in (*WIDTHS, *DENSE):
        assert make_matrix(name, 2, 8, 128).readable(), name
    for mode, (bits, groups) in _quantized_rows.WIDTHS.items():
        for b, group in ((b, g) for b in bits for g in groups):
            assert (mode, b, group) in WIDTHS.values()


def test_without_a_gpu_the_reference_answers() -> None:
    given = case(tokens=1)
    assert np.array_equal(expert_gate_up(**given), expert_gate_up_reference(**given))
