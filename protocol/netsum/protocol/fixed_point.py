"""Fixed point (SPEC.md section 2), as readable numpy: the oracle for the vector code in ``native/src/fixed_point*.cpp``.

Tensors are 1-D arrays of any length, storage by :class:`DType`: float32, float16, uint16 (the bits of bfloat16) or int32. Block b is
elements 256·b .. 256·b+255 of the array, so arrays of exponents have ceil(length/256) entries; the last block may be short.
Int32 has no exponents: it passes through unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from netsum.protocol.dtypes import DType, OpCode

BLOCK_ELEMS = 256
NO_EXPONENT = -128  # a block without a non-zero finite element
MAX_WORLD_SIZE = 1024  # beyond, the counts of non-finite elements would run into each other

_INF_BITS = 0x7F800000  # bits of float32 infinity; magnitudes from here on are not finite
_NEGATIVE_INF_COUNT_SHIFT = 11

Tensor = NDArray[Any]


def scale_exponent(world_size: int) -> int:
    """k of SPEC.md: quantized values are x · 2^(k − E)."""
    return 29 - (world_size - 1).bit_length()


def sum_limit(world_size: int) -> int:
    """Largest \\|Q\\| that ``world_size`` honest contributions can reach: n · 2^(k+1)."""
    return world_size << (scale_exponent(world_size) + 1)


def bf16_to_f32(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits to float32, exactly."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 to bfloat16 bits, to nearest even. A NaN stays a NaN (made quiet)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(_magnitude_bits(x) > _INF_BITS, quiet, rounded).astype(np.uint16)


def block_exponents(x: Tensor, dtype: DType) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """(e0, e1), each int8 of ceil(len/256): the worker's own pair of each block."""
    blocks = -(-x.size // BLOCK_ELEMS)
    if not dtype.is_float:
        return np.full(blocks, NO_EXPONENT, np.int8), np.zeros(blocks, np.int8)
    padded = np.zeros(blocks * BLOCK_ELEMS, np.uint32)
    padded[: x.size] = _magnitude_bits(widen(x, dtype))
    magnitude = padded.reshape(blocks, BLOCK_ELEMS)
    finite = magnitude < _INF_BITS
    # The bits of non-negative floats are ordered like the floats, and the exponent field of a denormal is 0, hence −127.
    largest = np.where(finite, magnitude, 0).max(axis=1)
    e0 = np.where(largest == 0, NO_EXPONENT, (largest >> 23).astype(np.int32) - 127)
    e1 = np.where(finite.all(axis=1), 0, 1)
    return e0.astype(np.int8), e1.astype(np.int8)


def quantize(x: Tensor, dtype: DType, e0: NDArray[np.int8], world_size: int) -> NDArray[np.int32]:
    """int32 of the same length: round_half_even(x · 2^(k − E)), 0 for elements that are not finite.

    ``e0``: agreed exponent of each block, int8 of ceil(len/256), not below the block's own (a lower one gives values of no use).
    """
    if not dtype.is_float:
        return x.astype(np.int32)
    values = widen(x, dtype)
    finite = np.isfinite(values)
    exponent = _per_element(e0, x.size)
    with np.errstate(over="ignore", under="ignore"):
        scaled = _scale(np.where(finite, values, np.float32(0)), scale_exponent(world_size) - exponent)
        q = np.rint(scaled)
    q[exponent == NO_EXPONENT] = 0
    np.clip(q, -(2.0**62), 2.0**62, out=q)  # below the block's own exponent only: keeps the cast defined
    return q.astype(np.int64).astype(np.int32)


def dequantize(
    q: NDArray[np.int32], dtype: DType, e0: NDArray[np.int8], world_size: int, op: OpCode
) -> tuple[Tensor, bool]:
    """(values in the storage of ``dtype``, overflow): the sums Q, or for an average Q/n, as floats.

    ``overflow`` is True when some \\|Q\\| exceeds :func:`sum_limit`: this is not the sum of ``world_size`` contributions.
    """
    if not dtype.is_float:
        return q.astype(np.int32), False
    overflow = bool((np.abs(q.astype(np.int64)) > sum_limit(world_size)).any())
    values = q.astype(np.float32)
    if op is OpCode.AVG:
        values = values / np.float32(world_size)
    exponent = _per_element(e0, q.size)
    with np.errstate(over="ignore", under="ignore"):
        values = _scale(values, exponent - scale_exponent(world_size))
        values[exponent == NO_EXPONENT] = 0
        return narrow(values, dtype), overflow


def non_finite_mask(x: Tensor, dtype: DType) -> NDArray[np.bool_]:
    """True where ``x`` is a NaN or an infinity."""
    if not dtype.is_float:
        return np.zeros(x.size, np.bool_)
    return _magnitude_bits(widen(x, dtype)) >= _INF_BITS


def count_non_finite(x: Tensor, dtype: DType) -> NDArray[np.int32]:
    """int32 of the same length: +Inf counts 1, −Inf 2^11, NaN both, finite elements 0."""
    counts = np.zeros(x.size, np.int32)
    if dtype.is_float:
        values = widen(x, dtype)
        nan = np.isnan(values)
        counts += nan | (values == np.inf)
        counts += (nan | (values == -np.inf)).astype(np.int32) << _NEGATIVE_INF_COUNT_SHIFT
    return counts


def apply_counts(x: Tensor, counts: NDArray[np.int32], dtype: DType) -> None:
    """Overwrites, in ``x``, the elements whose summed count is not 0 by NaN, +Inf or −Inf."""
    if not dtype.is_float:
        return
    sums = counts.astype(np.int32).view(np.uint32)
    low, high = sums & np.uint32((1 << _NEGATIVE_INF_COUNT_SHIFT) - 1), sums >> np.uint32(_NEGATIVE_INF_COUNT_SHIFT)
    special = np.where(low > 0, np.where(high > 0, np.nan, np.inf), -np.inf).astype(np.float32)
    counted = sums != 0
    x[counted] = narrow(special, dtype)[counted]


def weighted_sum(q: NDArray[np.int32], first_index: int) -> int:
    """Σ (2·(first_index + i) + 1) · q_i modulo 2^32: this array's part of an integrity element."""
    weights = 2 * (np.arange(q.size, dtype=np.uint64) + np.uint64(first_index)) + np.uint64(1)
    # The low 32 bits of q and of the weights decide the result; uint64 wraps at a multiple of 2^32.
    return int((weights * q.astype(np.int32).view(np.uint32)).sum(dtype=np.uint64)) & 0xFFFFFFFF


def _magnitude_bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)


def _per_element(e0: NDArray[np.int8], count: int) -> NDArray[np.int32]:
    return np.repeat(e0.astype(np.int32), BLOCK_ELEMS)[:count]


def _scale(x: NDArray[np.float32], exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """x · 2^exponent. 2^exponent itself may lie outside float32; half of it and the rest do not, and the first product is exact
    wherever the result is not rounded to 0 anyway."""
    one = np.float32(1)
    half = exponent // 2
    product: NDArray[np.float32] = x * np.ldexp(one, half) * np.ldexp(one, exponent - half)
    return product


def widen(x: Tensor, dtype: DType) -> NDArray[np.float32]:
    """Any float storage to float32, exactly."""
    if dtype is DType.BFLOAT16:
        return bf16_to_f32(x)
    return x.astype(np.float32, copy=False)


def narrow(x: NDArray[np.float32], dtype: DType) -> Tensor:
    """float32 to the storage of ``dtype``, to nearest even."""
    if dtype is DType.BFLOAT16:
        return f32_to_bf16(x)
    return x.astype(np.float16) if dtype is DType.FLOAT16 else x
