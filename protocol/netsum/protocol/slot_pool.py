"""Aggregator slots in two versions (SPEC.md section 4): the state that the switch keeps for one job.

The algorithm is SwitchML's (NSDI'21, Algorithm 3): a bit for each worker, two versions so that a result can be replayed while the next
chunk is summed. Added to it: each (slot, version) remembers the running number of its contributions, so that a packet delayed for two
rounds is recognized instead of summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from netsum.protocol import wire
from netsum.protocol.wire import MsgType, serial_less


class Verdict(Enum):
    """What became of a contribution. The last three are drop reasons."""

    CONSUMED = "consumed"  # summed, others are missing
    COMPLETE = "complete"  # summed, it was the last: send the result to all
    REPLAY = "replay"  # repeated after completion: send the result to this worker
    DUPLICATE = "duplicate"  # repeated before completion
    SLOT_BUSY = "slot_busy"
    STALE_NUMBER = "stale_number"
    KIND_MISMATCH = "kind_mismatch"


@dataclass(slots=True)
class _Aggregator:
    """One (slot, version). ``number`` is None until it is claimed for the first time."""

    exponents: NDArray[np.int8]  # e0, e1, e0, e1, …: maxima so far
    values: NDArray[np.int32]  # sums so far, modulo 2^32
    number: int | None = None
    kind: int = 0
    seen: int = 0  # bit r: rank r has contributed
    count: int = 0


class SlotPool:
    """``slots`` aggregators in two versions for ``world_size`` workers.

    Invariants: ``count`` is the number of bits in ``seen``; a result never changes between completion and the next claim; a claim never
    discards an incomplete sum.
    """

    def __init__(self, slots: int, world_size: int, chunk_elems: int) -> None:
        self.world_size = world_size
        pairs = wire.exponent_pairs(chunk_elems)
        self._aggregators = [
            [_Aggregator(np.zeros(2 * pairs, np.int8), np.zeros(chunk_elems, np.int32)) for _ in range(2)]
            for _ in range(slots)
        ]

    def contribute(
        self,
        slot: int,
        version: int,
        number: int,
        kind: int,
        rank: int,
        exponents: NDArray[np.int8],
        payload: NDArray[np.int32] | None,
    ) -> Verdict:
        """Adds rank's contribution ``number`` (24 bits), or says why not.

        ``exponents``: int8 of 2·pairs; ``payload``: int32 of chunk_elems in any byte order, None for kind EXPONENTS.
        """
        aggregator = self._aggregators[slot][version]
        stored = aggregator.number
        if stored is None or serial_less(stored, number):
            if stored is not None and aggregator.count < self.world_size:
                return Verdict.SLOT_BUSY
            self._claim(aggregator, number, kind, rank, exponents, payload)
        elif stored != number:
            return Verdict.STALE_NUMBER
        elif aggregator.kind != kind:
            return Verdict.KIND_MISMATCH
        elif aggregator.seen >> rank & 1:
            return Verdict.REPLAY if aggregator.count == self.world_size else Verdict.DUPLICATE
        else:
            np.maximum(aggregator.exponents, exponents, out=aggregator.exponents)
            if payload is not None:
                aggregator.values += payload
            aggregator.seen |= 1 << rank
            aggregator.count += 1
        return Verdict.COMPLETE if aggregator.count == self.world_size else Verdict.CONSUMED

    @staticmethod
    def _claim(
        aggregator: _Aggregator,
        number: int,
        kind: int,
        rank: int,
        exponents: NDArray[np.int8],
        payload: NDArray[np.int32] | None,
    ) -> None:
        aggregator.number, aggregator.kind = number, kind
        aggregator.seen, aggregator.count = 1 << rank, 1
        aggregator.exponents[:] = exponents
        if payload is not None:
            aggregator.values[:] = payload

    def result(self, slot: int, version: int) -> bytes:
        """Exponents and, for kind DATA, payload as they go on the wire."""
        aggregator = self._aggregators[slot][version]
        body = aggregator.exponents.tobytes()
        return body + aggregator.values.astype(">i4").tobytes() if aggregator.kind == MsgType.DATA else body

    def missing_bitmap(self, slot: int, version: int) -> bytes:
        """Body of a PENDING: bit r, least significant first, set when rank r is missing."""
        missing = ~self._aggregators[slot][version].seen & ((1 << self.world_size) - 1)
        return missing.to_bytes((self.world_size + 7) // 8, "little")

    def in_use(self) -> int:
        """Aggregators that are claimed and incomplete."""
        return sum(1 for a in self._all() if 0 < a.count < self.world_size)

    def awaited_ranks(self) -> list[int]:
        """Ranks missing from the oldest incomplete aggregator (the one with the smallest number)."""
        oldest: _Aggregator | None = None
        for a in self._all():
            if 0 < a.count < self.world_size and (oldest is None or serial_less(a.number or 0, oldest.number or 0)):
                oldest = a
        return [] if oldest is None else [r for r in range(self.world_size) if not oldest.seen >> r & 1]

    def _all(self) -> list[_Aggregator]:
        return [a for versions in self._aggregators for a in versions]
