"""Expert matrices of any MLX width, and the Metal code that multiplies their rows."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ._common import runs_on_cpu

#: Number of each storage mode, as the templates of the Metal code below know it.
MODES = {"dense": 0, "affine": 1, "mxfp4": 2, "nvfp4": 3, "mxfp8": 4}

#: Bits and group sizes that the Metal code reads.
WIDTHS = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

#: MLX hands smaller arrays over in another address space.
LEAST_BUFFER = 8

#: A lane takes 16 consecutive values of a row at a time: never more than one group.
#: A row is one little-endian stream of codes; both 4-bit floats and bytes of 8-bit ones
#: become halves by a shift, off by a power of two.
HEADER = """
#define KIMI_K3_UNROLL _Pragma("clang loop unroll(full)")
constant constexpr int KIMI_K3_DENSE = 0;
constant constexpr int KIMI_K3_AFFINE = 1;
constant constexpr int KIMI_K3_MXFP4 = 2;
constant constexpr int KIMI_K3_NVFP4 = 3;
constant constexpr int KIMI_K3_MXFP8 = 4;
constant constexpr int KIMI_K3_CHUNK = 16;

// The code at place i of a chunk.
template <int BITS>
inline uint kimi_k3_code(const thread uint* words, int i) {
  int bit = i * BITS;
  int shift = bit % 32;
  uint code = words[bit / 32] >> shift;
  if (shift + BITS > 32) code |= words[bit / 32 + 1] << (32 - shift);
  return code & ((1u << BITS) - 1u);
}

// The words of the chunk that begins at value `at` of the whole matrix.
template <int BITS>
inline void kimi_k3_words(const device uint* matrix, ulong at, thread uint* words) {
  if (BITS % 2 == 0) {
    const device uint* source = matrix + at * BITS / 32;
    KIMI_K3_UNROLL
    for (int i = 0; i < BITS / 2; ++i) words[i] = source[i];
  } else {
    const device ushort* source = (const device ushort*)matrix + at * BITS / 16;
    KIMI_K3_UNROLL
    for (int i = 0; i < BITS / 2; ++i) words[i] = uint(source[2 * i]) | (uint(source[2 * i + 1]) << 16);
    words[BITS / 2] = uint(source[BITS - 1]);
  }
}

inline float kimi_k3_e4m3(uint code) {
  return float(as_type<half>(ushort(((code & 0x80u) << 8) | ((code & 0x7fu) << 7)))) * 256.0f;
}

inline float kimi_k3_e8m0(uint code) {
  return as_type<float>(code == 0u ? 0x00400000u : code << 23);
}

// One chunk of a row times 16 activations, whose sum is x_sum.
template <int MODE, int BITS, int GROUP>
struct KimiK3Chunk;

template <int BITS, int GROUP>
struct KimiK3Chunk<KIMI_K3_DENSE, BITS, GROUP> {
  template <int K, typename W, typename S, typename B>
  static float dot(const device W* matrix, const device S*, const device B*, ulong row, uint start, const thread float* x, float) {
    const device W* source = matrix + row * K + start;
    float sum = 0.0f;
    KIMI_K3_UNROLL
    for (int i = 0; i < KIMI_K3_CHUNK; ++i)
      if (K % KIMI_K3_CHUNK == 0 || start + i < uint(K)) sum += x[i] * float(source[i]);
    return sum;
  }
};

template <int BITS, int GROUP>
struct KimiK3Chunk<KIMI_K3_AFFINE, BITS, GROUP> {
  template <int K, typename W, typename S, typename B>
  static float dot(const device W* matrix, const device S* scales, const device B* biases, ulong row, uint start, const thread float* x, float x_sum) {
    uint words[BITS / 2 + 1];
    ulong at = row * K + start;
    kimi_k3_words<BITS>(matrix, at, words);
    float sum = 0.0f;
    KIMI_K3_UNROLL
    for (int i = 0; i < KIMI_K3_CHUNK; ++i) sum += x[i] * float(kimi_k3_code<BITS>(words, i));
    return float(scales[at / GROUP]) * sum + float(biases[at / GROUP]) * x_sum;
  }
};

template <int GROUP>
inline float kimi_k3_dot_e2m1(const device uint* matrix, ulong at, const thread float* x) {
  uint words[2];
  kimi_k3_words<4>(matrix, at, words);
  float sum = 0.0f;
  KIMI_K3_UNROLL
  for (int i = 0; i < KIMI_K3_CHUNK; ++i) {
    uint code = kimi_k3_code<4>(words, i);
    sum += x[i] * float(as_type<half>(ushort(((code & 8u) << 12) | ((code & 7u) << 9))));
  }
  return sum * 16384.0f;
}

