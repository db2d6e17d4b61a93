"""The host agent: one rank's handle on the job's collectives."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from types import TracebackType
from typing import Any, Literal

from netsum.host_agent.coordinator import Coordinator
from netsum.host_agent.mesh import Mesh
from netsum.host_agent.peer_group import PeerGroup
from netsum.host_agent.peer_messages import Description, PathVote
from netsum.host_agent.rendezvous import Identity, parse_host_port, rendezvous_address
from netsum.host_agent.ring import Ring
from netsum.host_agent.ring_queue import RingQueue
from netsum.host_agent.settings import Settings
from netsum.host_agent.status import AgentStatus
from netsum.host_agent.switch_client import SwitchClient
from netsum.host_agent.switch_path import SwitchPath
from netsum.host_agent.tensors import HostTensor, host_tensor
from netsum.host_agent.work import Work
from netsum.protocol.errors import AbortedError, SwitchUnreachableError, UnsupportedError, UsageError
from netsum.protocol.fixed_point import MAX_WORLD_SIZE

log = logging.getLogger("netsum.host_agent")

_CLOSE_S = 0.4  # for each of the parts that close() ends; together they stay below 2 s
_SILENCE_S = 10.0  # a peer that is connected but mute for longer than this, and than timeout_s, is dead

Op = Literal["sum", "avg"]


def connect(
    switch: str | None = None,
    *,
    job: str,
    rank: int,
    world_size: int,
    rendezvous: str | None = None,
    required: bool = False,
    secret: str | None = None,
    timeout_s: float = 30.0,
    peer_group: PeerGroup | None = None,
) -> Agent:
    """Connects this rank to its peers and to the switch; returns when all ranks are there.

    Args:
        switch: control address, "tcp://host:port". None or "": no switch, the ring between the peers.
        job: name of the job; the same on all ranks.
        rank, world_size: this worker's number, and how many there are.
        rendezvous: "host:port" where rank 0 listens for its peers. Default: NETSUM_RENDEZVOUS; else MASTER_ADDR, or 127.0.0.1 when
            no switch outside of this machine is named, with port 20000 + CRC-32(job, MASTER_PORT) mod 10000.
        required: raise rather than take the ring when the switch cannot be used.
        secret: shared by the ranks and the switch of the job. Default: NETSUM_SECRET.
        timeout_s: bound for meeting the peers, and for waiting for a slow rank in an operation.
        peer_group: carries the ring's data instead of our own TCP connections (all ranks alike).

    Raises:
        UsageError: an argument is wrong.
        JoinRefusedError: rank 0 refused this worker: duplicate rank, other world size, wrong secret, ...
        RendezvousError: the ranks could not meet in time; says who is missing.
        SwitchUnreachableError: ``required`` and the switch cannot be used by all ranks.
    """
    settings = Settings.from_environment()
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(f"world_size is {world_size}; from 1 to {MAX_WORLD_SIZE} ranks are possible")
    if rank < 0 or (world_size == 1 and rank != 0):
        raise UsageError(f"rank {rank} is not in 0..{world_size - 1}")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s}; it must be above 0")
    identity = Identity(job, rank, world_size, settings.secret if secret is None else secret)
    agent = Agent(identity, switch or "", timeout_s)
    if world_size > 1:
        switch_host = parse_host_port(switch, "switch")[0] if switch else None
        host, port = rendezvous_address(rendezvous, job, switch_host, settings)
        try:
            agent._connect(host, port, settings, required, peer_group)
        except BaseException as error:
            agent._abandon(error)
            agent.close()
            raise
    _open_agents.add(agent)
    return agent


class Agent:
    """Made by :func:`connect`. All methods may be called from any thread, but all ranks must call the same operations in the same order.

    After an operation has failed on some rank no further one succeeds on any: close the agent and connect again.
    """

    def __init__(self, identity: Identity, switch: str, timeout_s: float) -> None:
        self._identity, self._switch_address, self._timeout_s = identity, switch, timeout_s
        self._coordinator = Coordinator(identity.rank, identity.world_size)
        self._mesh: Mesh | None = None
        self._ring: RingQueue | None = None
        self._switch: SwitchPath | None = None
        self._reason = "one rank: there is nothing to send"
        self._submit_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False

    # -- use -------------------------------------------------------------------------------------------------------

    def allreduce(self, tensor: Any, op: Op = "sum", async_op: bool = False) -> Work:
        """Replaces ``tensor`` by the sum or average over all ranks, in place.

        Args:
            tensor: numpy array, or torch tensor in host memory; any shape and strides, also empty. float32, float16, bfloat16 and
                int32 travel through the switch when there is one; float64, other integers and complex types over the exact ring.
                Do not touch it until the work is done.
            op: "sum" (integers wrap) or "avg" (floating point only; divided once).
            async_op: return at once; otherwise return when the tensor holds the result.

        Raises:
            UsageError, UnsupportedError: nothing was sent.
            OperationError: what :meth:`Work.wait` raises; with ``async_op`` only when a failure is known already.
        """
        if op not in ("sum", "avg"):
            raise UsageError(f"op {op!r} is not known: 'sum' or 'avg'")
        host = host_tensor(tensor)
        if op == "avg" and not host.is_inexact:
            raise UnsupportedError(f"the average of {host.dtype_name} is not an integer: use op='sum' and divide")
        work = self._submit(host, op)
        if not async_op:
            work.wait()
        return work

    def status(self) -> AgentStatus:
        """The path in use and why, parameters, and counters."""
        me, switch, coordinator = self._identity, self._switch, self._coordinator
        counters = self._ring.counters() if self._ring is not None else {}
        settings: dict[str, Any] = {}
        if switch is not None:
            counters = counters | switch.counters()
            welcome, started = switch.welcome, switch.started
            assert welcome is not None
            assert started is not None
            settings = {
                "results": started.results,
                "chunk_elems": welcome.chunk_elems,
                "slots": welcome.slots,
                "job_number": welcome.job_number,
                "epoch": welcome.epoch,
                "awaited_ranks": switch.awaited_ranks(),
            }
        return AgentStatus(
            path="ring" if switch is None else "switch",
            reason=self._reason,
            switch=self._switch_address,
            job=me.job,
            rank=me.rank,
            world_size=me.world_size,
            run_id=self._mesh.run_id if self._mesh is not None else "",
            operations_started=coordinator.started("switch") + coordinator.started("ring"),
            operations_completed=coordinator.completed("switch") + coordinator.completed("ring"),
            failure=coordinator.failure,
            counters=counters,
            **settings,
        )

    def close(self) -> None:
        """Leaves the job, in less than 2 s; unfinished operations fail with :class:`AbortedError`. Safe to call again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            _open_agents.discard(self)
            bye = self._coordinator.bye()
            self._coordinator.close(f"rank {self._identity.rank} closed its agent")
            if self._switch is not None:
                self._switch.close(_CLOSE_S)
            if self._ring is not None:
                self._ring.close(_CLOSE_S)
            if self._mesh is not None:
                self._mesh.close(bye)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _submit(self, tensor: HostTensor, op: Op) -> Work:
        path: Literal["switch", "ring"]
        path = "switch" if self._switch is not None and tensor.switch_dtype is not None else "ring"
        with self._submit_lock:
            coordinator = self._coordinator
            call = coordinator.started("switch") + coordinator.started("ring")
            description = Description(call, path, coordinator.started(path), tensor.flat.size, tensor.dtype_name, op)
            if self._closed:
                raise AbortedError(
                    "the agent is closed", rank=self._identity.rank, operation=description.operation, phase="submit"
                )
            work = Work(self._identity.rank, description, tensor)
            if self._identity.world_size == 1 or tensor.flat.size == 0:
                work.finish()  # nothing to exchange, and no rank counts it as an operation
                return work
            coordinator.check(description)
            coordinator.enter(work)
            if path == "switch":
                assert self._switch is not None
                self._switch.submit(work, tensor)
            else:
                assert self._ring is not None
                self._ring.submit(work, tensor)
        return work

    def _abandon(self, error: BaseException) -> None:
        self._coordinator.abandon(f"{type(error).__name__}: {error}")

    def _connect(self, host: str, port: int, settings: Settings, required: bool, peer_group: PeerGroup | None) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        me = self._identity
        mesh = Mesh(me, self._coordinator, max(self._timeout_s, _SILENCE_S))
        mesh.connect(host, port, deadline_s, with_ring=peer_group is None)
        self._mesh = mesh
        self._coordinator.attach(mesh.send, lambda: mesh.peers)
        if self._switch_address:
            self._choose_path(mesh, settings, required)
        else:
            if required:
                raise SwitchUnreachableError("required=True, but no switch is given")
            self._reason = "no switch configured"
        if peer_group is None:
            assert mesh.ring_sockets is not None
            peer_group = Ring(me.rank, me.world_size, *mesh.ring_sockets, timeout_s=self._timeout_s)
        self._ring = RingQueue(peer_group, self._coordinator)

    def _choose_path(self, mesh: Mesh, settings: Settings, required: bool) -> None:
        """The switch if every rank can use it, else the ring on every rank."""
        me = self._identity
        deadline_s = time.monotonic() + self._timeout_s

        def give_up() -> str | None:
            vote = mesh.negative_vote()
            return None if vote is None else f"rank {vote[0]} cannot use it: {vote[1]}"

        client = SwitchClient(self._switch_address, me.secret)
        path: SwitchPath | None = None
        try:
            try:
                path = SwitchPath(me, mesh.run_id, client, settings, self._timeout_s)
                path.open(min(self._timeout_s, settings.connect_timeout_s), deadline_s, give_up)
                own = PathVote(True, "")
            except SwitchUnreachableError as error:
                own = PathVote(False, str(error))
            objection = mesh.vote(own, deadline_s + settings.connect_timeout_s)
            if objection is None:
                assert path is not None
                path.start(self._coordinator)
                self._switch = path
                self._reason = f"all {me.world_size} ranks reach the switch at {client.address}"
                return
        finally:
            if self._switch is None:
                if path is not None:
                    path.close(_CLOSE_S)
                client.close()
        self._reason = own.text or f"rank {objection[0]} cannot use the switch: {objection[1]}"
        if required:
            raise SwitchUnreachableError(f"rank {me.rank}, switch {client.address}, required: {self._reason}")
        log.warning("rank %d: switch %s: %s; path now used: ring", me.rank, client.address, self._reason)


_open_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for agent in list(_open_agents):
        with contextlib.suppress(Exception):  # the interpreter is going down: nobody could act on it
            agent.close()
