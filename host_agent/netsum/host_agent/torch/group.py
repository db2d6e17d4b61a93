"""Process groups of our own beside the user's: where ranks agree at the start, and what the ring rides on.

Never the user's group: our collectives run on the agent's thread, and two threads that use one group in different orders on
different ranks wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from netsum.protocol.errors import UsageError

_GLOO_INTEGERS = (np.int8, np.uint8, np.int32, np.int64)
_LONGEST_NAP_S = 0.001


@dataclass(frozen=True)
class Meeting:
    """What rank 0 decides for all ranks of a job."""

    job: str
    rendezvous: str  # "host:port", where rank 0's agent listens


class OwnGroup:
    """A gloo group over the ranks of ``parent``; every collective in it ends within ``timeout_s``.

    Collective: all ranks of ``parent`` construct it, in the same order as other groups.
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
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.world_size = len(ranks)
        self._lock = threading.Lock()
        self._collectives = 0
        self._payload_bytes = 0
        self._interrupted = threading.Event()
        self._running = False
        # Other ranks of the world need not take part: only members synchronise.
        self._group: Any = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="netsum",
        )

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on all ranks (pickled: small things only)."""
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self._group, device=torch.device("cpu"))
        return box[0]

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
            work = dist.all_reduce(torch.from_numpy(wire), op=op, group=self._group, async_op=True)
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
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0] / self.world_size)

    def close(self) -> None:
        """Gives the group back; harmless twice, and after the user's own ``destroy_process_group()``."""
        with self._lock:
            group, self._group = self._group, None
        # A group whose collective was interrupted cannot be destroyed before its timeout; the end of the process does it.
        if group is not None and dist.is_initialized() and not self._running:
            with contextlib.suppress(ValueError):  # destroyed already, with the user's default group
                dist.destroy_process_group(group)


def arrange_meeting(group: OwnGroup, job: str | None, rendezvous: str | None) -> Meeting:
    """Agrees on the job's name and the meeting place; what the caller did not say, rank 0 chooses.

    The chosen name holds a random part, so that two jobs on one host, or a job and its own restart, never meet at a switch.
    """
    proposal = None
    if group.rank == 0:
        proposal = Meeting(
            job=job or f"torch-{os.environ.get('MASTER_PORT', '0')}-{secrets.token_hex(4)}",
            rendezvous=rendezvous or f"{_host_for_peers()}:{_free_port()}",
        )
    meeting = group.broadcast(proposal)
    assert isinstance(meeting, Meeting)
    return meeting


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
