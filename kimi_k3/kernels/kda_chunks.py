"""The KDA recurrence chunk by chunk: the CPU's form, a few matmuls for many tokens.

Within a chunk, with b the cumulative log decay, every pair of tokens i ≥ j meets through
``(k_i·exp(b_i)) · (k_j·exp(-b_j))``. The corrections u of the delta rule solve a unit
lower triangular system, whose inverse is the same for any state.
"""

import math

import mlx.core as mx

#: Tokens a chunk.
CHUNK = 16

#: ``exp`` of more than this leaves float32.
MAX_EXPONENT = 85.0

#: Binary places of a cumulative log decay: 16 of the strongest still fit an int32.
POINT = 24

#: Fewer tokens gain little, and one by one they give the same bits however a prompt is
#: split.
FROM_TOKENS = 64


def suits_chunks(tokens: int, lower_bound: float | None) -> bool:
    """Whether log decays of at least ``lower_bound`` stay in range, and chunks pay."""
    in_range = lower_bound is not None and -lower_bound * CHUNK <= MAX_EXPONENT
    return in_range and tokens >= FROM_TOKENS


def kda_recurrence_in_chunks(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As :func:`~.kda_recurrence.kda_recurrence`, for decays that suit chunks."""
    B, T, H, K = key.shape
    V = value.shape[-1]
    if mask is not None:
        log_decay = mx.where(mask[..., None, None], log_decay, 0.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    query, key, value, log_decay, beta = (
        _in_chunks(x) for x in (query, key, value, log_decay, beta[..., None])
    )
    decay, growth = _cumulative(log_decay)
    past_keys = mx.contiguous((key * growth).swapaxes(-1, -2))
    key, query = key * decay, query * decay
    among_keys = mx.tril(key @ past_keys, -1) * beta
    among_queries = mx.tril(query @ past_keys)
    inverse = _inverse(among_keys)
    wanted = inverse @ (value * beta)
    readers = mx.concatenate([inverse @ (key * beta), query], axis=-2)
    kept = decay[..., -1:, :].swapaxes(-1, -2)
    past_keys = past_keys * kept

    memory = mx.contiguous(state.astype(mx.float32).swapaxes(-1, -2))
    outputs = []
    for i in range(key.shape[1]):
        read = readers[:, i] @ memory
        correction = wanted[:, i] - read[..., :CHUNK, :]
        outputs.append(read[..., CHUNK:, :] + among_queries[:, i] @ correction)
        memory = memory * kept[:, i] + past_keys[:, i] @ correction
    out = mx.stack(outputs, axis=1).swapaxes(2, 3).reshape(B, -1, H, V)[:, :T]
    return out, mx.contiguous(memory.swapaxes(-1, -2))


def _in_chunks(x: mx.array) -> mx.array:
    """(B, T, H, D) → (B, chunks, H, CHUNK, D), float32; zeros fill the last chunk."""
    B, T, H, D = x.shape
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, -T % CHUNK), (0, 0), (0, 0)])
    return mx.contiguous(x.reshape(B, -1, CHUNK, H, D).swapaxes(2, 3))


def _cumulative(log_decay: mx.array) -> tuple[mx.array, mx.array]:
    """``exp(b)`` and ``exp(-b)`` for the cumulative sum b along a chunk.

    Near b = -80 a float32 is off by 4e-6, and so would be the decay between neighbours.
    So b is summed in base-2 fixed point, and its whole part becomes a float's exponent.
    """
    # Whatever the gate gives, nothing leaves float32's range.
    log_decay = mx.maximum(log_decay, -MAX_EXPONENT / CHUNK)
    steps = mx.round(log_decay * (2**POINT / math.log(2))).astype(mx.int32)
    total = mx.cumsum(steps, axis=-2)
    whole = total >> POINT
    rest = (total & (2**POINT - 1)).astype(mx.float32) * (math.log(2) / 2**POINT)
    rest = mx.exp(rest)
    decay = ((127 + whole) << 23).view(mx.float32) * rest
    growth = ((127 - whole) << 23).view(mx.float32) / rest
    return decay, growth


def _inverse(strictly_lower: mx.array) -> mx.array:
    """``(1 + L)⁻¹``, row by row.

    Doubling, ``(1 - L)(1 + L²)(1 + L⁴)…``, is shorter but cancels at strong decays.
    """
    unit = mx.eye(CHUNK)
    inverse = mx.broadcast_to(unit[:1], (*strictly_lower.shape[:-2], 1, CHUNK))
    for i in range(1, CHUNK):
        row = unit[i : i + 1] - strictly_lower[..., i : i + 1, :i] @ inverse
        inverse = mx.concatenate([inverse, row], axis=-2)
    return inverse
