"""An allreduce of all workers' tensors at once: the bits that every path, packet size, datapath and loss pattern must give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netsum.protocol import fixed_point
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.operation import Tensor


def reference_allreduce(tensors: Sequence[Tensor], dtype: DType, op: OpCode = OpCode.SUM) -> Tensor:
    """``tensors``: one 1-D array a rank, equal lengths (bfloat16 as uint16). Returns the result; the inputs stay as they are.

    SPEC.md section 2 without packets: agree on exponents, quantize, sum modulo 2^32, dequantize, count non-finite elements.
    """
    world_size = len(tensors)
    if dtype is DType.INT32:
        total = np.zeros(tensors[0].size, np.int32)
        for x in tensors:
            total += x
        return total
    pairs = [fixed_point.block_exponents(x, dtype) for x in tensors]
    e0 = np.maximum.reduce([e0 for e0, _ in pairs])
    flagged = np.repeat(np.maximum.reduce([e1 for _, e1 in pairs]), fixed_point.BLOCK_ELEMS)[: tensors[0].size] != 0
    total = np.zeros(tensors[0].size, np.int32)
    for x in tensors:
        total += fixed_point.quantize(x, dtype, e0, world_size)
    result, overflow = fixed_point.dequantize(total, dtype, e0, world_size, op)
    assert not overflow
    if flagged.any():
        counts = np.zeros(total.size, np.int32)
        for x in tensors:
            written = np.where(flagged & fixed_point.non_finite_mask(x, dtype), x, result)
            counts += np.where(flagged, fixed_point.count_non_finite(written, dtype), 0).astype(np.int32)
        fixed_point.apply_counts(result, counts, dtype)
    return result
