"""SiTU-GLU, the gated activation of every MLP and expert of Kimi K3."""

import mlx.core as mx

from ._common import compiled_on_gpu


@compiled_on_gpu
def situ(
    gate: mx.array, up: mx.array, beta: float, linear_beta: float | None
) -> mx.array:
    """``β·tanh(gate/β)·sigmoid(gate) · β_lin·tanh(up/β_lin)``.

    Computed in float32, since bf16 rounding moves the point where tanh saturates.
    ``gate`` and ``up`` have any one shape; the result has it too, in ``up``'s dtype.
    Without ``linear_beta`` the second factor is ``up`` itself.
    """
    dtype = up.dtype
    gate = gate.astype(mx.float32)
    up = up.astype(mx.float32)
    if linear_beta is not None:
        up = linear_beta * mx.tanh(up / linear_beta)
    return (beta * mx.tanh(gate / beta) * mx.sigmoid(gate) * up).astype(dtype)
