"""SiTU-GLU against the oracle: every sign, saturated, and with other constants."""

import mlx.core as mx
import numpy as np
import oracles
import pytest
from closeness import assert_close, relative_error
from oracle_pair import MODULE, SIZES, float64

from kimi_k3.kernels.situ import situ


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("linear_beta", [25.0, 3.0, None])
def test_situ_is_the_oracle(tokens: int, linear_beta: float | None) -> None:
    gate, up = 6.0 * mx.random.normal((2, tokens, 7, 3), key=mx.random.key(tokens))
    want = oracles.situ(float64(gate), float64(up), 4.0, linear_beta)
    got = situ(gate, up, 4.0, linear_beta)
    assert_close(got, want, rel=MODULE, where="situ", dtype=mx.float32)


def test_saturation_has_no_infinity() -> None:
    gate = mx.array([-1e30, -200.0, -5.0, 0.0, 5.0, 200.0, 1e30])
    up = mx.array([1e30, -1e30, 40.0, -40.0, 1e30, 25.0, -200.0])
    want = oracles.situ(float64(gate), float64(up), 4.0, 25.0)
    assert_close(situ(gate, up, 4.0, 25.0), want, rel=MODULE, where="saturated")


def test_bfloat16_is_computed_in_float32() -> None:
    gate, up = 8.0 * mx.random.normal((2, 4096), key=mx.random.key(1))
    gate, up = gate.astype(mx.bfloat16), up.astype(mx.bfloat16)
    want = oracles.situ(float64(gate), float64(up), 4.0, 25.0)
    got = situ(gate, up, 4.0, 25.0)
    assert got.dtype == mx.bfloat16
    # One rounding at the end: half a unit in the last of 8 bits, per value.
    error = np.abs(float64(got) - want)
    assert (error <= 2.0**-8 * np.abs(want) + 1e-30).all()


@pytest.mark.parametrize("mistake", ["beta", "linear_beta", "swapped"])
def test_a_wrong_constant_is_seen(mistake: str) -> None:
    """Broken twin."""
    gate, up = 6.0 * mx.random.normal((2, 33), key=mx.random.key(2))
    want = oracles.situ(float64(gate), float64(up), 4.0, 25.0)
    got = {
        "beta": situ(gate, up, 4.01, 25.0),
        "linear_beta": situ(gate, up, 4.0, 25.5),
        "swapped": situ(up, gate, 4.0, 25.0),
    }[mistake]
    assert relative_error(got, want) > 10 * MODULE
