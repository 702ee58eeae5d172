"""The quantiser against ``mx.quantize``, and against the best there is in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_quantizer as oracle
import pytest
from closeness import assert_close, to_numpy

from kimi_k3.conversion import group_fit, quantizer
from kimi_k3.conversion.code_packing import pack_codes
from kimi_k3.conversion.quantizer import BITS, GROUPS, quantize, squared_error
from kimi_k3.errors import ConversionError

#: What float32 sums may be off by when two errors are all but equal.
FLOAT32 = 1 + 1e-6


def weights(kind: str, rows: int = 16, columns: int = 256, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    values = {
        "normal": rng.standard_normal((rows, columns)),
        "student": rng.standard_t(5, (rows, columns)),
        "zero": np.zeros((rows, columns)),
        "constant": np.full((rows, columns), -0.75),
        "uneven-constant": np.full((rows, columns), 0.1),
        "two-values": rng.choice([-1.0, 1.0], (rows, columns)),
        "one-outlier": np.where(rng.random((rows, columns)) < 0.01, 1e6, 1.0),
        "offset": 5 + 1e-3 * rng.standard_normal((rows, columns)),
        "tiny": 1e-30 * rng.standard_normal((rows, columns)),
        "subnormal": 1e-40 * rng.standard_normal((rows, columns)),
        "huge": 1e17 * rng.standard_normal((rows, columns)),
        "spikes": np.eye(rows, columns),
    }[kind]
    return mx.array(values.astype(np.float32))


def as_mxfp4(array: mx.array) -> mx.array:
    """``array`` rounded to what the source's experts can hold, in bfloat16."""
    options: Any = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return mx.dequantize(*mx.quantize(array, **options), **options)


def importance_of(columns: int, seed: int = 1) -> mx.array:
    values = np.exp(np.random.default_rng(seed).standard_normal(columns))
    return mx.array(values.astype(np.float32))


def errors(
    array: mx.array, quantized: Any, bits: int, importance: mx.array | None = None
) -> np.ndarray:
    stored = oracle.decoded(*map(to_numpy, quantized), bits=bits)
    h = None if importance is None else to_numpy(importance)
    return oracle.group_errors(to_numpy(array), stored, h)


def theirs(array: mx.array, bits: int, group_size: int) -> Any:
    return mx.quantize(array.astype(mx.bfloat16), group_size=group_size, bits=bits)


