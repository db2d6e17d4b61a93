"""The C++ fixed point, in each vector form that this CPU has, gives the bits of netsum.protocol.fixed_point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from netsum.native._native import fixed_point as native
from netsum.protocol import fixed_point
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.fixed_point import BLOCK_ELEMS, MAX_WORLD_SIZE, NO_EXPONENT

KERNELS = ["scalar", "avx2", "avx512"]
FLOATS = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]
STORAGE = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: np.uint16, DType.INT32: np.int32}
Tensor = NDArray[Any]

# Signed zeros, denormals and their ends, 1 and its neighbours, the largest, infinities, NaNs quiet and signalling: as bits.
SPECIALS_32 = [
    *(0x00000000, 0x00000001, 0x00000FFF, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001),
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001),  # where float16 rounds oddly
    *(0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FA00001, 0x7FC00000, 0x7FFFFFFF),
]
SPECIALS = np.array([bits | sign for bits in SPECIALS_32 for sign in (0, 0x80000000)], np.uint32)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of this file runs once for each vector form."""
    default = native.kernels_in_use()
    if not native.set_kernels(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert native.set_kernels(default)


def float_tensor(rng: np.random.Generator, kind: str, numel: int, dtype: DType) -> Tensor:
    """Blocks of one kind, in the storage of a float ``dtype``."""
    if kind == "any bits":
        bits = rng.integers(0, 2**32, numel, dtype=np.uint32)
    elif kind == "specials":
        bits = rng.choice(SPECIALS, numel)
    elif kind == "ties":  # odd multiples of half a unit, with the block maximum that makes it the unit
        halves = rng.integers(-(2**12), 2**12, numel) + 0.5
        bits = (halves * 2.0 ** -float(rng.integers(18, 30))).astype(np.float32).view(np.uint32)
        bits[::BLOCK_ELEMS] = 0x3F800000
    else:  # one magnitude, anywhere in the range
        scale = np.float32(2.0) ** np.float32(rng.integers(-148, 126))
        bits = (rng.standard_normal(numel).astype(np.float32) * scale).view(np.uint32)
    if kind != "any bits" and rng.integers(2):
        few = rng.random(numel) < 0.02
        bits[few] = rng.choice(SPECIALS, int(few.sum()))
    return narrow_bits(bits, dtype)


def narrow_bits(bits: NDArray[np.uint32], dtype: DType) -> Tensor:
    """The float32 of these bits in ``dtype``'s storage; of random bits, the upper half keeps payloads of NaNs."""
    if dtype is DType.FLOAT32:
        return bits.view(np.float32)
    if dtype is DType.BFLOAT16:
        return (bits >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = bits.view(np.float32).astype(np.float16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    values.view(np.uint16)[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | 0x7C01
    return values


def same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


kinds = st.sampled_from(["any bits", "specials", "ties", "one magnitude"])
lengths = st.one_of(st.integers(0, 70), st.integers(0, 1100), st.sampled_from([255, 256, 257, 511, 512, 513]))
world_sizes = st.one_of(st.integers(1, 9), st.integers(1, MAX_WORLD_SIZE))
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(
    kind=kinds,
    numel=lengths,
    dtype=st.sampled_from(FLOATS),
    world_size=world_sizes,
    raised=st.integers(0, 40),
    seed=seeds,
)
def test_quantize(kind: str, numel: int, dtype: DType, world_size: int, raised: int, seed: int) -> None:
    """Exponents, quantized values and counts; agreed exponents at and above the tensor's own."""
    x = float_tensor(np.random.default_rng(seed), kind, numel, dtype)
    before = x.copy()
    e0, e1 = fixed_point.block_exponents(x, dtype)
    for ours, theirs in zip((e0, e1), native.block_exponents(x, dtype), strict=True):
        same_bits(ours, theirs)
    agreed = np.minimum(e0.astype(np.int32) + raised, 127).astype(np.int8)
    same_bits(fixed_point.quantize(x, dtype, agreed, world_size), native.quantize(x, dtype, agreed, world_size))
    same_bits(fixed_point.count_non_finite(x, dtype), native.count_non_finite(x, dtype))
    same_bits(x, before)


@many
@given(
    kind=kinds,
    numel=lengths,
    dtype=st.sampled_from(FLOATS),
    op=st.sampled_from(list(OpCode)),
    world_size=world_sizes,
    full_range=st.booleans(),
    seed=seeds,
)
def test_dequantize(
    kind: str, numel: int, dtype: DType, op: OpCode, world_size: int, full_range: bool, seed: int
) -> None:
    """Any sums, honest and impossible, at any exponents; non-finite elements stay where the block is flagged."""
    rng = np.random.default_rng(seed)
    limit = fixed_point.sum_limit(world_size)
    bound = 2**31 if full_range else limit
    magnitude = bound >> int(rng.integers(0, 31))
    q = rng.integers(-magnitude, magnitude, numel, endpoint=not full_range).astype(np.int32)
    edges = rng.random(numel) < 0.02
    q[edges] = rng.choice([0, 1, -1, limit, -limit], int(edges.sum()))
    blocks = -(-numel // BLOCK_ELEMS)
    e0 = rng.integers(NO_EXPONENT, 128, blocks).astype(np.int8)
    keep = rng.integers(0, 2, blocks).astype(np.int8)
    x = float_tensor(rng, kind, numel, dtype)

    values, overflow = fixed_point.dequantize(q, dtype, e0, world_size, op)
    kept = fixed_point.non_finite_mask(x, dtype) & (np.repeat(keep, BLOCK_ELEMS)[:numel] != 0)
    values[kept] = x[kept]
    assert native.dequantize_into(q, x, dtype, e0, keep, world_size, op) == overflow
    same_bits(values, x)


@many
@given(kind=kinds, numel=lengths, dtype=st.sampled_from(FLOATS), world_size=world_sizes, seed=seeds)
def test_apply_counts(kind: str, numel: int, dtype: DType, world_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = float_tensor(rng, kind, numel, dtype)
    positive, negative = (rng.integers(0, world_size, numel, endpoint=True) * rng.integers(0, 2, numel) for _ in "+-")
    counts = (positive + (negative << 11)).astype(np.int32)
    if rng.integers(4) == 0:  # sums that no honest worker makes
        counts = rng.integers(-(2**31), 2**31, numel).astype(np.int32)
    y = x.copy()
    fixed_point.apply_counts(x, counts, dtype)
    native.apply_counts(y, counts, dtype)
    same_bits(x, y)


@many
@given(numel=lengths, first_index=st.integers(0, 2**40), seed=seeds)
def test_integers(numel: int, first_index: int, seed: int) -> None:
    """int32 tensors, weighted sums, and the addition that a switch does."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-(2**31), 2**31, numel).astype(np.int32) for _ in "ab")
    none = np.full(-(-numel // BLOCK_ELEMS), NO_EXPONENT, np.int8)
    assert native.weighted_sum(a, first_index) == fixed_point.weighted_sum(a, first_index)
    same_bits(native.quantize(a, DType.INT32, none, 3), a)
    for ours, theirs in zip(
        fixed_point.block_exponents(a, DType.INT32), native.block_exponents(a, DType.INT32), strict=True
    ):
        same_bits(ours, theirs)
    into = np.zeros_like(a)
    assert not native.dequantize_into(a, into, DType.INT32, none, np.zeros_like(none), 3, OpCode.SUM)
    same_bits(into, a)
    total = (a.view(np.uint32) + b.view(np.uint32)).astype(">u4").tobytes()
    assert native.add_wire(a.astype(">i4").tobytes(), b.astype(">i4").tobytes()) == total


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_all_16_bit_values(dtype: DType) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(STORAGE[dtype])
    e0, e1 = fixed_point.block_exponents(x, dtype)
    native_e0, native_e1 = native.block_exponents(x, dtype)
    same_bits(e0, native_e0)
    same_bits(e1, native_e1)
    same_bits(fixed_point.quantize(x, dtype, e0, 1), native.quantize(x, dtype, e0, 1))
    same_bits(fixed_point.count_non_finite(x, dtype), native.count_non_finite(x, dtype))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("exponent", [-127, -126, 0, 5, 9, 15, 16, 127])
def test_rounding_to_16_bits_at_every_tie(dtype: DType, exponent: int) -> None:
    """One worker: the result is q · 2^(exponent − 29). Runs of 18-bit integers at each size cross every tie of both formats."""
    q = np.concatenate([np.arange(2**17, 2**17 + 2**13) << shift for shift in range(0, 13)]).astype(np.int32)
    q = np.concatenate([q, -q, np.arange(-(2**12), 2**12, dtype=np.int32), q - 1, q + 1])
    e0 = np.full(-(-q.size // BLOCK_ELEMS), exponent, np.int8)
    x = np.zeros(q.size, STORAGE[dtype])
    values, _ = fixed_point.dequantize(q, dtype, e0, 1, OpCode.SUM)
    native.dequantize_into(q, x, dtype, e0, np.zeros_like(e0), 1, OpCode.SUM)
    same_bits(values, x)


def test_wrong_arguments_are_refused() -> None:
    x = np.zeros(300, np.float32)
    e0 = np.zeros(2, np.int8)
    with pytest.raises(ValueError, match="dtype code"):
        native.block_exponents(x, 5)
    with pytest.raises(ValueError, match="item size"):
        native.quantize(x, DType.FLOAT16, e0, 2)
    with pytest.raises(ValueError, match="exponent"):
        native.quantize(x, DType.FLOAT32, e0[:1], 2)
    with pytest.raises(ValueError, match="world_size"):
        native.quantize(x, DType.FLOAT32, e0, 0)
    with pytest.raises(ValueError, match="length"):
        native.dequantize_into(np.zeros(299, np.int32), x, DType.FLOAT32, e0, e0, 2, OpCode.SUM)
    assert not native.set_kernels("abacus")


@pytest.mark.torch
def test_the_applications_flush_to_zero_mode_changes_no_bit() -> None:
    torch = pytest.importorskip("torch")
    x = np.full(256, 1e-40, np.float32)
    e0, _ = fixed_point.block_exponents(x, DType.FLOAT32)
    expected = native.quantize(x, DType.FLOAT32, e0, 4)
    assert expected.all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        np.testing.assert_array_equal(native.quantize(x, DType.FLOAT32, e0, 4), expected)
    finally:
        torch.set_flush_denormal(False)
