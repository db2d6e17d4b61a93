"""One worker of a job as a pure state machine (SPEC.md sections 3 and 5): tensors and results in, contributions out.

The readable twin of ``native/src/worker_machine.cpp``; a property test holds the two together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netsum.protocol import wire
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.operation import IntegrityFailure, Operation, SumOverflow, Tensor
from netsum.protocol.window import Overdue, Window
from netsum.protocol.wire import NUMBER_MASK, Header, MsgType

#: Reasons to drop a datagram; the counters are ``drop_<reason>``.
DROP_REASONS = (
    "too_short",
    "bad_type",
    "bad_size_code",
    "bad_length",
    "wrong_job",
    "stale_epoch",
    "bad_slot",
    "stale_number",
    "duplicate_result",
    "wrong_source",
)
COUNTERS = (
    "packets_out",
    "bytes_out",
    "packets_in",
    "bytes_in",
    "results",
    "fast_retransmits",
    "timer_retransmits",
    "pendings",
    "operations",
    "non_finite_blocks",
    *(f"drop_{r}" for r in DROP_REASONS),
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker knows of its job. ``first_number``: where the running number starts (tests); a multiple of 2·slots."""

    rank: int
    world_size: int
    job_number: int
    epoch: int
    slot_base: int
    slots: int
    chunk_elems: int
    short_exponents: bool = True
    initial_rto_us: int = 50_000
    min_rto_us: int = 20_000
    max_rto_us: int = 1_000_000
    network_timeout_us: int = 5_000_000
    straggler_timeout_us: int = 30_000_000
    first_number: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """An operation is over. ``error``: "none", "switch_silent", "peers_missing", "integrity", "overflow" or "aborted"."""

    operation: int
    error: str
    missing_ranks: Sequence[int] = ()
    detail: str = ""


