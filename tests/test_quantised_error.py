"""What the format of a quantised matrix explains, and what it does not."""

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3.build.quantised_error import QuantisedError, quantised_error
from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.conversion.quantizer import quantize

ROWS, COLUMNS = 24, 128


def weights(seed: int = 0) -> np.ndarray:
    """(24, 128): plain rows, quiet ones, and some that quantisers trip over."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    w[:13] *= 0.01
    w[13], w[14], w[15] = 0, 1.5, 100 + 0.3 * w[15]
    w[16, 1:], w[17] = 0, rng.choice([-1, 0, 1], COLUMNS)
    w[18] = rng.choice([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 2, 3, 6], COLUMNS)
    w[19], w[20] = w[19] * 1e-18, w[20] * 1e18
    w[21] = np.exp(4 * w[21])
    return w


def importances(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    one = np.zeros(COLUMNS)
    one[[5, 100]] = 1
    return {
        "even": np.ones(COLUMNS),
        "mixed": rng.random(COLUMNS),
        "wild": np.exp(8 * rng.standard_normal(COLUMNS)),
        "one channel of a group": one,
    }


def of_rows(
    packed: tuple[mx.array, ...], dense: mx.array, bits: int, group: int, weighed: bool
) -> list[QuantisedError]:
    """Each row as a matrix of its own."""
    stored = StoredFormat("affine", bits, group)
    return [
        quantised_error(
            [part[row : row + 1] for part in packed],
            dense[row : row + 1],
            stored,
            weighed=weighed,
        )
        for row in range(dense.shape[0])
    ]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_our_quantiser_is_explained(bits: int, group: int) -> None:
    """Whatever matters to it, its codes are the nearest and no group is empty."""
    dense = mx.array(weights()).astype(mx.bfloat16)
    for importance in importances().values():
        h = mx.array(importance.astype(np.float32))
        packed = quantize(dense, bits=bits, group_size=group, importance=h)
        for found in of_rows(packed, dense, bits, group, weighed=True):
            # Where nearly nothing matters the sum may be large, which is another rule.
            assert found.fault is None or found.fault.startswith("a relative"), found
    packed = quantize(dense, bits=bits, group_size=group)
    assert {f.fault for f in of_rows(packed, dense, bits, group, weighed=False)} == {
        None
    }


def damaged(damage: str) -> tuple[list[mx.array], mx.array]:
    """13 of 24 rows, the quiet ones, which are a thousandth of the square."""
    dense = mx.array(weights()[:, :64]).astype(mx.bfloat16)
    dense[13:] = mx.array(np.random.default_rng(1).standard_normal((11, 64)))
    packed = [
        np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32))
        for part in quantize(dense, bits=2, group_size=64)
    ]
    if damage == "zeros":
        for part in packed:
            part[:13] = 0
    elif damage == "zero scales and biases":
        packed[1][:13] = packed[2][:13] = 0
    elif damage == "zero scales":
        packed[1][:13] = packed[0][:13] = 0
    elif damage == "zero codes":
        packed[0][:13] = 0
    elif damage == "other codes":
        packed[0][:13] = packed[0][:13][::-1].copy()
    codes, *others = packed
    return [mx.array(codes), *(mx.array(x).astype(mx.bfloat16) for x in others)], dense


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "damage",
    ["zeros", "zero scales", "zero scales and biases", "zero codes", "other codes"],
)
def test_most_groups_damaged(damage: str, weighed: bool) -> None:
    """Their error drowns in that of the others, and they are most of the groups."""
    stored = StoredFormat("affine", 2, 64)
    packed, dense = damaged("none")
    assert quantised_error(packed, dense, stored, weighed=weighed).fault is None
    packed, dense = damaged(damage)
    found = quantised_error(packed, dense, stored, weighed=weighed)
    assert found.fault is not None
    assert " of 24 groups " in found.fault
    wanted = "codes that are not the nearest" if weighed else "more than 3 times"
    assert wanted in found.fault
