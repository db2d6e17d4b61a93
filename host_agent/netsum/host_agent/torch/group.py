"""Process groups of our own beside the user's: where ranks agree at the start, and what the ring rides on.

Never the user's group: our collectives run on the agent's thread, and two threads that use one group in different orders on
different ranks wait for each other for ever. And not ``dist.new_group``: it names groups after their ranks and what else this process
has made, so a second group of the same ranks may meet the addresses that a first one left in the store; and the user's
``destroy_process_group()`` would end ours. What both are made of is public: a store with a prefix, and a gloo backend on it.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from netsum.protocol.errors import UsageError

_GLOO_INTEGERS = (np.int8, np.uint8, np.int32, np.int64)
_LONGEST_NAP_S = 0.001


@dataclass(frozen=True)
class Meeting:
    """What rank 0 decides for all ranks of a job."""

    job: str
    rendezvous: str  # "host:port", where rank 0's agent listens


_groups_made: Counter[tuple[int, ...]] = Counter()
_stuck_groups: list[object] = []


class OwnGroup:
    """A gloo group over the ranks of ``parent``; everything in it ends within ``timeout_s``.

    Collective: all ranks of ``parent`` construct it, as often as the others.
    """

    def __init__(self, parent: dist.ProcessGroup | None, timeout_s: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group before HookState(...)"
            )
        ranks = dist.get_process_group_ranks(parent if parent is not None else dist.group.WORLD)
        if dist.get_rank() not in ranks:
            raise UsageError(
                f"rank {dist.get_rank()} is not in process_group (ranks {ranks}): only its members construct a HookState"
            )
        _groups_made[tuple(ranks)] += 1
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.world_size = len(ranks)
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self._running = False
        self._collectives = 0
        self._payload_bytes = 0
        self._timeout = datetime.timedelta(seconds=timeout_s)
        name = f"netsum/{','.join(map(str, ranks))}/{_groups_made[tuple(ranks)]}"
        self._store = PrefixStore(name, _get_default_store())
        self._group: Any = dist.ProcessGroupGloo(
            PrefixStore("gloo", self._store), self.rank, self.world_size, self._timeout
        )

    def broadcast(self, text: str | None) -> str:
        """Rank 0's ``text`` on all ranks. Once for each group."""
        if self.rank == 0:
            assert text is not None
            self._store.set("text", text)
            return text
        self._store.wait(["text"], self._timeout)
        return self._store.get("text").decode()

    def allreduce_sum(self, array: NDArray[Any]) -> None:
        """Sum over ranks, in place; integers wrap. Returns when done."""
        self._allreduce(array, dist.ReduceOp.SUM)

    def allreduce_max(self, array: NDArray[Any]) -> None:
        """Maximum over ranks, in place. Returns when done."""
        self._allreduce(array, dist.ReduceOp.MAX)

    def _allreduce(self, array: NDArray[Any], op: Any) -> None:
        # gloo knows some integer types only; the others go as int64, which wraps to the same bits when cast back. Always a copy:
        # an interrupted collective goes on in gloo for a while, and must not write into the caller's memory then.
        integer = array.dtype.kind in "iu" and array.dtype not in _GLOO_INTEGERS
        wire = array.astype(np.int64) if integer else array.copy()
        with self._lock:
            if self._interrupted.is_set() or self._group is None:
                raise InterruptedError("the process group was interrupted or closed")
            work = self._group.allreduce(torch.from_numpy(wire), op)
            self._running = True
        started = time.monotonic()
        while not work.is_completed():  # ends: gloo has the group's timeout
            if self._interrupted.wait(min((time.monotonic() - started) / 8, _LONGEST_NAP_S)):
                raise InterruptedError("the process group was interrupted")
        self._running = False
        work.wait()  # raises what went wrong
        self._collectives += 1
        self._payload_bytes += wire.nbytes
        array[:] = wire.astype(array.dtype, copy=False)

    def interrupt(self) -> None:
        """Makes a running collective raise, and every later one."""
        self._interrupted.set()

    def counters(self) -> dict[str, int]:
        return {"gloo_collectives": self._collectives, "gloo_payload_bytes": self._payload_bytes}

    def average_sparse(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The average over ranks of a sparse COO tensor, exact but for float rounding, when the future is done."""
        work = self._group.allreduce(tensor, dist.ReduceOp.SUM)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0] / self.world_size)

    def close(self) -> None:
        """Gives the group back; harmless twice."""
        with self._lock:
            group, self._group = self._group, None
        # gloo's destructor waits for a collective that was interrupted, for up to the timeout: only the end of the process does it.
        if self._running and group is not None:
            _stuck_groups.append(group)


def arrange_meeting(group: OwnGroup, job: str | None, rendezvous: str | None) -> Meeting:
    """Agrees on the job's name and the meeting place; what the caller did not say, rank 0 chooses.

    The chosen name holds a random part, so that two jobs on one host, or a job and its own restart, never meet at a switch.
    """
    proposal = None
    if group.rank == 0:
        job = job or f"torch-{os.environ.get('MASTER_PORT', '0')}-{secrets.token_hex(4)}"
        proposal = json.dumps([job, rendezvous or f"{_host_for_peers()}:{_free_port()}"])
    return Meeting(*json.loads(group.broadcast(proposal)))


def _host_for_peers() -> str:
    """The address at which peers reach this rank.

    Rank 0 of the world is reached at MASTER_ADDR by definition. Another rank (first of a subgroup) takes the address from which
    it reaches MASTER_ADDR. Without MASTER_ADDR (an init method with a file, say) it is the host's name, as gloo itself does it.
    """
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return socket.gethostbyname(socket.gethostname())
    if dist.get_rank() == 0:
        return master
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: asks the routing table only
        host = probe.getsockname()[0]
    return str(host)


def _free_port() -> int:
    """A TCP port that was free a moment ago; the listener that takes it says so if somebody was quicker."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
