"""The C++ kernels, in every form that this processor has, give numpy's bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netsum.native import _native
from netsum.protocol import fixed_point
from netsum.protocol.dtypes import DType, OpCode

native = _native.fixed_point
ALL_KERNELS = ("scalar", "avx2", "avx512")

special_bits = st.sampled_from(
    [0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00001, 0x3F7FFFFF, 0x3F800000]
)
element_bits = st.one_of(special_bits, st.integers(0, 2**32 - 1))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, DType]:
    dtype = draw(st.sampled_from([DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]))
    pattern = draw(st.lists(element_bits, min_size=1, max_size=40))
    numel = draw(st.sampled_from([1, 7, 16, 63, 64, 65, 255, 256, 257, 700]))
    bits = np.resize(np.array(pattern, np.uint32), numel)
    if dtype is DType.FLOAT32:
        return bits.view(np.float32).copy(), dtype
    narrow = (bits >> 16).astype(np.uint16)
    return (narrow.view(np.float16) if dtype is DType.FLOAT16 else narrow), dtype


@pytest.fixture(params=ALL_KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    before = native.kernels_in_use()
    if not native.set_kernels(request.param):
        pytest.skip(f"this processor has no {request.param}")
    request.addfinalizer(lambda: native.set_kernels(before))
    return str(request.param)


@pytest.mark.parametrize("name", ALL_KERNELS)
@settings(max_examples=150, deadline=None)
@given(case=tensors(), world_size=st.sampled_from([1, 2, 3, 4, 7, 32, 256, 1024]), op=st.sampled_from(list(OpCode)), seed=st.integers(0, 99))
def test_kernels_equal_numpy(name: str, case: tuple[np.ndarray, DType], world_size: int, op: OpCode, seed: int) -> None:
    if not native.set_kernels(name):
        pytest.skip(f"this processor has no {name}")
    x, dtype = case
    e0, e1 = fixed_point.block_exponents(x, dtype)
    native_e0, native_e1 = native.block_exponents(x, dtype)
    np.testing.assert_array_equal(e0, native_e0)
    np.testing.assert_array_equal(e1, native_e1)
    q = fixed_point.quantize(x, dtype, e0, world_size)
    np.testing.assert_array_equal(q, native.quantize(x, dtype, e0, world_size))
    assert fixed_point.weighted_sum(q, seed) == native.weighted_sum(q, seed)
    sums = (q.astype(np.int64) * np.random.default_rng(seed).integers(0, world_size + 1)).astype(np.int32)
    expected, overflow = fixed_point.dequantize(sums, dtype, e0, world_size, op)
    written = x.copy()
    assert native.dequantize_into(sums, written, dtype, e0, np.zeros_like(e0), world_size, op) is overflow
    np.testing.assert_array_equal(expected.view(np.uint8), written.view(np.uint8))
    kept = x.copy()
    native.dequantize_into(sums, kept, dtype, e0, np.ones_like(e0), world_size, op)
    mask = fixed_point.non_finite_mask(x, dtype)
    np.testing.assert_array_equal(np.where(mask, x, expected).view(np.uint8), kept.view(np.uint8))
    counts = fixed_point.count_non_finite(x, dtype)
    np.testing.assert_array_equal(counts, native.count_non_finite(x, dtype))
    ours, theirs = expected.copy(), expected.copy()
    fixed_point.apply_counts(ours, counts, dtype)
    native.apply_counts(theirs, counts, dtype)
    np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_wire_addition_wraps_at_any_length(kernels: str) -> None:
    rng = np.random.default_rng(0)
    for numel in (1, 3, 15, 16, 17, 64, 100):
        a, b = (rng.integers(-(2**31), 2**31, numel).astype(">i4") for _ in range(2))
        assert native.add_wire(a.tobytes(), b.tobytes()) == (a + b).astype(">i4").tobytes(), kernels


def test_all_halves_convert_like_numpy(kernels: str) -> None:
    """Every float16 through a one-worker sum: widening and narrowing in C++ are numpy's."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    e0, _ = fixed_point.block_exponents(x, DType.FLOAT16)
    q = native.quantize(x, DType.FLOAT16, e0, 1)
    np.testing.assert_array_equal(q, fixed_point.quantize(x, DType.FLOAT16, e0, 1))
    written = x.copy()
    native.dequantize_into(q, written, DType.FLOAT16, e0, np.zeros_like(e0), 1, OpCode.SUM)
    np.testing.assert_array_equal(written.view(np.uint16), fixed_point.dequantize(q, DType.FLOAT16, e0, 1, OpCode.SUM)[0].view(np.uint16))
