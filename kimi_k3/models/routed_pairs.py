"""How routed pairs, a token and one of its experts each, go through expert matmuls.

Three forms, all the same sum:

- *gathered*: every pair is a row, in the order of the tokens; nothing waits.
- *sorted*: rows in the order of their experts, so that each expert is read once.
- *partitioned*: sorted, and cut where one bank ends and the next begins, so that a bank
  runs its own pairs only and slots of weight 0 run nowhere. The host reads, once a
  layer and call: on the CPU the ids, on a GPU only where the cuts are.
"""

from typing import Protocol

import mlx.core as mx
import numpy as np

from ..kernels._common import runs_on_cpu

#: From this many routed pairs on, pairs are sorted by expert before the matmuls.
SORT_FROM_PAIRS = 64

#: MLX's grouped matmul on a GPU starts at this many pairs per expert. Below it nothing
#: is gained by sorting, and decoding, which must not wait for the host, stays below.
GROUPED_FROM_PAIRS_PER_EXPERT = 4

#: Sorted matmuls of more rows go wrong unless 64 divides them (ml-explore/mlx#3856).
MOST_ROWS = 32768

#: On the CPU a read by the host is worth it from this many weights on that the other
#: bank would multiply for nothing: pairs times width times inner width.
PARTITION_FROM_WEIGHTS = 32_768


class Bank(Protocol):
    """Runs rows (n, 1, D) through the experts of ids (n,) of its own, from 0 on."""

    def run_pairs(self, x: mx.array, ids: mx.array, is_sorted: bool) -> mx.array: ...


def run_gathered(bank: Bank, x: mx.array, ids: mx.array) -> mx.array:
    """(..., D) and ids (..., K) → (..., K, D)."""
    return bank.run_pairs(x[..., None, None, :], ids, False).squeeze(-2)


def run_sorted(bank: Bank, x: mx.array, ids: mx.array) -> mx.array:
    """(..., D) and ids (..., K) → (..., K, D)."""
    order = mx.argsort(ids.flatten())
    rows = x.reshape(-1, x.shape[-1])[order // ids.shape[-1]]
    out = run_rows(bank, rows, ids.flatten()[order])[mx.argsort(order)]
    return out.reshape(*ids.shape, -1)


def run_rows(bank: Bank, rows: mx.array, ids: mx.array) -> mx.array:
    """Rows (n, D) in ascending order of their ids (n,) → (n, D), guarded.

    A sorted matmul gets contiguous rows (ml-explore/mlx#4055, #4253) and no more of
    them than :data:`MOST_ROWS`.
    """
    if len(ids) > MOST_ROWS:
        parts = range(0, len(ids), MOST_ROWS)
        cuts = [slice(start, start + MOST_ROWS) for start in parts]
        return mx.concatenate([run_rows(bank, rows[cut], ids[cut]) for cut in cuts])
    x = mx.contiguous(rows).reshape(-1, 1, rows.shape[-1])
    return bank.run_pairs(x, mx.contiguous(ids), True).squeeze(-2)


def run_partitioned(
    banks: list[tuple[Bank, int]],
    x: mx.array,
    ids: mx.array,
    used: mx.array | None = None,
) -> mx.array:
    """(..., D) and ids (..., K) → (..., K, D), each pair through its own bank only.

    Args:
        banks: each with its number of experts; ids count through all of them.
        used: (..., K); slots where it is False are not run, and are 0 in the result.
    """
    sizes = [size for _, size in banks]
    shares, inverse = (_share_on_host if runs_on_cpu() else _share_on_device)(
        ids, sizes, used
    )
    x = x.reshape(-1, x.shape[-1])
    parts = [
        run_gathered(bank, x, own[None])[0]
        if len(x) == 1
        else run_rows(bank, x[tokens], own)
        for (bank, _), (tokens, own) in zip(banks, shares, strict=True)
        if tokens.size
    ]
    if left := ids.size - sum(len(part) for part in parts):
        parts.append(mx.zeros((left, x.shape[-1]), x.dtype))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return out[inverse].reshape(*ids.shape, -1)


#: Of each bank, in ascending order of the experts: its pairs' tokens, and their ids
#: from the bank's first expert on. Then the place of each pair in all of these.
Shares = tuple[list[tuple[mx.array, mx.array]], mx.array]


def _share_on_host(ids: mx.array, sizes: list[int], used: mx.array | None) -> Shares:
    """Reads the ids: on the CPU they lie where the host can see them."""
    flat = np.array(ids).reshape(-1).astype(np.int32)
    if used is not None:
        flat = np.where(np.array(used).reshape(-1), flat, sum(sizes))
    order = np.argsort(flat, kind="stable").astype(np.int32)
    flat, tokens, first, shares = flat[order], order // ids.shape[-1], 0, []
    for size in sizes:
        start, stop = np.searchsorted(flat, (first, first + size))
        own = flat[start:stop] - first
        shares.append((mx.array(tokens[start:stop]), mx.array(own)))
        first += size
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=np.int32)
    return shares, mx.array(inverse)


def _share_on_device(ids: mx.array, sizes: list[int], used: mx.array | None) -> Shares:
    """Reads the cuts only."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    flat = ids.flatten().astype(mx.int32)
    if used is not None:
        flat = mx.where(used.flatten(), flat, ends[-1])
    order = mx.argsort(flat)
    cuts = [0, *read_cuts((flat[:, None] < mx.array(ends)).sum(axis=0))]
    flat, tokens, firsts, shares = flat[order], order // ids.shape[-1], [0, *ends], []
    for i in range(len(sizes)):
        own = slice(cuts[i], cuts[i + 1])
        shares.append((tokens[own], flat[own] - firsts[i]))
    return shares, mx.argsort(order)


def read_cuts(below: mx.array) -> list[int]:
    """Pairs below the end of each bank: the only numbers the host waits for."""
    return below.tolist()  # pyright: ignore[reportReturnType]


def should_partition(
    pairs: int, weights: int, experts: int, two_banks: bool, skips: bool
) -> bool:
    """Whether the host reads where the banks' pairs begin.

    Without the read both banks multiply every pair. In prefill of Kimi K3 that would be
    half as much arithmetic again, seconds a chunk; the reads cost well under a
    millisecond a layer. Decoding on a GPU never comes here: kernels choose the bank.

    Args:
        pairs: routed pairs of this call.
        weights: weights of one matrix of one expert.
        experts: experts of the layer.
        two_banks: whether a form without the read would run every pair twice.
        skips: whether slots of weight 0 are to be expected.
    """
    if not two_banks and not skips:
        return False
    if runs_on_cpu():
        return pairs * weights >= PARTITION_FROM_WEIGHTS
    return pairs >= GROUPED_FROM_PAIRS_PER_EXPERT * experts