class WorkerMachine:
    """Invariants: a slot has at most one packet outstanding; packets of a slot are sent in the order of their numbers; after a failure
    nothing is sent any more and every operation completes with an error."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises :class:`ValueError` when the configuration breaks the rules of SPEC.md."""
        if (
            config.slots < 4
            or config.slots & (config.slots - 1)
            or config.slot_base + config.slots > wire.SLOT_MASK + 1
        ):
            raise ValueError(
                f"{config.slots} slots from {config.slot_base}: a power of two, at least 4, within 15 bits"
            )
        if config.chunk_elems not in wire.SIZE_CODE_BY_CHUNK_ELEMS:
            raise ValueError(f"no size code for {config.chunk_elems} elements")
        if not 0 <= config.rank < config.world_size:
            raise ValueError(f"rank {config.rank} of {config.world_size}")
        if config.first_number % (2 * config.slots):
            raise ValueError("first_number must be a multiple of 2 * slots")
        self.config = config
        self.window = Window(
            config.slots,
            initial_rto_us=config.initial_rto_us,
            min_rto_us=config.min_rto_us,
            max_rto_us=config.max_rto_us,
            network_timeout_us=config.network_timeout_us,
            straggler_timeout_us=config.straggler_timeout_us,
        )
        self._operations: deque[Operation] = deque()  # unfinished, in program order
        self._submitted = 0
        self._next_base: int | None = (
            config.first_number
        )  # of the next operation without one; None: the last is not sealed
        self._next_number = [config.first_number + slot for slot in range(config.slots)]  # smallest unsent, by slot
        self._last_answered: list[int | None] = [None] * config.slots
        self._images: list[bytes] = [b""] * config.slots  # what is outstanding, for resends
        self._completions: deque[Completion] = deque()
        self._counters: Counter[str] = Counter()
        self.failed = False

    # -- input -----------------------------------------------------------------------------------------------------

    def submit(self, tensor: Tensor, dtype: DType, op: OpCode, now_us: int) -> int:
        """Starts an allreduce of a 1-D array, in place. Returns its index. The array is the machine's until its completion."""
        del now_us  # the native twin has it in its interface; packets are stamped when they are sent
        index = self._submitted
        self._submitted += 1
        if self.failed:
            self._completions.append(Completion(index, "aborted", (), "an operation before this one failed"))
        elif not tensor.size:
            self._finish(Completion(index, "none"))
        else:
            config = self.config
            self._operations.append(
                Operation(
                    index,
                    tensor,
                    dtype,
                    op,
                    slots=config.slots,
                    chunk_elems=config.chunk_elems,
                    world_size=config.world_size,
                )
            )
            self._assign_bases()
        return index

    def handle(self, datagram: bytes, now_us: int) -> None:
        """One datagram from the switch."""
        self._counters["packets_in"] += 1
        self._counters["bytes_in"] += len(datagram)
        reason = self._handle(datagram, now_us)
        if reason is not None:
            self._counters[f"drop_{reason}"] += 1

    def _handle(self, datagram: bytes, now_us: int) -> str | None:
        config = self.config
        if len(datagram) < wire.HEADER_BYTES:
            return "too_short"
        header = wire.unpack_header(datagram)
        if header.msg_type not in (MsgType.DATA, MsgType.PENDING, MsgType.EXPONENTS):
            return "bad_type"
        if header.job_number != config.job_number:
            return "wrong_job"
        if wire.CHUNK_ELEMS_BY_SIZE_CODE.get(header.size_code) != config.chunk_elems:
            return "bad_size_code"
        if len(datagram) < self._needed_bytes(header.msg_type):
            return "bad_length"
        if header.epoch != config.epoch:
            return "stale_epoch"
        slot = header.slot - config.slot_base
        in_range = 0 <= slot < config.slots
        if not in_range or (slot, header.version) != (header.number % config.slots, header.number // config.slots % 2):
            return "bad_slot"
        number = self.window.number_at(slot)
        if number is not None and number & NUMBER_MASK == header.number:
            if header.msg_type == MsgType.PENDING:
                self._counters["pendings"] += 1
                self.window.pending(self._ranks_of_bitmap(datagram), now_us)
                return None
            if header.msg_type == self._images[slot][0] >> 4:
                self._accept(slot, number, datagram, now_us)
                return None
            return "stale_number"
        if header.msg_type == MsgType.PENDING or header.number == self._last_answered[slot]:
            return "duplicate_result"
        return "stale_number"

    def _needed_bytes(self, msg_type: int) -> int:
        if msg_type == MsgType.PENDING:
            return wire.pending_bytes(self.config.world_size)
        if msg_type == MsgType.EXPONENTS:
            return wire.exponents_bytes(self.config.chunk_elems)
        return wire.data_bytes(self.config.chunk_elems)

    def _ranks_of_bitmap(self, datagram: bytes) -> list[int]:
        bits = int.from_bytes(datagram[wire.HEADER_BYTES : wire.pending_bytes(self.config.world_size)], "little")
        return [r for r in range(self.config.world_size) if bits >> r & 1]

    def _accept(self, slot: int, number: int, datagram: bytes, now_us: int) -> None:
        self._counters["results"] += 1
        self.window.answered(slot, now_us)
        self._last_answered[slot] = number & NUMBER_MASK
        operation = self._operation_of(number)
        assert operation is not None
        assert operation.base is not None
        chunk_elems = self.config.chunk_elems
        body = np.frombuffer(datagram, np.uint8)
        pairs = body[wire.HEADER_BYTES : wire.exponents_bytes(chunk_elems)].view(np.int8).reshape(-1, 2)
        values = None
        if datagram[0] >> 4 == MsgType.DATA:
            payload = body[wire.exponents_bytes(chunk_elems) : wire.data_bytes(chunk_elems)]
            values = payload.view(">i4").astype(np.int32)
        try:
            operation.accept(number - operation.base, pairs, values)
        except IntegrityFailure as failure:
            self._fail(operation, "integrity", str(failure))
        except SumOverflow as failure:
            self._fail(operation, "overflow", str(failure))
        else:
            self._assign_bases()
            if operation.complete:
                self._operations.remove(operation)
                self._counters["non_finite_blocks"] += operation.non_finite_blocks
                self._finish(Completion(operation.index, "none"))

    def abort(self, detail: str) -> None:
        """Fails all unfinished operations."""
        self._fail(None, "aborted", detail)

    # -- output ----------------------------------------------------------------------------------------------------

    def poll(self, now_us: int) -> list[bytes]:
        """What is to be sent now: resends, then packets that have become possible. Checks the deadlines first."""
        if self.failed:
            return []
        overdue = self.window.overdue(now_us)
        if overdue is not None:
            self._fail_overdue(overdue)
            return []
        fast = self.window.fast_retransmits(now_us)
        timed = self.window.timer_retransmits(now_us)
        self._counters["fast_retransmits"] += len(fast)
        self._counters["timer_retransmits"] += len(timed)
        datagrams = [self._images[slot] for slot in (*fast, *timed)]
        while new := [
            image for slot in self._slots_by_number() if (image := self._send_next(slot, now_us)) is not None
        ]:
            datagrams += new
        self._counters["packets_out"] += len(datagrams)
        self._counters["bytes_out"] += sum(map(len, datagrams))
        return datagrams

    def _slots_by_number(self) -> list[int]:
        """All slots, from the one that is furthest behind: packets leave in the order of their numbers, as results come back in it."""
        slots = self.config.slots
        first = min(range(slots), key=self._next_number.__getitem__)
        return [(first + i) % slots for i in range(slots)]

    def _send_next(self, slot: int, now_us: int) -> bytes | None:
        """The next packet of the slot, if it may be sent."""
        if self.window.number_at(slot) is not None:
            return None
        number = self._next_number[slot]
        operation = self._operation_of(number)
        if operation is None or operation.base is None or not operation.may_send(number - operation.base):
            return None
        config = self.config
        exponents, payload = operation.build(number - operation.base)
        kind = MsgType.DATA
        if payload is None:
            if config.short_exponents:
                kind = MsgType.EXPONENTS
            else:
                payload = bytes(4 * config.chunk_elems)
        version_bit = wire.VERSION_BIT if number // config.slots % 2 else 0
        header = Header(
            kind,
            wire.SIZE_CODE_BY_CHUNK_ELEMS[config.chunk_elems],
            config.job_number,
            config.epoch << wire.NUMBER_BITS | number & NUMBER_MASK,
            version_bit | (config.slot_base + slot),
        )
        self._images[slot] = header.pack() + exponents + (payload or b"")
        self._next_number[slot] = number + config.slots
        self.window.sent(slot, number, now_us)
        return self._images[slot]

    def next_deadline_us(self) -> int | None:
        """When :meth:`poll` wants to be called at the latest (besides after every input)."""
        return None if self.failed else self.window.next_deadline_us()

    def take_completion(self) -> Completion | None:
        """Completions, in the order in which they happened."""
        return self._completions.popleft() if self._completions else None

    @property
    def counters(self) -> dict[str, int]:
        """Never reset; keys are :data:`COUNTERS`."""
        return {name: self._counters[name] for name in COUNTERS}

    # -- operations ------------------------------------------------------------------------------------------------

    def _operation_of(self, number: int) -> Operation | None:
        for operation in self._operations:
            if operation.base is not None and operation.base <= number < operation.base + operation.packets:
                return operation
        return None

    def _assign_bases(self) -> None:
        """Gives each operation its first number as soon as the one before is sealed."""
        for operation in self._operations:
            if operation.base is None:
                if self._next_base is None:
                    return
                operation.base, self._next_base = self._next_base, None
            if self._next_base is None and operation.sealed and operation is self._last_based():
                self._next_base = operation.base + operation.packets

    def _last_based(self) -> Operation | None:
        based = [o for o in self._operations if o.base is not None]
        return based[-1] if based else None

    def _finish(self, completion: Completion) -> None:
        self._counters["operations"] += 1
        self._completions.append(completion)

    def _fail_overdue(self, overdue: Overdue) -> None:
        first = self._operations[0]
        waiting_for = list(self.window.waiting_for)
        outstanding = len(self.window)
        if overdue is Overdue.SWITCH_SILENT:
            detail = f"{outstanding} packets outstanding and nothing heard from the switch"
        else:
            detail = f"{outstanding} packets outstanding, waiting for ranks {waiting_for or 'unknown'}"
        self._fail(first, overdue.value, detail, waiting_for)

    def _fail(self, culprit: Operation | None, error: str, detail: str, missing_ranks: Sequence[int] = ()) -> None:
        self.failed = True
        if culprit is not None:
            self._completions.append(Completion(culprit.index, error, tuple(missing_ranks), detail))
        for operation in self._operations:
            if operation is not culprit:
                self._completions.append(Completion(operation.index, "aborted", (), detail))
            _poison(operation)
        self._operations.clear()
        self.window.clear()


def _poison(operation: Operation) -> None:
    """A half-written tensor must never look like a result."""
    if operation.any_result_written and operation.dtype.is_float:
        operation.tensor[:] = 0x7FC0 if operation.dtype is DType.BFLOAT16 else np.nan
