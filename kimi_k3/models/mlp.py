"""The plain gated MLP: the dense first layer and the shared experts."""

import mlx.core as mx
import mlx.nn as nn

from ..config import TextArgs
from ..kernels.situ import situ


class MLP(nn.Module):
    """``down(SiTU(gate(x), up(x)))``, (..., D) → (..., D)."""

    def __init__(self, args: TextArgs, intermediate_size: int):
        super().__init__()
        hidden = args.hidden_size
        self.beta = args.activation_situ_beta
        self.linear_beta = args.activation_situ_linear_beta
        self.gate_proj = nn.Linear(hidden, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        hidden = situ(self.gate_proj(x), self.up_proj(x), self.beta, self.linear_beta)
        return self.down_proj(hidden)