template <int BITS, int GROUP>
struct KimiK3Chunk<KIMI_K3_MXFP4, BITS, GROUP> {
  template <int K, typename W, typename S, typename B>
  static float dot(const device W* matrix, const device S* scales, const device B*, ulong row, uint start, const thread float* x, float) {
    ulong at = row * K + start;
    return kimi_k3_dot_e2m1<GROUP>(matrix, at, x) * kimi_k3_e8m0(scales[at / GROUP]);
  }
};

template <int BITS, int GROUP>
struct KimiK3Chunk<KIMI_K3_NVFP4, BITS, GROUP> {
  template <int K, typename W, typename S, typename B>
  static float dot(const device W* matrix, const device S* scales, const device B*, ulong row, uint start, const thread float* x, float) {
    ulong at = row * K + start;
    return kimi_k3_dot_e2m1<GROUP>(matrix, at, x) * kimi_k3_e4m3(scales[at / GROUP]);
  }
};

template <int BITS, int GROUP>
struct KimiK3Chunk<KIMI_K3_MXFP8, BITS, GROUP> {
  template <int K, typename W, typename S, typename B>
  static float dot(const device W* matrix, const device S* scales, const device B*, ulong row, uint start, const thread float* x, float) {
    uint words[4];
    ulong at = row * K + start;
    kimi_k3_words<8>(matrix, at, words);
    float sum = 0.0f;
    KIMI_K3_UNROLL
    for (int i = 0; i < KIMI_K3_CHUNK; ++i) sum += x[i] * kimi_k3_e4m3(kimi_k3_code<8>(words, i));
    return sum * kimi_k3_e8m0(scales[at / GROUP]);
  }
};

// 16 activations from `start` on as floats, 0 past the end; returns their sum.
template <int K, typename T>
inline float kimi_k3_load(const device T* x, uint start, thread float* values) {
  float sum = 0.0f;
  KIMI_K3_UNROLL
  for (int i = 0; i < KIMI_K3_CHUNK; ++i) {
    values[i] = (K % KIMI_K3_CHUNK == 0 || start + i < uint(K)) ? float(x[start + i]) : 0.0f;
    sum += values[i];
  }
  return sum;
}

// Adds this lane's share of ROWS rows times x; rows past the last repeat the last.
template <int MODE, int BITS, int GROUP, int K, int ROWS, typename T, typename W, typename S, typename B>
inline void kimi_k3_rows(const device T* x, const device W* matrix, const device S* scales, const device B* biases,
                         ulong expert, uint row0, uint rows, uint lane, thread float* sums) {
  float values[KIMI_K3_CHUNK];
  for (uint start = lane * KIMI_K3_CHUNK; start < uint(K); start += 32 * KIMI_K3_CHUNK) {
    float x_sum = kimi_k3_load<K>(x, start, values);
    KIMI_K3_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      ulong row = expert * rows + metal::min(row0 + r, rows - 1);
      sums[r] += KimiK3Chunk<MODE, BITS, GROUP>::template dot<K>(matrix, scales, biases, row, start, values, x_sum);
    }
  }
}

// The same for two matrices of one format that share x.
template <int MODE, int BITS, int GROUP, int K, int ROWS, typename T, typename W, typename S, typename B>
inline void kimi_k3_two_rows(const device T* x, const device W* left, const device S* left_scales, const device B* left_biases,
                             const device W* right, const device S* right_scales, const device B* right_biases,
                             ulong expert, uint row0, uint rows, uint lane, thread float* left_sums, thread float* right_sums) {
  float values[KIMI_K3_CHUNK];
  for (uint start = lane * KIMI_K3_CHUNK; start < uint(K); start += 32 * KIMI_K3_CHUNK) {
    float x_sum = kimi_k3_load<K>(x, start, values);
    KIMI_K3_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      ulong row = expert * rows + metal::min(row0 + r, rows - 1);
      left_sums[r] += KimiK3Chunk<MODE, BITS, GROUP>::template dot<K>(left, left_scales, left_biases, row, start, values, x_sum);
      right_sums[r] += KimiK3Chunk<MODE, BITS, GROUP>::template dot<K>(right, right_scales, right_biases, row, start, values, x_sum);
    }
  }
}
"""


@dataclass(frozen=True)
class ExpertMatrix:
    """One projection of all experts of a bank, as MLX stores it."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    mode: str = "dense"
    bits: int = 16
    group_size: int = 1

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        packed = self.weight.shape[2]
        return packed if self.mode == "dense" else packed * 32 // self.bits

    @property
    def format(self) -> tuple[Any, ...]:
        """What must be equal of two matrices for one loop to read both."""
        arrays = self.weight, self.scales, self.biases
        dtypes = (None if array is None else array.dtype for array in arrays)
        return self.mode, self.bits, self.group_size, *dtypes

    def readable(self) -> bool:
        """Whether the Metal code has a reader for this matrix."""
        if min(a.size for a in self.buffers()) < LEAST_BUFFER:
            return False
        if self.mode == "dense":
            return self.weight.dtype in FLOATS
        bits, groups = WIDTHS.get(self.mode, ((), ()))
        return self.bits in bits and self.group_size in groups

    def buffers(self) -> tuple[mx.array, mx.array, mx.array]:
        """Weight, scales and biases; the weight stands in for what there is not."""
        scales = self.weight if self.scales is None else self.scales
        return self.weight, scales, self.weight if self.biases is None else self.biases

    def multiply(self, x: mx.array, ids: mx.array) -> mx.array:
        """Rows (..., 1, columns) times the transposed matrix of each id (...)."""
        if self.scales is None:
            weight = self.weight.astype(mx.float32) if runs_on_cpu() else self.weight
            return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=ids)
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=ids,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


