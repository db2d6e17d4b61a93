"""What :meth:`Agent.status` tells."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AgentStatus:
    """A snapshot of an agent.

    Attributes:
        path: "switch" or "ring": how float32, float16, bfloat16 and int32 travel. Other types always take the exact ring.
        reason: why this path.
        switch: the address asked for, "" when none was.
        results: "multicast" or "unicast" on the switch path, "" on the ring.
        chunk_elems, slots, job_number, epoch: parameters of the switch path, 0 on the ring.
        operations_started, operations_completed: over both paths.
        awaited_ranks: ranks that the switch last said it waits for.
        failure: why the agent can do no more; "" while it can.
        counters: never reset; datagrams and bytes of the switch path as in SPEC.md, "ring_bytes_out", "ring_bytes_in".
    """

    path: str
    reason: str
    switch: str
    job: str
    rank: int
    world_size: int
    run_id: str = ""
    results: str = ""
    chunk_elems: int = 0
    slots: int = 0
    job_number: int = 0
    epoch: int = 0
    operations_started: int = 0
    operations_completed: int = 0
    awaited_ranks: tuple[int, ...] = ()
    failure: str = ""
    counters: dict[str, int] = field(default_factory=dict)
