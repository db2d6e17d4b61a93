"""Fixed point (SPEC.md section 2): edge values, error bounds, and the numeric cases C01, C03, C05, C06, C08 and C09, without packets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from netsum.protocol import fixed_point
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.fixed_point import BLOCK_ELEMS, NO_EXPONENT
from netsum.protocol.reference import reference_allreduce

F32 = NDArray[np.float32]
FLT_MAX = float(np.finfo(np.float32).max)
HALF_DENORMAL_STEP = 2.0**-150  # float32 rounds a denormal result by up to this, whatever its size


def allreduce(tensors: Sequence[F32], op: OpCode = OpCode.SUM) -> F32:
    return reference_allreduce(tensors, DType.FLOAT32, op)


def block_max(tensors: Sequence[F32]) -> NDArray[np.float64]:
    """Per element: the largest finite |x| over all workers in the element's block."""
    largest = np.zeros(tensors[0].size)
    for x in tensors:
        magnitude = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
        for start in range(0, x.size, BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            largest[block] = np.maximum(largest[block], magnitude[block].max())
    return largest


def assert_within_bound(result: F32, tensors: Sequence[F32]) -> None:
    """The bound of CASES.md, and the sharper one of SPEC.md; ``tensors`` finite, sums within float32."""
    n = len(tensors)
    exact = np.sum([x.astype(np.float64) for x in tensors], axis=0)
    error = np.abs(result.astype(np.float64) - exact)
    largest = block_max(tensors)
    assert (error <= 4 * n**2 * 2.0**-31 * largest + 2.0**-22 * np.abs(exact) + HALF_DENORMAL_STEP).all()
    e0 = np.maximum.reduce([fixed_point.block_exponents(x, DType.FLOAT32)[0] for x in tensors]).astype(np.float64)
    unit = np.repeat(np.where(e0 == NO_EXPONENT, 0.0, 2.0 ** (e0 - fixed_point.scale_exponent(n))), BLOCK_ELEMS)
    # Rounding to float32 is of the computed sum, at most the unit part away from the exact one: hence the factor 1 + 2^-24.
    bound = (n / 2 * unit[: error.size]) * (1 + 2.0**-24) + 2.0**-24 * np.abs(exact) + HALF_DENORMAL_STEP
    assert (error <= bound).all()


def normals(n: int, size: int, scale: float = 1.0) -> list[F32]:
    return [np.random.default_rng(1234 + r).normal(0, scale, size).astype(np.float32) for r in range(n)]


@pytest.mark.parametrize(
    ("world_size", "k", "limit"),
    [(1, 29, 1 << 30), (2, 28, 1 << 30), (3, 27, 3 << 28), (4, 27, 1 << 30), (5, 26, 5 << 27), (1024, 19, 1 << 30)],
)
def test_headroom(world_size: int, k: int, limit: int) -> None:
    assert fixed_point.scale_exponent(world_size) == k
    assert fixed_point.sum_limit(world_size) == limit


@pytest.mark.parametrize(
    ("value", "e0", "e1"),
    [
        (1.0, 0, 0),
        (np.nextafter(np.float32(1), np.float32(0)), -1, 0),
        (-1.5, 0, 0),
        (FLT_MAX, 127, 0),
        (2.0**-126, -126, 0),
        (1e-40, -127, 0),
        (2.0**-149, -127, 0),
        (0.0, NO_EXPONENT, 0),
        (-0.0, NO_EXPONENT, 0),
        (np.inf, NO_EXPONENT, 1),
        (-np.inf, NO_EXPONENT, 1),
        (np.nan, NO_EXPONENT, 1),
    ],
)
def test_block_exponents_of_one_value(value: float, e0: int, e1: int) -> None:
    x = np.zeros(300, np.float32)
    x[299] = value
    exponents, flags = fixed_point.block_exponents(x, DType.FLOAT32)
    assert exponents.tolist() == [NO_EXPONENT, e0]
    assert flags.tolist() == [0, e1]


def test_rounding_is_half_to_even_at_every_position() -> None:
    """Block maximum 1 and one worker: q = x · 2^29. Float32 has halves of a unit only below 2^24 units."""
    ties = np.array([0.5, 1.5, 2.5, 3.5, 4.5, 1000.5, 8388606.5], np.float32)
    expected = np.array([0, 2, 2, 4, 4, 1000, 8388606], np.int32)
    for length in (8, 9, 15, 16, 17, 31, 33, 255, 256):
        for sign in (1, -1):
            x = np.resize(ties, length) * np.float32(sign * 2.0**-29)
            x[0] = 1.0
            q = fixed_point.quantize(x, DType.FLOAT32, np.zeros(1, np.int8), 1)
            assert q[0] == 1 << 29
            np.testing.assert_array_equal(q[1:], sign * np.resize(expected, length)[1:])


@pytest.mark.parametrize("nan_bits", [0x7FC00000, 0x7FA00001, 0xFFC00000, 0xFFA00001])
def test_c01_nan_in_one_element(nan_bits: int) -> None:
    tensors = [((r + 1) * (np.arange(1024) - 512) / 1024).astype(np.float32) for r in range(4)]
    clean = allreduce(tensors)
    tensors[2].view(np.uint32)[700] = nan_bits
    result = allreduce(tensors)
    assert result.view(np.uint32)[700] == 0x7FC00000
    others = np.arange(1024) != 700
    np.testing.assert_array_equal(result[others].view(np.uint32), clean[others].view(np.uint32))
    assert_within_bound(result[others], [np.where(others, x, 0)[others].astype(np.float32) for x in tensors])


@pytest.mark.parametrize(
    ("contributions", "expected"),
    [
        ([np.inf, 1.0, 2.0], np.inf),
        ([-np.inf, 1.0, 2.0], -np.inf),
        ([np.inf, np.inf, 2.0], np.inf),
        ([-np.inf, -np.inf, -np.inf], -np.inf),
        ([np.inf, -np.inf, 2.0], np.nan),
        ([np.nan, np.inf, np.inf], np.nan),
        ([1.0, 2.0, np.nan], np.nan),
    ],
)
def test_non_finite_sums(contributions: list[float], expected: float) -> None:
    tensors = normals(3, 400)
    for x, value in zip(tensors, contributions, strict=True):
        x[399] = value
    for op in OpCode:
        np.testing.assert_array_equal(allreduce(tensors, op)[399], np.float32(expected))


def test_counts_of_1024_workers_do_not_run_into_each_other() -> None:
    for value, expected in ((np.inf, np.inf), (-np.inf, -np.inf), (np.nan, np.nan)):
        count = fixed_point.count_non_finite(np.array([value], np.float32), DType.FLOAT32)
        x = np.zeros(1, np.float32)
        fixed_point.apply_counts(x, (count * fixed_point.MAX_WORLD_SIZE).astype(np.int32), DType.FLOAT32)
        np.testing.assert_array_equal(x, np.float32(expected))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_c03_all_zero(n: int, zero: float) -> None:
    result = allreduce([np.full(10_000, zero, np.float32) for _ in range(n)])
    assert (result.view(np.uint32) == 0).all()  # +0


def test_c03_zero_on_some_workers_and_in_some_blocks() -> None:
    zeros = np.zeros(10_000, np.float32)
    x = normals(1, 10_000)[0]
    tensors = [x, zeros, zeros, zeros]
    assert_within_bound(allreduce(tensors), tensors)
    half = [np.concatenate([zeros[:5000], v]) for v in normals(4, 5000)]
    result = allreduce(half)
    assert (result[:5000] == 0).all()
    assert_within_bound(result, half)


@pytest.mark.parametrize("tiny", [1e-30, 2e-38, 1e-40, 1.4e-45])
def test_c05_tiny_values(tiny: float) -> None:
    value = np.float32(tiny)
    signs = np.where(np.arange(512) % 2, -1, 1).astype(np.float32)
    x = np.concatenate([value * signs, np.ones(256, np.float32)])
    result = allreduce([x] * 4).astype(np.float64)
    exact = 4 * x.astype(np.float64)
    assert (result[512:] == 4.0).all()
    assert (np.sign(result[:512]) == signs).all()
    assert (np.abs(result[:512]) <= 4 * float(value) * (1 + 1e-6)).all()
    assert (np.abs(result - exact)[:512] <= 1e-6 * 4 * float(value) + HALF_DENORMAL_STEP).all()


def test_c06_outlier_hurts_its_own_block_only() -> None:
    tensors = normals(4, 1_000_000, 1e-3)
    clean = allreduce(tensors)
    tensors[0][123456] = 1e4
    result = allreduce(tensors)
    assert_within_bound(result, tensors)
    block = 123456 // BLOCK_ELEMS * BLOCK_ELEMS
    inside = np.zeros(result.size, bool)
    inside[block : block + BLOCK_ELEMS] = True
    np.testing.assert_array_equal(result[~inside].view(np.uint32), clean[~inside].view(np.uint32))
    exact = np.sum([x.astype(np.float64) for x in tensors], axis=0)
    assert np.abs(result - exact)[inside].max() <= 3e-4


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 16, 31, 32, 256, 1000, 1024])
@pytest.mark.parametrize("bits", [0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x7F7FFFFF, 0x00800000])
@pytest.mark.parametrize("sign", [1, -1])
def test_c08_everyone_at_the_block_maximum(n: int, bits: int, sign: int) -> None:
    value = np.array(bits, np.uint32).view(np.float32) * np.float32(sign)
    x = np.full(257, value, np.float32)
    e0, _ = fixed_point.block_exponents(x, DType.FLOAT32)
    q = fixed_point.quantize(x, DType.FLOAT32, e0, n)
    slot = (q.astype(np.int64) * n).astype(np.int32)  # what a slot of 32 bits holds
    assert (slot.astype(np.int64) == q.astype(np.int64) * n).all(), "the sum wrapped"
    result, overflow = fixed_point.dequantize(slot, DType.FLOAT32, e0, n, OpCode.SUM)
    assert not overflow
    average, _ = fixed_point.dequantize(slot, DType.FLOAT32, e0, n, OpCode.AVG)
    unit = 2.0 ** (int(e0[0]) - fixed_point.scale_exponent(n))
    for values, divisor, right in ((result, 1, n * float(value)), (average, n, float(value))):
        in_units = int(slot[0]) / divisor * unit
        assert abs(in_units - right) <= 1e-6 * abs(right)
        if abs(in_units) > FLT_MAX:  # the sum; from 65 workers on also the average of FLT_MAX, which rounds to 2^128
            assert (values == np.float32(sign * np.inf)).all()
        else:
            assert (np.abs(values.astype(np.float64) - in_units) <= 2.0**-23 * abs(in_units)).all()


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 4093, 65537, 1_000_003])
def test_c09_lengths_positions_and_signs(length: int) -> None:
    for c in (0.3, 2.5 * 2.0**-20, -0.7):
        tensors = [np.full(length, c, np.float32)] * 3
        result = allreduce(tensors)
        assert (result.view(np.uint32) == result.view(np.uint32)[0]).all()
        assert_within_bound(result[:1], [x[:1] for x in tensors])
    tensors = normals(3, length)
    for op in OpCode:
        positive, negative = allreduce(tensors, op), allreduce([-x for x in tensors], op)
        np.testing.assert_array_equal(negative, -positive)
        nonzero = positive != 0
        np.testing.assert_array_equal(negative[nonzero].view(np.uint32), (-positive[nonzero]).view(np.uint32))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e36])
