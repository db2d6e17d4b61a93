"""The switch as a pure state machine (SPEC.md section 4): datagrams in, datagrams out.

The readable twin of ``native/src/switch_machine.cpp``; a property test holds the two together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from netsum.protocol import wire
from netsum.protocol.slot_pool import SlotPool, Verdict
from netsum.protocol.wire import Header, MsgType

#: Reasons to drop a datagram, in the order of the tests; the counters are ``drop_<reason>``.
DROP_REASONS = (
    "too_short",
    "bad_type",
    "unknown_source",
    "wrong_job",
    "bad_size_code",
    "bad_length",
    "stale_epoch",
    "bad_slot",
    "slot_busy",
    "stale_number",
    "kind_mismatch",
)
COUNTERS = (
    "packets_in",
    "contributions",
    "results",
    "replays",
    "duplicates",
    "probes",
    *(f"drop_{r}" for r in DROP_REASONS),
)


class Address(NamedTuple):
    """An IPv4 endpoint; ``ip`` as an integer in host order."""

    ip: int
    port: int


@dataclass(frozen=True, slots=True)
class SwitchJobConfig:
    """A job as the datapath knows it. ``workers``: addresses by rank. ``slots``: a power of two, at least 4."""

    job_number: int
    epoch: int
    slot_base: int
    slots: int
    chunk_elems: int
    workers: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A datagram to send: ``result`` and ``probe_all`` to all workers of the job, ``replay`` and ``answer`` to ``destination``."""

    kind: Literal["result", "replay", "answer", "probe_all"]
    job_number: int
    destination: Address | None
    datagram: bytes


@dataclass(slots=True)
class _Job:
    config: SwitchJobConfig
    pool: SlotPool
    multicast: bool = False
    counters: Counter[str] = field(default_factory=Counter)


