"""The mix of Attention Residuals: a softmax over stored residual blocks."""

import mlx.core as mx

from ._common import compiled_on_gpu


@compiled_on_gpu
def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """``1 / sqrt(mean(x²) + eps)`` over the last axis, float32, without that axis."""
    x = x.astype(mx.float32)
    return mx.rsqrt(mx.mean(mx.square(x), axis=-1) + eps)


@compiled_on_gpu
def attention_residual_mix(
    blocks: mx.array,
    blocks_inverse_rms: mx.array,
    prefix: mx.array,
    score_weight: mx.array,
    eps: float,
) -> mx.array:
    """Weighted sum of the stored blocks and the running residual sum.

    Args:
        blocks: stored residuals, (N, B, T, D).
        blocks_inverse_rms: :func:`inverse_rms` of them, (N, B, T), float32.
        prefix: the running residual sum, (B, T, D).
        score_weight: norm weight times projection weight, (D,), float32.
        eps: epsilon of the norm inside the score.

    Returns:
        (B, T, D) in ``prefix``'s dtype. A candidate's score is its RMS-normed self
        times ``score_weight``, in float32; the sum runs over un-normed candidates.
    """
    block_scores = (blocks.astype(mx.float32) @ score_weight) * blocks_inverse_rms
    prefix_score = (prefix.astype(mx.float32) @ score_weight) * inverse_rms(prefix, eps)
    scores = mx.concatenate([block_scores, prefix_score[None]], axis=0)
    probabilities = mx.softmax(scores, axis=0, precise=True)[..., None]
    mixed = (probabilities[:-1] * blocks).sum(axis=0) + probabilities[-1] * prefix
    return mixed.astype(prefix.dtype)
