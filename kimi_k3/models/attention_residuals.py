"""Attention Residuals: every layer reads a learned mix of earlier residual blocks."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels.attention_residual_mix import attention_residual_mix, inverse_rms


class ResidualStack:
    """The stored residual blocks of one forward pass, (N, B, T, D)."""

    def __init__(self, eps: float):
        self.eps = eps
        self.blocks: mx.array | None = None
        self.inverse_rms: mx.array | None = None

    def push(self, residual: mx.array) -> None:
        """Store ``residual`` (B, T, D) as one more block."""
        self.extend(residual[None])

    def extend(self, blocks: mx.array) -> None:
        """Store several blocks (N, B, T, D) at once."""
        scales = inverse_rms(blocks, self.eps)
        if self.blocks is None or self.inverse_rms is None:
            self.blocks, self.inverse_rms = blocks, scales
        else:
            self.blocks = mx.concatenate([self.blocks, blocks])
            self.inverse_rms = mx.concatenate([self.inverse_rms, scales])


class ScoreProjection(nn.Module):
    """The (1, D) vector that scores candidates.

    Not an ``nn.Linear``: its weight is read directly, so it must be neither quantised
    nor wrapped by LoRA.
    """

    def __init__(self, dims: int):
        super().__init__()
        self.weight = mx.random.normal((1, dims)) * dims**-0.5


def mix(
    stack: ResidualStack,
    prefix: mx.array,
    norm: nn.RMSNorm,
    projection: ScoreProjection,
) -> mx.array:
    """The mix of ``stack`` and ``prefix``, (B, T, D)."""
    if stack.blocks is None or stack.inverse_rms is None:
        return prefix
    mixed, _ = attention_residual_mix(
        stack.blocks,
        stack.inverse_rms,
        prefix,
        None,
        norm.weight,
        projection.weight.reshape(-1),
        stack.eps,
        training=norm.training,
    )
    return mixed


def mix_and_norm(
    stack: ResidualStack,
    prefix: mx.array,
    added: mx.array | None,
    norm: nn.RMSNorm,
    projection: ScoreProjection,
    output_norm: nn.Module,
) -> tuple[mx.array, mx.array]:
    """What a sub-layer reads, ``output_norm`` of the mix, and ``prefix + added``.

    An ``output_norm`` that is not a plain RMSNorm, but stands in for one, is called.
    """
    plain = type(output_norm) is nn.RMSNorm
    if not plain or stack.blocks is None or stack.inverse_rms is None:
        prefix = prefix if added is None else prefix + added
        return output_norm(mix(stack, prefix, norm, projection)), prefix
    return attention_residual_mix(
        stack.blocks,
        stack.inverse_rms,
        prefix,
        added,
        norm.weight,
        projection.weight.reshape(-1),
        stack.eps,
        output_norm.weight,
        output_norm.eps,
        training=norm.training,
    )
