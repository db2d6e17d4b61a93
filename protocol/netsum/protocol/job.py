"""A job and its members as the control plane sees them: data, no decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from netsum.protocol.control import Join, Ready


class Phase(Enum):
    """joining → opening → probing → running → (gone). SPEC.md section 6 has the diagram."""

    JOINING = "joining"  # not all ranks are here, or an older incarnation of the job is still being waited for
    OPENING = "opening"  # all here; the datapath has been told
    PROBING = "probing"  # welcomed; the members try their data paths
    RUNNING = "running"


def describe_join(join: Join) -> str:
    """How texts name a worker."""
    return f"rank {join.rank} at {join.data_host}:{join.data_port} (host {join.host_name}, pid {join.pid})"


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 1, 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"."""
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:8]))
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"rank{'' if len(ordered) == 1 else 's'} {shown}{more}"


@dataclass(slots=True)
class Member:
    """One rank. ``heard_us``: when its last message came. ``token`` names it once the job is complete."""

    identity: bytes
    join: Join
    peer_text: str
    token: str
    joined_us: int
    heard_us: int
    ready: Ready | None = None
    left: bool = False
    operations_started: int = 0
    operations_completed: int = 0

    def __str__(self) -> str:
        return describe_join(self.join)

    def is_same_worker(self, join: Join) -> bool:
        """The same process with the same data socket asks again (the proof may differ)."""
        mine = (self.join.data_host, self.join.data_port, self.join.host_name, self.join.pid)
        return mine == (join.data_host, join.data_port, join.host_name, join.pid)


@dataclass(slots=True)
class Job:
    """An incarnation of a job. Number, epoch, slots and chunk_elems are set from OPENING on.

    ``next_event_us`` is never later than the job's next deadline; it may be earlier, since heartbeats only push a lease's end away.
    """

    name: str
    run_id: str
    world_size: int
    first: Join  # who fixed the world size
    created_us: int
    phase: Phase = Phase.JOINING
    members: dict[int, Member] = field(default_factory=dict)
    join_deadline_us: int = 0
    next_waiting_us: int = 0
    next_event_us: int = 0
    job_number: int = -1
    epoch: int = 0
    slot_base: int = 0
    slots: int = 0
    chunk_elems: int = 0
    results: str = ""  # "multicast" or "unicast", once RUNNING

    @property
    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.members]

    @property
    def active_members(self) -> list[Member]:
        """By rank, without those who left."""
        return [self.members[rank] for rank in sorted(self.members) if not self.members[rank].left]

    def silent_ranks(self, now_us: int, silence_us: int) -> list[int]:
        return [m.join.rank for m in self.active_members if now_us - m.heard_us > silence_us]

    def status(self, now_us: int) -> dict[str, Any]:
        """JSON-able. Tokens are secrets and stay out."""
        return {
            "job": self.name,
            "run_id": self.run_id,
            "phase": self.phase.value,
            "world_size": self.world_size,
            "job_number": self.job_number,
            "epoch": self.epoch,
            "slot_base": self.slot_base,
            "slots": self.slots,
            "chunk_elems": self.chunk_elems,
            "results": self.results,
            "age_s": round((now_us - self.created_us) / 1e6, 3),
            "missing_ranks": self.missing_ranks,
            "members": [
                {
                    "rank": rank,
                    "data_address": f"{m.join.data_host}:{m.join.data_port}",
                    "host_name": m.join.host_name,
                    "pid": m.join.pid,
                    "control_peer": m.peer_text,
                    "software_version": m.join.software_version,
                    "left": m.left,
                    "silent_s": round((now_us - m.heard_us) / 1e6, 3),
                    "operations_started": m.operations_started,
                    "operations_completed": m.operations_completed,
                }
                for rank, m in sorted(self.members.items())
            ],
        }