def test_error_bound(n: int, scale: float) -> None:
    tensors = normals(n, 3000, scale)
    assert_within_bound(allreduce(tensors), tensors)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_average_divides_once(n: int) -> None:
    tensors = normals(n, 3000)
    exact = np.sum([x.astype(np.float64) for x in tensors], axis=0)
    error = np.abs(allreduce(tensors, OpCode.AVG) - exact / n)
    bound = (4 * n**2 * 2.0**-31 * block_max(tensors) + 2.0**-22 * np.abs(exact)) / n
    assert (error <= bound).all()
    assert (allreduce([np.full(10, 2.0, np.float32)] * n, OpCode.AVG) == 2.0).all()


def test_sum_beyond_float32_is_infinite_and_its_average_right() -> None:
    x = np.full(10, FLT_MAX, np.float32)
    assert (allreduce([x] * 4) == np.inf).all()
    assert (allreduce([-x] * 4) == -np.inf).all()
    np.testing.assert_allclose(allreduce([x] * 4, OpCode.AVG), FLT_MAX, rtol=1e-6)


def test_impossible_sums_are_overflow() -> None:
    limit = fixed_point.sum_limit(3)
    e0 = np.zeros(1, np.int8)
    for value, expected in ((limit, False), (-limit, False), (limit + 1, True), (-limit - 1, True), (-(2**31), True)):
        q = np.array([0, value, 5], np.int32)
        assert fixed_point.dequantize(q, DType.FLOAT32, e0, 3, OpCode.SUM)[1] is expected


