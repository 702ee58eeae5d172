"""What is fused on a GPU computes the same as op by op."""

import mlx.core as mx
import pytest
from closeness import assert_close
from tiny_k3 import t0_model

from kimi_k3.kernels import _common


def test_fused_functions_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = t0_model(), mx.array([[3, 141, 59, 26, 5]])
    plain = model(tokens)
    compiled = []
    monkeypatch.setattr(_common, "runs_on_cpu", lambda: bool(compiled.append(1)))
    fused = model(tokens)
    assert compiled, "no function asked whether to fuse"
    assert_close(fused, plain, rel=1e-5)