@pytest.mark.parametrize("bits", BITS)
def test_packed_as_mlx_packs(bits: int):
    array = weights("normal", 4)
    packed, scales, biases = mx.quantize(array, group_size=64, bits=bits)
    codes = oracle.unpacked(to_numpy(packed), bits)
    assert codes.max() == 2**bits - 1
    assert mx.array_equal(pack_codes(mx.array(codes), bits), packed)
    assert_close(
        mx.dequantize(packed, scales, biases, group_size=64, bits=bits).reshape(
            4, 4, 64
        ),
        oracle.decoded(*map(to_numpy, (packed, scales, biases)), bits=bits),
        rel=1e-6,
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_no_group_is_worse_than_theirs(bits: int, group_size: int, weighted: bool):
    for array in (as_mxfp4(weights("student")), weights("normal")):
        importance = importance_of(256) if weighted else None
        found = quantize(array, bits=bits, group_size=group_size, importance=importance)
        reference = theirs(array, bits, group_size)
        for mine, other in zip(found, reference, strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        ours = errors(array, found, bits, importance)
        others = errors(array, reference, bits, importance)
        assert (ours <= others * FLOAT32).all()
        assert ours.sum() < 0.9 * others.sum()


ODD = ["zero", "constant", "uneven-constant", "two-values", "offset", "tiny"]
ODD += ["subnormal", "spikes", "one-outlier", "huge"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in ODD for dtype in (mx.float32, mx.bfloat16)]
    + [(kind, mx.float16) for kind in ODD[:-2]],
    ids=str,
)
def test_odd_weights(kind: str, dtype: mx.Dtype):
    array = weights(kind, 4).astype(dtype)
    for bits in (2, 4, 8):
        ours = errors(array, quantize(array, bits=bits, group_size=64), bits)
        others = errors(array, theirs(array, bits, 64), bits)
        assert np.isfinite(ours).all()
        if kind in ("zero", "constant"):
            assert (ours == 0).all()
        # Below what bfloat16 holds, a scale is 0 or far off in both.
        smallest = 64 * float(np.finfo(np.float32).tiny) ** 2
        assert (ours <= others * FLOAT32 + smallest).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("kind", ["normal", "student"])
def test_near_the_best_that_two_bits_can_do(kind: str, weighted: bool):
    array, importance = as_mxfp4(weights(kind, 4)), importance_of(256)
    h = to_numpy(importance) if weighted else np.ones(256)
    groups = to_numpy(array).reshape(-1, 64)
    best = sum(
        oracle.least_error(w, h.reshape(-1, 64)[i % 4], 2) for i, w in enumerate(groups)
    )
    given = importance if weighted else None
    found = quantize(array, bits=2, group_size=64, importance=given)
    ours = errors(array, found, 2, given).sum()
    assert best * (1 - 1e-9) <= ours < 1.04 * best
    assert errors(array, theirs(array, 2, 64), 2, given).sum() > 1.4 * best


@pytest.mark.parametrize("bits", [3, 4])
def test_near_what_a_long_search_finds(bits: int):
    array, importance = weights("normal", 2), importance_of(256)
    h = to_numpy(importance).reshape(-1, 64)
    best = sum(
        oracle.searched_error(w, h[i % 4], bits)
        for i, w in enumerate(to_numpy(array).reshape(-1, 64))
    )
    found = quantize(array, bits=bits, group_size=64, importance=importance)
    assert errors(array, found, bits, importance).sum() < 1.06 * best


def test_the_oracles_agree():
    """On 8 weights all cuts are few; a search finds the same."""
    w = to_numpy(weights("normal", 1, 8))[0]
    for h in (np.ones(8), to_numpy(importance_of(8))):
        for bits in (2, 3):
            exact = oracle.least_error(w, h, bits)
            assert exact <= oracle.searched_error(w, h, bits) + 1e-12
            assert oracle.searched_error(w, h, bits) < 1.2 * exact + 1e-9
    assert oracle.least_error(np.array([0.0, 1.0, 2.0, 3.0]), np.ones(4), 2) < 1e-12


def test_importance_decides():
    array, importance = weights("normal"), importance_of(256)
    with_it = quantize(array, bits=2, group_size=64, importance=importance)
    without = quantize(array, bits=2, group_size=64)
    assert (
        errors(array, with_it, 2, importance).sum()
        < 0.95 * errors(array, without, 2, importance).sum()
    )
    assert errors(array, without, 2).sum() < 0.95 * errors(array, with_it, 2).sum()


def same(one: Any, other: Any) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


def test_importance_of_nothing_is_none():
    array = weights("normal")
    without = quantize(array, bits=3, group_size=32)
    assert same(
        quantize(array, bits=3, group_size=32, importance=mx.zeros(256)), without
    )
    assert same(
        quantize(array, bits=3, group_size=32, importance=mx.full(256, 8.0)), without
    )
    half = mx.where(mx.arange(256) < 128, importance_of(256), 0)
    found = quantize(array, bits=3, group_size=32, importance=half)
    assert all(
        mx.array_equal(a[:, -1], b[:, -1]) for a, b in zip(found, without, strict=True)
    )
    assert not same(found, without)


@pytest.mark.parametrize("per_matrix", [False, True], ids=["shared", "each"])
def test_matrices_of_a_stack_are_alone(per_matrix: bool):
    array = mx.stack([weights("student", 4, 128, seed=i) for i in range(6)])
    array = array.reshape(2, 3, 4, 128)
    importance = importance_of(2 * 3 * 128).reshape(2, 3, 128)
    if not per_matrix:
        importance = importance[0, 0]
    found = quantize(array, bits=2, group_size=64, importance=importance)
    assert [part.shape for part in found] == [(2, 3, 4, 8), (2, 3, 4, 2), (2, 3, 4, 2)]
    for i in range(2):
        for j in range(3):
            h = importance[i, j] if per_matrix else importance
            alone = quantize(array[i, j], bits=2, group_size=64, importance=h)
            assert same([part[i, j] for part in found], alone)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    array, importance = weights("student", 7), importance_of(256)
    options: Any = {"bits": 2, "group_size": 64, "importance": importance}
    whole = quantize(array, **options)
    error = squared_error(array, whole, **options)
    monkeypatch.setattr(quantizer, "_CPU_CHUNK", 512)
    assert same(quantize(array, **options), whole)
    assert squared_error(array, whole, **options) == error


def test_read_by_mlx():
    array, x = weights("normal", 32), weights("normal", 3, seed=5)
    codes, scales, biases = quantize(array, bits=4, group_size=64)
    stored = oracle.decoded(*map(to_numpy, (codes, scales, biases)), bits=4)
    got = mx.quantized_matmul(
        x,
        codes,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=64,
        bits=4,
    )
    assert_close(got, to_numpy(x).astype(float) @ stored.reshape(32, 256).T, rel=1e-5)


def test_squared_error_is_what_is_stored():
    array, importance = weights("normal").reshape(2, 8, 256), importance_of(512)
    h = importance.reshape(2, 256)
    found = quantize(array, bits=3, group_size=64, importance=h)
    error, energy = squared_error(array, found, bits=3, group_size=64, importance=h)
    want = [
        errors(array[i], [part[i] for part in found], 3, h[i]).sum() for i in range(2)
    ]
    assert error == pytest.approx(sum(want), rel=1e-5)
    values = to_numpy(array).astype(float)
    total = (values**2 * to_numpy(h).astype(float)[:, None]).sum()
    assert energy == pytest.approx(total, rel=1e-6)
    assert squared_error(array, found, bits=3, group_size=64)[0] != error


def test_the_second_best_start_goes_on():
    """Per group the worse of two fits is kept apart; a NaN is always the worse."""
    one, two = (
        group_fit.Fit(mx.array(s), mx.array(s), mx.array(e))
        for s, e in (
            ([1.0, 2.0, 3.0], [5.0, 1.0, 2.0]),
            ([4.0, 5.0, 6.0], [3.0, 3, np.nan]),
        )
    )
    better, worse = one.sorted_with(two)
    assert better.scale.tolist() == [4, 2, 3]
    assert worse.scale.tolist() == [1, 5, 6]


@pytest.mark.parametrize(
    ("bad", "options", "words"),
    [
        (mx.full((2, 64), float("nan")), {}, "hold NaN, infinity"),
        (mx.full((2, 64), -float("inf")), {}, "hold NaN, infinity"),
        (mx.full((2, 64), -float("inf"), mx.float16), {}, "hold NaN, infinity"),
        (mx.full((2, 64), 1e37), {}, "above 2"),
        (mx.ones((2, 96)), {}, r"shape \(2, 96\)"),
        (mx.ones(64), {}, r"shape \(64,\)"),
        (mx.ones((0, 64)), {}, r"shape \(0, 64\)"),
        (mx.ones((2, 64), mx.int32), {}, "int32"),
        (mx.ones((2, 64)), {"bits": 7}, "no affine format has 7 bits"),
        (mx.ones((2, 64)), {"group_size": 16}, "groups of 16"),
        (mx.ones((2, 64)), {"importance": mx.ones(32)}, r"shape \(32,\)"),
        (mx.ones((2, 64)), {"importance": mx.ones((2, 64))}, r"shape \(2, 64\)"),
        (mx.ones((2, 64)), {"importance": -mx.ones(64)}, "importance holds"),
        (mx.ones((2, 64)), {"importance": mx.full(64, np.nan)}, "importance holds"),
    ],
)
def test_refused(bad: mx.array, options: dict[str, Any], words: str):
    with pytest.raises(ConversionError, match=words):
        quantize(bad, **{"bits": 2, "group_size": 64, **options})