class SwitchMachine:
    """All jobs of a data port. Invariant: an address belongs to at most one (job, rank)."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._sources: dict[Address, tuple[_Job, int]] = {}
        self._counters: Counter[str] = Counter()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def open_job(self, config: SwitchJobConfig) -> None:
        """Raises :class:`ValueError`: number or an address taken, slots not a power of two ≥ 4, chunk_elems without a size code, …"""
        if not 0 <= config.job_number <= 255 or config.job_number in self._jobs:
            raise ValueError(f"job number {config.job_number} is taken or out of range")
        if config.slots < 4 or config.slots & (config.slots - 1):
            raise ValueError(f"{config.slots} slots: a power of two, at least 4, is needed")
        if config.slot_base < 0 or config.slot_base + config.slots > wire.SLOT_MASK + 1:
            raise ValueError(f"slots {config.slot_base}..{config.slot_base + config.slots - 1} do not fit 15 bits")
        if config.chunk_elems not in wire.SIZE_CODE_BY_CHUNK_ELEMS:
            raise ValueError(f"no size code for {config.chunk_elems} elements")
        if not config.workers or len(set(config.workers)) != len(config.workers):
            raise ValueError("a job needs workers with different addresses")
        for address in config.workers:
            if address in self._sources:
                raise ValueError(f"address {address} belongs to another job")
        job = _Job(config, SlotPool(config.slots, len(config.workers), config.chunk_elems))
        self._jobs[config.job_number] = job
        for rank, address in enumerate(config.workers):
            self._sources[address] = (job, rank)

    def close_job(self, job_number: int) -> None:
        """Frees the job's slots and addresses. Unknown numbers are ignored."""
        job = self._jobs.pop(job_number, None)
        if job is not None:
            for address in job.config.workers:
                del self._sources[address]

    def set_multicast(self, job_number: int, has_group: bool) -> None:
        """With a group, a PROBE is answered by multicast, too."""
        self._jobs[job_number].multicast = has_group

    # -- packets ---------------------------------------------------------------------------------------------------

    def handle(self, datagram: bytes, source: Address) -> list[Output]:
        """One datagram from the network; returns what to send, in order."""
        self._counters["packets_in"] += 1
        if len(datagram) < wire.HEADER_BYTES:
            return self._drop("too_short")
        header = wire.unpack_header(datagram)
        if header.msg_type not in (MsgType.DATA, MsgType.EXPONENTS, MsgType.PROBE):
            return self._drop("bad_type")
        known = self._sources.get(source)
        if known is None:
            return self._drop("unknown_source")
        job, rank = known
        job.counters["packets_in"] += 1
        config = job.config
        if header.job_number != config.job_number:
            return self._drop("wrong_job", job)
        if wire.CHUNK_ELEMS_BY_SIZE_CODE.get(header.size_code) != config.chunk_elems:
            return self._drop("bad_size_code", job)
        needed = wire.exponents_bytes if header.msg_type == MsgType.EXPONENTS else wire.data_bytes
        if len(datagram) < needed(config.chunk_elems):
            return self._drop("bad_length", job)
        if header.msg_type == MsgType.PROBE:
            return self._answer_probe(job, header, source)
        if header.epoch != config.epoch:
            return self._drop("stale_epoch", job)
        slot = header.slot - config.slot_base
        in_range = 0 <= slot < config.slots
        if not in_range or (slot, header.version) != (header.number % config.slots, header.number // config.slots % 2):
            return self._drop("bad_slot", job)
        return self._contribute(job, rank, slot, header, datagram, source)

    def _contribute(
        self, job: _Job, rank: int, slot: int, header: Header, datagram: bytes, source: Address
    ) -> list[Output]:
        chunk_elems = job.config.chunk_elems
        body = np.frombuffer(datagram, np.uint8)
        exponents = body[wire.HEADER_BYTES : wire.exponents_bytes(chunk_elems)].view(np.int8)
        payload = None
        if header.msg_type == MsgType.DATA:
            payload = body[wire.exponents_bytes(chunk_elems) : wire.data_bytes(chunk_elems)].view(">i4")
        verdict = job.pool.contribute(slot, header.version, header.number, header.msg_type, rank, exponents, payload)
        number = job.config.job_number
        match verdict:
            case Verdict.CONSUMED | Verdict.COMPLETE:
                self._count("contributions", job)
                if verdict is Verdict.CONSUMED:
                    return []
                self._count("results", job)
                return [Output("result", number, None, header.pack() + job.pool.result(slot, header.version))]
            case Verdict.REPLAY:
                self._count("replays", job)
                return [Output("replay", number, source, header.pack() + job.pool.result(slot, header.version))]
            case Verdict.DUPLICATE:
                self._count("duplicates", job)
                pending = Header(MsgType.PENDING, header.size_code, number, header.tsi, header.pool_index)
                missing = job.pool.missing_bitmap(slot, header.version)
                return [Output("answer", number, source, pending.pack() + missing)]
            case _:
                return self._drop(verdict.value, job)

    def _answer_probe(self, job: _Job, header: Header, source: Address) -> list[Output]:
        self._count("probes", job)
        number = job.config.job_number
        padding = bytes(wire.data_bytes(job.config.chunk_elems) - wire.HEADER_BYTES)

        def answer(pool_index: int) -> bytes:
            return Header(MsgType.PROBE, header.size_code, number, header.tsi, pool_index).pack() + padding

        outputs = [Output("answer", number, source, answer(1))]
        if job.multicast:
            outputs.append(Output("probe_all", number, None, answer(2)))
        return outputs

    def _drop(self, reason: str, job: _Job | None = None) -> list[Output]:
        self._count(f"drop_{reason}", job)
        return []

    def _count(self, name: str, job: _Job | None) -> None:
        self._counters[name] += 1
        if job is not None:
            job.counters[name] += 1

    # -- what is going on ------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """Never reset; keys are :data:`COUNTERS`."""
        return {name: self._counters[name] for name in COUNTERS}

    def job_counters(self, job_number: int) -> dict[str, int]:
        job = self._jobs.get(job_number)
        return {name: job.counters[name] if job else 0 for name in COUNTERS}

    def slots_in_use(self, job_number: int) -> int:
        """Slots (both versions counted) that are claimed and incomplete."""
        job = self._jobs.get(job_number)
        return job.pool.in_use() if job else 0

    def awaited_ranks(self, job_number: int) -> Sequence[int]:
        """Ranks that the oldest incomplete slot still waits for."""
        job = self._jobs.get(job_number)
        return job.pool.awaited_ranks() if job else []
