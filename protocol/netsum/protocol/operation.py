"""One operation as a stream of packets (SPEC.md section 3): what packet p carries, and what its result means.

Everything here is about one tensor. Slots, numbers and times are the window's and the worker machine's.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netsum.protocol import fixed_point, wire
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.fixed_point import NO_EXPONENT

_EXPONENT_WEIGHT = 0x9E3779B1
_MASK = 0xFFFFFFFF

Pairs = NDArray[np.int8]  # (e0, e1) a row
Tensor = NDArray[Any]  # 1-D; float32, float16, uint16 (bfloat16) or int32


class IntegrityFailure(Exception):  # noqa: N818 - an outcome, turned into a Completion
    """The result cannot be the sum of the workers' contributions."""


class SumOverflow(Exception):  # noqa: N818
    """A sum beyond what honest contributions can reach."""


def description_crc(index: int, numel: int, dtype: DType, op: OpCode) -> int:
    """h of SPEC.md: ranks that disagree on the operation fail its integrity check."""
    return zlib.crc32(struct.pack(">QQBB", index, numel, dtype, op))


class Operation:
    """State of one allreduce on one worker.

    Invariants: ``tensor[chunk y]`` holds this worker's input until the result of payload chunk y is written, once; exponents are
    agreed for a chunk exactly when the result of the packet that carried them is in.
    """

    def __init__(
        self, index: int, tensor: Tensor, dtype: DType, op: OpCode, *, slots: int, chunk_elems: int, world_size: int
    ) -> None:
        self.index, self.tensor, self.dtype, self.op = index, tensor, dtype, op
        self._slots, self._chunk_elems, self._world_size = slots, chunk_elems, world_size
        self.base: int | None = None  # running number of packet 0; known when the operation before is sealed
        self.chunks = -(-tensor.size // chunk_elems)
        self.lag = min(slots, self.chunks) if dtype.is_float else 0
        self._pairs = wire.exponent_pairs(chunk_elems)
        self._own = np.zeros((self.chunks, self._pairs, 2), np.int8)
        self._agreed = np.zeros((self.chunks, self._pairs, 2), np.int8)
        self._is_agreed = np.zeros(self.chunks, bool)
        self._chunks_unagreed = self.chunks if dtype.is_float else 0
        self._non_finite_blocks: list[int] = []
        self._data_unanswered = self.chunks
        self._unsent = self.chunks  # payload and counts chunks not sent yet; grows when sealed
        self._unanswered = 0  # packets; meaningful once sealed
        self._answered = 0
        self.any_result_written = False
        self._own_sums: dict[int, int] = {}
        self._result_sums: dict[int, int] = {}
        self._exponent_sums: dict[int, int] = {}
        self._received_integrity: list[int] = []
        self._crc = description_crc(index, tensor.size, dtype, op)
        self.sealed = False
        self.counts_chunks = 0
        self.integrity_chunks = 0
        if not self._chunks_unagreed:
            self._seal()

    # -- layout ----------------------------------------------------------------------------------------------------

    @property
    def packets(self) -> int:
        """P once sealed; before, the packets that are certain."""
        return self.lag + self.chunks + self.counts_chunks + self.integrity_chunks

    @property
    def complete(self) -> bool:
        return self.sealed and self._answered == self.packets

    @property
    def non_finite_blocks(self) -> int:
        return len(self._non_finite_blocks)

    @property
    def _groups(self) -> int:
        return -(-(self.chunks + self.counts_chunks) // self._slots)

    def _seal(self) -> None:
        self.sealed = True
        if self.dtype.is_float and self.chunks:
            e1 = self._block_pairs()[:, 1]
            self._non_finite_blocks = [int(b) for b in np.flatnonzero(e1)]
            self.counts_chunks = -(-len(self._non_finite_blocks) * wire.BLOCK_ELEMS // self._chunk_elems)
            self._unsent += self.counts_chunks
            for j, (e0, flag) in enumerate(self._block_pairs().tolist()):
                group = j * wire.BLOCK_ELEMS // self._chunk_elems // self._slots
                term = (2 * j + 1) * _EXPONENT_WEIGHT * (e0 % 256 + 256 * flag)
                self._exponent_sums[group] = (self._exponent_sums.get(group, 0) + term) & _MASK
        self.integrity_chunks = -(-self._groups // self._chunk_elems)
        self._received_integrity = [0] * self._groups

    def _block_pairs(self) -> Pairs:
        """Agreed pair of each block, (blocks, 2)."""
        flat: Pairs = self._agreed.reshape(-1, 2)
        per_block = max(1, wire.BLOCK_ELEMS // self._chunk_elems)
        blocks = -(-self.tensor.size // wire.BLOCK_ELEMS)
        if per_block == 1:
            return flat[:blocks]
        starts = np.arange(0, len(flat), per_block)
        return np.maximum.reduceat(flat, starts, axis=0)

    # -- sending ---------------------------------------------------------------------------------------------------

    def may_send(self, packet: int) -> bool:
        """Are all results in that packet ``packet`` is made from? (Whether its slot is free is the caller's question.)"""
        y = packet - self.lag
        if y < 0:
            return True
        if y < self.chunks:
            return not self.dtype.is_float or bool(self._is_agreed[self._siblings(y)].all())
        if not self.sealed:
            return False
        if y < self.chunks + self.counts_chunks:
            return self._data_unanswered == 0
        return self._unsent == 0

    def _siblings(self, y: int) -> slice:
        """Chunks that share a block with chunk y."""
        per_block = max(1, wire.BLOCK_ELEMS // self._chunk_elems)
        start = y // per_block * per_block
        return slice(start, min(start + per_block, self.chunks))

    def build(self, packet: int) -> tuple[bytes, bytes | None]:
        """Exponents and payload of a packet, for the first and only time; payload None when there is none yet."""
        pairs = np.full((self._pairs, 2), (NO_EXPONENT, 0), np.int8)
        if self.dtype.is_float and packet < self.chunks:
            pairs = self._own[packet] = self._own_pairs(packet)
        y = packet - self.lag
        if y < 0:
            return pairs.tobytes(), None
        values = self._payload(y)
        if y < self.chunks + self.counts_chunks:
            self._unsent -= 1
            self._add(self._own_sums, y, values)
        return pairs.tobytes(), values.astype(">i4").tobytes()

    def _own_pairs(self, chunk: int) -> Pairs:
        pairs = np.full((self._pairs, 2), (NO_EXPONENT, 0), np.int8)
        e0, e1 = fixed_point.block_exponents(self._chunk(chunk), self.dtype)
        pairs[: len(e0), 0], pairs[: len(e1), 1] = e0, e1
        return pairs

    def _payload(self, y: int) -> NDArray[np.int32]:
        values = np.zeros(self._chunk_elems, np.int32)
        if y < self.chunks:
            x = self._chunk(y)
            values[: x.size] = fixed_point.quantize(x, self.dtype, self._exponents(y), self._world_size)
        elif y < self.chunks + self.counts_chunks:
            for part, block_part in self._counted_parts(y):
                x = self.tensor[block_part]
                values[part.start : part.start + x.size] = fixed_point.count_non_finite(x, self.dtype)
        else:
            first = (y - self.chunks - self.counts_chunks) * self._chunk_elems
            for i, group in enumerate(range(first, min(first + self._chunk_elems, self._groups))):
                element = self._own_sums.get(group, 0) + self._exponent_sums.get(group, 0) + self._crc
                values[i] = np.uint32(element & _MASK).astype(np.int32)
        return values

    def _exponents(self, y: int) -> NDArray[np.int8]:
        """Agreed e0 of the blocks in chunk y (for a quarter block: of its block)."""
        if self._chunk_elems < wire.BLOCK_ELEMS:
            quarters: NDArray[np.int8] = self._agreed[self._siblings(y), 0, 0].max(keepdims=True)
            return quarters
        e0: NDArray[np.int8] = self._agreed[y, :, 0]
        return e0

    def _counted_parts(self, y: int) -> list[tuple[slice, slice]]:
        """For counts chunk y: (positions in the chunk, elements of the tensor), a block or a part of one each."""
        part_elems = min(self._chunk_elems, wire.BLOCK_ELEMS)
        first = (y - self.chunks) * self._chunk_elems
        parts = []
        for offset in range(0, self._chunk_elems, part_elems):
            ordinal, within = divmod(first + offset, wire.BLOCK_ELEMS)
            if ordinal < len(self._non_finite_blocks):
                start = self._non_finite_blocks[ordinal] * wire.BLOCK_ELEMS + within
                parts.append((slice(offset, offset + part_elems), slice(start, start + part_elems)))
        return parts

    # -- results ---------------------------------------------------------------------------------------------------

    def accept(self, packet: int, pairs: Pairs, values: NDArray[np.int32] | None) -> None:
        """The result of ``packet``: pairs (pairs, 2), values (chunk_elems,) or None.

        Raises :class:`IntegrityFailure` or :class:`SumOverflow`; the operation is then lost.
        """
        self._answered += 1
        if self.dtype.is_float and packet < self.chunks:
            self._agree(packet, pairs)
        y = packet - self.lag
        if y < 0 or values is None:
            self._check_complete()
            return
        if y < self.chunks:
            self._write(y, values)
        elif y < self.chunks + self.counts_chunks:
            for part, block_part in self._counted_parts(y):
                x = self.tensor[block_part]
                fixed_point.apply_counts(x, values[part][: x.size], self.dtype)
        else:
            first = (y - self.chunks - self.counts_chunks) * self._chunk_elems
            for i, group in enumerate(range(first, min(first + self._chunk_elems, self._groups))):
                self._received_integrity[group] = int(values[i]) & _MASK
        if y < self.chunks + self.counts_chunks:
            self._add(self._result_sums, y, values)
        self._check_complete()

    def _agree(self, chunk: int, pairs: Pairs) -> None:
        if (pairs < self._own[chunk]).any():
            raise IntegrityFailure(f"the agreed exponents of chunk {chunk} are below this rank's own")
        self._agreed[chunk] = pairs
        self._is_agreed[chunk] = True
        self._chunks_unagreed -= 1
        if not self._chunks_unagreed:
            self._seal()

    def _write(self, y: int, values: NDArray[np.int32]) -> None:
        self.any_result_written = True  # also when a sum turns out too large: the native twin finds out while it writes
        x = self._chunk(y)
        result, overflow = fixed_point.dequantize(
            values[: x.size], self.dtype, self._exponents(y), self._world_size, self.op
        )
        if overflow:
            raise SumOverflow(f"a sum in chunk {y} is larger than {self._world_size} workers can reach")
        if self.dtype.is_float:
            keep = fixed_point.non_finite_mask(x, self.dtype)
            if self._chunk_elems < wire.BLOCK_ELEMS:
                flagged = np.repeat(self._agreed[self._siblings(y), 0, 1].max(keepdims=True), x.size)
            else:
                flagged = np.repeat(self._agreed[y, :, 1], wire.BLOCK_ELEMS)[: x.size]
            keep &= flagged != 0
            x[~keep] = result[~keep]
        else:
            x[:] = result
        self._data_unanswered -= 1

    def _check_complete(self) -> None:
        if not self.complete:
            return
        for group, received in enumerate(self._received_integrity):
            exponents = self._exponent_sums.get(group, 0) + self._crc
            expected = (self._result_sums.get(group, 0) + self._world_size * exponents) & _MASK
            if received != expected:
                raise IntegrityFailure(
                    f"integrity element {group}: received {received:#010x}, computed {expected:#010x} from the result"
                )

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _chunk(self, y: int) -> Tensor:
        chunk: Tensor = self.tensor[y * self._chunk_elems : (y + 1) * self._chunk_elems]
        return chunk

    def _add(self, sums: dict[int, int], y: int, values: NDArray[np.int32]) -> None:
        group = y // self._slots
        weighted = fixed_point.weighted_sum(values, y * self._chunk_elems)
        sums[group] = (sums.get(group, 0) + weighted) & _MASK