@dataclass(frozen=True)
class BankedMatrix:
    """One projection of a layer: experts ``[0, split)`` in ``high``, the rest in ``low``.

    A bank without experts is None.
    """

    high: ExpertMatrix | None
    low: ExpertMatrix | None
    split: int

    @property
    def banks(self) -> list[ExpertMatrix]:
        return [bank for bank in (self.high, self.low) if bank is not None]

    @property
    def rows(self) -> int:
        return self.banks[0].rows

    @property
    def columns(self) -> int:
        return self.banks[0].columns

    def readable(self) -> bool:
        return all(bank.readable() for bank in self.banks)

    def both(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """High and low; the one there is stands in for an empty one."""
        banks = self.banks
        return banks[0], banks[-1]

    def multiply(self, x: mx.array, ids: mx.array) -> mx.array:
        """:meth:`ExpertMatrix.multiply`, every pair through both, the right one kept."""
        if self.high is None or self.low is None:
            return self.banks[0].multiply(x, ids)
        ids = ids.astype(mx.int32)
        high = self.high.multiply(x, mx.minimum(ids, self.split - 1))
        low = self.low.multiply(x, mx.maximum(ids - self.split, 0))
        return mx.where((ids < self.split)[..., None, None], high, low)

    def template(self) -> list[tuple[str, Any]]:
        """Template arguments that say how both banks are stored."""
        arguments: list[tuple[str, Any]] = []
        for name, bank in zip(("HI", "LO"), self.both(), strict=True):
            arguments += [
                (f"{name}_MODE", MODES[bank.mode]),
                (f"{name}_BITS", bank.bits),
                (f"{name}_GROUP", bank.group_size),
            ]
            for part, array in zip("WSB", bank.buffers(), strict=True):
                arguments.append((f"{name}_{part}", array.dtype))
        return arguments


@cache
def scalar(value: int) -> mx.array:
    """``value`` as an int32 array that is made once."""
    return mx.array(value, dtype=mx.int32)


def slot_template(ids: mx.array, weights: mx.array) -> list[tuple[str, Any]]:
    """Template arguments for what MLX's signature of the slots' arrays depends on.

    MLX compiles anew, each time, kernels of one name and other signatures.
    """
    small = ids.size < LEAST_BUFFER
    return [("ID", ids.dtype), ("WEIGHT", weights.dtype), ("SMALL", small)]


#: Experts of an example: a token's sixteen, half of them in each bank.
EXAMPLE_EXPERTS = 16


def example_matrix(rng: np.random.Generator, rows: int, columns: int) -> BankedMatrix:
    """Random experts in an mxfp4 and a 2-bit bank, values of about ``columns ** -0.5``."""
    count, step = EXAMPLE_EXPERTS // 2, columns**-0.5

    def codes(per_word: int) -> mx.array:
        shape = (count, rows, columns // per_word)
        return mx.array(rng.integers(0, 2**32, shape, np.uint32))

    exponent = 127 + round(np.log2(step / 3))
    groups = (count, rows, columns // 32)
    scales = mx.array(rng.integers(exponent - 1, exponent + 2, groups, np.uint8))
    high = ExpertMatrix(codes(8), scales, None, "mxfp4", 4, 32)
    groups = (count, rows, columns // 64)
    scales = mx.array(step * rng.uniform(0.5, 1.5, groups)).astype(mx.bfloat16)
    low = ExpertMatrix(codes(16), scales, -1.5 * scales, "affine", 2, 64)
    return BankedMatrix(high, low, count)


def example_slots(rng: np.random.Generator) -> dict[str, mx.array]:
    """Ids and weights of one token, both (1, 16)."""
    weights = rng.random((1, EXAMPLE_EXPERTS), np.float32)
    return {
        "ids": mx.array(rng.permutation(EXAMPLE_EXPERTS)[None].astype(np.uint32)),
        "weights": mx.array(weights / weights.sum()),
    }
