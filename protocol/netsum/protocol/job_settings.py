"""Limits and timers of the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from netsum.protocol.errors import UsageError
from netsum.protocol.join_checks import MIN_CHUNK_ELEMS, MIN_SLOTS
from netsum.protocol.wire import SLOT_MASK

JOB_NUMBERS = 256  # 8 bits in the packet


@dataclass(frozen=True, slots=True)
class JobTableSettings:
    """Everything that an agent can make the switch store is bounded by these. Raises :class:`UsageError`."""

    software_version: str = ""
    total_slots: int = 8192  # a power of two, at most 32768: 15 bits in the packet
    slots_per_job: int = 128  # for workers that leave the choice to the switch
    max_chunk_elems: int = 2048
    secret: str | None = None
    max_jobs: int = JOB_NUMBERS
    max_members: int = 4096  # of all jobs together
    waiting_interval_us: int = 1_000_000
    join_timeout_us: int = 60_000_000  # after the last member joined
    ready_timeout_us: int = 10_000_000
    heartbeat_interval_us: int = 500_000
    lease_us: int = 3_000_000

    def __post_init__(self) -> None:
        for name in ("total_slots", "slots_per_job"):
            slots = getattr(self, name)
            if slots < MIN_SLOTS or slots & (slots - 1):
                raise UsageError(f"{name} is {slots}; a power of two, at least {MIN_SLOTS}, is needed")
        if not self.slots_per_job <= self.total_slots <= SLOT_MASK + 1:
            raise UsageError(
                f"{self.slots_per_job} slots a job, {self.total_slots} in all: the first must not exceed the second, nor that "
                f"{SLOT_MASK + 1}"
            )
        if self.max_chunk_elems < MIN_CHUNK_ELEMS:
            raise UsageError(f"max_chunk_elems is {self.max_chunk_elems}, at least {MIN_CHUNK_ELEMS} is needed")
        if self.secret is not None and not self.secret:
            raise UsageError("the secret is empty")
        if not 1 <= self.max_jobs <= JOB_NUMBERS:
            raise UsageError(f"max_jobs is {self.max_jobs}, it must be in 1..{JOB_NUMBERS}")
        if self.heartbeat_interval_us < 1 or self.lease_us < 2 * self.heartbeat_interval_us:
            raise UsageError(
                f"a lease of {self.lease_us / 1e6:g} s is too short for heartbeats every {self.heartbeat_interval_us / 1e6:g} s: "
                "two of them, at least, must fit"
            )

    @property
    def silence_us(self) -> int:
        """Two heartbeats missed: worth telling the others."""
        return 2 * self.heartbeat_interval_us
