"""Allreduce over a group of peers with the bits of the switch: same blocks, exponents, integers and counts (SPEC.md section 2).

Types that the switch does not carry are reduced in their own type ("exact ring").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from netsum.host_agent.peer_group import PeerGroup
from netsum.host_agent.peer_messages import Description
from netsum.host_agent.tensors import DTYPE_NAMES, HostTensor
from netsum.native._native import fixed_point
from netsum.protocol.dtypes import OP_BY_NAME, DType, OpCode
from netsum.protocol.fixed_point import BLOCK_ELEMS

#: Elements reduced at a time; whole blocks, so that it does not show in the result.
SEGMENT_ELEMS = 1 << 20
assert SEGMENT_ELEMS % BLOCK_ELEMS == 0


class RingOverflowError(Exception):
    """A sum is larger than the ranks' contributions can make it."""


def agree_on_description(group: PeerGroup, own: Description) -> dict[int, Description] | None:
    """None when all ranks call the same operation, else every rank's description."""
    table = np.zeros((group.world_size, 4), np.int64)
    table[group.rank] = own.call, own.numel, DTYPE_NAMES.index(own.dtype), list(OP_BY_NAME).index(own.op)
    group.allreduce_max(table.reshape(-1))
    if (table == table[0]).all():
        return None
    return {
        rank: Description(
            int(call), own.path, own.operation, int(numel), DTYPE_NAMES[int(dtype)], list(OP_BY_NAME)[int(op)]
        )
        for rank, (call, numel, dtype, op) in enumerate(table)
    }


def allreduce(group: PeerGroup, tensor: HostTensor, op: str) -> None:
    """In place on ``tensor.flat``; on a failure the tensor is poisoned and the group's exception goes on."""
    try:
        if tensor.switch_dtype is None or tensor.switch_dtype is DType.INT32:
            group.allreduce_sum(tensor.flat)
            if op == "avg":
                np.divide(tensor.flat, group.world_size, out=tensor.flat)
            return
        for start in range(0, tensor.flat.size, SEGMENT_ELEMS):
            _allreduce_segment(group, tensor.flat[start : start + SEGMENT_ELEMS], tensor.switch_dtype, OP_BY_NAME[op])
    except BaseException:
        tensor.poison()
        raise


def _allreduce_segment(group: PeerGroup, x: NDArray[Any], dtype: DType, op: OpCode) -> None:
    """``x``: 1-D, whole blocks but for the end of the tensor; overwritten by the result."""
    n = group.world_size
    pairs = np.concatenate(fixed_point.block_exponents(x, dtype))
    group.allreduce_max(pairs)
    e0, e1 = np.split(pairs, 2)
    q = fixed_point.quantize(x, dtype, e0, n)
    group.allreduce_sum(q)
    if fixed_point.dequantize_into(q, x, dtype, e0, e1, n, op):
        raise RingOverflowError(f"a sum is larger than {n} ranks can make it")
    if not e1.any():
        return
    flagged = np.repeat(e1 != 0, BLOCK_ELEMS)[: x.size]
    special = x[flagged]
    counts = fixed_point.count_non_finite(special, dtype)
    group.allreduce_sum(counts)
    fixed_point.apply_counts(special, counts, dtype)
    x[flagged] = special