def test_int32_wraps_and_is_exact() -> None:
    x = np.array([2**31 - 1, -(2**31), 7], np.int32)
    e0, e1 = fixed_point.block_exponents(x, DType.INT32)
    assert (e0.tolist(), e1.tolist()) == ([NO_EXPONENT], [0])
    q = fixed_point.quantize(x, DType.INT32, e0, 3)
    np.testing.assert_array_equal(q, x)
    values, overflow = fixed_point.dequantize(q, DType.INT32, e0, 3, OpCode.SUM)
    np.testing.assert_array_equal(values, x)
    assert not overflow
    np.testing.assert_array_equal(reference_allreduce([x, x], DType.INT32), np.array([-2, 0, 14], np.int32))


def test_float16_and_bfloat16_round_the_float32_result_once() -> None:
    wide = normals(4, 2000)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        narrow = [x.astype(np.float16) if dtype is DType.FLOAT16 else fixed_point.f32_to_bf16(x) for x in wide]
        back = [x.astype(np.float32) if dtype is DType.FLOAT16 else fixed_point.bf16_to_f32(x) for x in narrow]
        expected = allreduce(back)
        result = reference_allreduce(narrow, dtype)
        if dtype is DType.FLOAT16:
            np.testing.assert_array_equal(result, expected.astype(np.float16))
        else:
            np.testing.assert_array_equal(result, fixed_point.f32_to_bf16(expected))
            # Half a unit of 8 significant bits, seen from the float32 result.
            assert (np.abs(fixed_point.bf16_to_f32(result) - expected) <= np.abs(expected) * 2.0**-8).all()


