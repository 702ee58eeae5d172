"""Down projection and weighted sum: kernel, reference, float64 and MLX's own values."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, assert_same
from expert_matrices import (
    WIDTHS,
    bank_pair,
    is_wrong,
    neighbours,
    oracle_down_combine,
    oracle_gate_up,
    routed_slots,
)
from simulated import run_kernels, same_in_every_order, under_sanitizers

from kimi_k3.kernels import expert_down_combine as module
from kimi_k3.kernels import expert_gate_up as gate_up_module
from kimi_k3.kernels._quantized_rows import BankedMatrix, ExpertMatrix
from kimi_k3.kernels._tuned import Tiling
from kimi_k3.kernels.expert_down_combine import (
    expert_down_combine,
    expert_down_combine_reference,
)
from kimi_k3.kernels.expert_gate_up import expert_gate_up, expert_gate_up_reference

NAME = "kimi_k3_expert_down_combine"

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
    width: int = 33,
    inner: int = 128,
    dtype: mx.Dtype = mx.float32,
) -> dict[str, Any]:
    ids, weights = routed_slots(tokens, slots, experts)
    shape, key = (tokens, slots, inner), mx.random.key(tokens)
    return {
        "hidden": mx.random.normal(shape, key=key),
        "ids": ids,
        "weights": weights,
        "down": bank_pair(high, low, split, experts, width, inner),
        "dtype": dtype,
    }


def truth(given: dict[str, Any]) -> np.ndarray:
    return oracle_down_combine(*(v for k, v in given.items() if k != "dtype"))


def check(given: dict[str, Any], rel: float = EXACT, **more: Any) -> None:
    with run_kernels() as launches:
        got = expert_down_combine(**given, **more)
    assert launches.count(NAME) == 1
    want = truth(given)
    assert_close(got, want, rel=rel, where="kernel", dtype=given["dtype"])
    reference = expert_down_combine_reference(**given)
    assert_close(reference, want, rel=rel, where="reference", dtype=given["dtype"])


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

    @pytest.mark.parametrize("slots", [1, 3, 16])
    def test_slots(self, slots: int) -> None:
        check(case(slots=slots))

    @pytest.mark.parametrize(
        ("width", "inner"), [(9, 8), (33, 63), (63, 33), (1000, 9), (1, 1000)]
    )
    def test_odd_sizes(self, width: int, inner: int) -> None:
        check(case("f32", "bf16", width=width, inner=inner, tokens=9))

    @pytest.mark.parametrize("width", [8, 63, 1000])
    def test_ragged_rows_of_quantised_experts(self, width: int) -> None:
        check(case(width=width, inner=544 if width < 1000 else 64, low="affine3-32"))

    @pytest.mark.parametrize(
        ("dtype", "rel"), [(mx.float16, 1e-3), (mx.bfloat16, 2**-8)]
    )
    def test_half_results(self, dtype: mx.Dtype, rel: float) -> None:
        check(case(dtype=dtype), rel)

    @pytest.mark.parametrize("tiling", [(1, 1), (2, 4), (8, 2), (3, 3), (16, 16)])
    def test_any_tiling(self, tiling: tuple[int, int]) -> None:
        check(case(), tiling=Tiling(*tiling))

    def test_order_and_garbage_change_nothing(self) -> None:
        given = case(tokens=5)
        got = same_in_every_order(lambda: expert_down_combine(**given))
        assert_close(got, truth(given), rel=EXACT)

    @pytest.mark.parametrize("low", ["affine2-32", "affine3-32"])
    def test_sanitizers(self, low: str) -> None:
        given = case(low=low, tokens=2, slots=2, split=1, experts=2, inner=32, width=9)
        under_sanitizers(lambda: expert_down_combine(**given))

    def test_a_slot_without_weight_reads_nothing(self) -> None:
        given = case(tokens=2)
        given["weights"][0, 1] = 0
        want = truth(given)
        given["ids"][0, 1] = 2**30
        given["hidden"][0, 1] = float("nan")
        with run_kernels(sanitizer="address"):
            got = expert_down_combine(**given)
        assert_close(got, want, rel=EXACT)

    def test_no_slot_has_weight(self) -> None:
        given = case(tokens=2)
        with run_kernels():
            got = expert_down_combine(**{**given, "weights": mx.zeros((2, 4))})
        assert not got.any()

    @pytest.mark.parametrize("name", [n for n in WIDTHS if not n.endswith("-128")])
    def test_stored_values_bit_by_bit(self, name: str) -> None:
        """Unit vectors as hidden values give back every number that MLX stores."""
        matrix = extreme_matrix(name, rows=9, columns=64)
        given = {
            "hidden": mx.eye(64)[:, None],
            "ids": mx.zeros((64, 1), mx.uint32),
            "weights": mx.ones((64, 1)),
            "down": BankedMatrix(matrix, None, 1),
            "dtype": mx.float32,
        }
        with run_kernels() as launches:
            got = expert_down_combine(**given)
        assert launches.count(NAME) == 1
        stored = mx.dequantize(
            matrix.weight,
            matrix.scales,  # pyright: ignore[reportArgumentType]
            matrix.biases,
            group_size=matrix.group_size,
            bits=matrix.bits,
            mode=matrix.mode,
            dtype=mx.float32,
        )[0]
        assert_same(got.T + 0.0, stored + 0.0, where=name)

    @pytest.mark.parametrize(
        ("place", "right", "wrong"),
        [
            ("_SOURCE", "expert < split", "expert <= split"),
            ("_SOURCE", "ulong(expert - split)", "ulong(expert)"),
            ("_SOURCE", "total += partial[s * ROWS + r]", "total = partial[r]"),
            ("_SOURCE", "weight * sums[r]", "sums[r]"),
            ("_SOURCE", "partial[simdgroup * ROWS + r]", "partial[r]"),
            ("HEADER", "scales[at / GROUP]", "scales[at / K * K / GROUP]"),
            ("HEADER", "K % KIMI_K3_CHUNK == 0 || ", "true || "),
        ],
    )
    def test_planted_faults_are_seen(
        self, monkeypatch: pytest.MonkeyPatch, place: str, right: str, wrong: str
    ) -> None:
        source = getattr(module, place)
        assert right in source
        monkeypatch.setattr(module, place, source.replace(right, wrong))
        ragged = case("f32", "f32", inner=33, width=9)
        given = ragged if "true" in wrong else case()
        assert is_wrong(lambda: expert_down_combine(**given), truth(given))

    def test_a_missing_barrier_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
        assert barrier in module._SOURCE
        source = module._SOURCE.replace(barrier, "")
        monkeypatch.setattr(module, "_SOURCE", source)
        given = case()
        with pytest.raises(AssertionError, match="differs with"):
            same_in_every_order(lambda: expert_down_combine(**given))


def extreme_matrix(name: str, rows: int, columns: int) -> ExpertMatrix:
    """One expert of random codes, its scale bytes from the least to the largest."""
    mode, bits, group = WIDTHS[name]
    rng = np.random.default_rng(5)
    words = rng.integers(0, 2**32, (1, rows, columns * bits // 32), np.uint32)
    shape = (1, rows, columns // group)
    if mode == "affine":
        scales, biases = (
            mx.array(rng.standard_normal(shape, np.float32)) for _ in range(2)
        )
        return ExpertMatrix(mx.array(words), scales, biases, mode, bits, group)
    count = rows * (columns // group)
    # The largest: 2^100 times 448 is finite; 0x7e is 448, the largest E4M3.
    top = 126 if mode == "nvfp4" else 227
    scales = np.linspace(0, top, count).round().astype(np.uint8).reshape(shape)
    codes = words.view(np.uint8)
    if mode == "mxfp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    return ExpertMatrix(mx.array(words), mx.array(scales), None, mode, bits, group)


@pytest.mark.usefixtures("simulated_kernels")
def test_both_kernels_at_the_size_of_kimi_k3() -> None:
    """A token's 16 experts, 3584 → 3072 → 3584; only those touched are stored."""
    rng = np.random.default_rng(0)
    first = gate_up_module.example(rng)
    second = module.example(rng)
    with run_kernels() as launches:
        hidden = expert_gate_up(**first)
        slots = {"ids": first["ids"], "weights": first["weights"]}
        second |= {"hidden": hidden, **slots, "dtype": mx.float32}
        got = expert_down_combine(**second)
    assert launches.names == {"kimi_k3_expert_gate_up", NAME}
    assert second["down"].high.weight.shape == (8, 3584, 3072 // 8)
    reference = expert_gate_up_reference(**first)
    assert_close(hidden, reference, rel=EXACT, where="hidden")
    reference = expert_down_combine_reference(**second)
    assert_close(got, reference, rel=EXACT, where="combined")
    for name in ("gate", "up"):
        first[name] = some_rows(first[name])
    second["down"] = some_rows(second["down"])
    where = "rows in float64"
    assert_close(
        hidden[..., ::ROW_STEP], oracle_gate_up(**first), rel=EXACT, where=where
    )
    assert_close(got[..., ::ROW_STEP], truth(second), rel=EXACT, where=where)


#: Of the rows of a large matrix, every so many are looked at in float64.
ROW_STEP = 61


def some_rows(banked: BankedMatrix) -> BankedMatrix:
    """Every ROW_STEP-th row of all experts."""

    def taken(matrix: ExpertMatrix | None) -> ExpertMatrix | None:
        if matrix is None:
            return None
        arrays = {
            name: array[:, ::ROW_STEP]
            for name in ("weight", "scales", "biases")
            if (array := getattr(matrix, name)) is not None
        }
        return replace(matrix, **arrays)

    return BankedMatrix(taken(banked.high), taken(banked.low), banked.split)


def test_small_buffers_take_the_reference() -> None:
    """MLX passes arrays of fewer than 8 values in another address space."""
    given = case("f32", "f32", split=1, experts=2, inner=7, width=1)
    with run_kernels() as launches:
        got = expert_down_combine(**given)
    assert not launches.records
    assert_close(got, truth(given), rel=EXACT)