def test_float16_overflow_is_infinity() -> None:
    x = np.full(300, 60000, np.float16)
    assert (reference_allreduce([x, x], DType.FLOAT16) == np.inf).all()
    assert (reference_allreduce([x, x], DType.FLOAT16, OpCode.AVG) == np.float16(60000)).all()


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # tie, down to even
        (0x3F818000, 0x3F82),  # tie, up to even
        (0x3F808001, 0x3F81),
        (0xBF818000, 0xBF82),
        (0x7F7FFFFF, 0x7F80),  # rounds to infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload would be cut off
        (0x00000001, 0x0000),
        (0x00018000, 0x0002),
    ],
)
def test_float32_to_bfloat16(bits: int, expected: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert fixed_point.f32_to_bf16(x).tolist() == [expected]


def test_weighted_sum_is_the_formula_and_splits() -> None:
    rng = np.random.default_rng(5)
    q = rng.integers(-(2**31), 2**31, 1000).astype(np.int32)
    first = 2**33 + 17
    expected = sum((2 * (first + i) + 1) * int(v) for i, v in enumerate(q)) % 2**32
    assert fixed_point.weighted_sum(q, first) == expected
    parts = fixed_point.weighted_sum(q[:300], first) + fixed_point.weighted_sum(q[300:], first + 300)
    assert parts % 2**32 == expected


def test_inputs_are_not_changed() -> None:
    x = normals(1, 300)[0]
    x[5] = np.nan
    before = x.copy()
    e0, _ = fixed_point.block_exponents(x, DType.FLOAT32)
    fixed_point.quantize(x, DType.FLOAT32, e0, 2)
    fixed_point.count_non_finite(x, DType.FLOAT32)
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))


def test_empty_arrays() -> None:
    for dtype, storage in ((DType.FLOAT32, np.float32), (DType.FLOAT16, np.float16), (DType.INT32, np.int32)):
        x = np.zeros(0, storage)
        e0, e1 = fixed_point.block_exponents(x, dtype)
        assert e0.size == e1.size == 0
        q = fixed_point.quantize(x, dtype, e0, 2)
        values, overflow = fixed_point.dequantize(q, dtype, e0, 2, OpCode.AVG)
        assert (q.size, values.size, values.dtype, overflow) == (0, 0, np.dtype(storage), False)
        assert fixed_point.weighted_sum(q, 3) == 0
