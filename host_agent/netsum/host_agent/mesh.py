"""The peer channel of one rank: a TCP connection to every other rank, open from connect until close.

How it comes about: rank 0 listens at the rendezvous; everyone dials it and says who he is; when all are there, rank 0 sends the
table of addresses; rank i then dials every j < i. With ``with_ring`` each rank also dials the next one for the ring's data.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from typing import Protocol

from netsum.host_agent.connection import Connection, ConnectionLostError
from netsum.host_agent.dial import dial, listen
from netsum.host_agent.join_rank_zero import ask_holder, join_rank_zero
from netsum.host_agent.peer_loop import PeerLoop
from netsum.host_agent.peer_messages import (
    Abort,
    Accepted,
    AnyPeerMessage,
    Bye,
    Hello,
    Here,
    PathVote,
    PeerHello,
    PeerMessage,
    Ping,
    Refused,
    Table,
    Waiting,
    Where,
)
from netsum.host_agent.rendezvous import Identity, Registry
from netsum.protocol.errors import RendezvousError

log = logging.getLogger("netsum.host_agent")

_TICK_S = 0.5
_REPORT_S = 2.0
_FAREWELL_S = 0.5


class PeerEvents(Protocol):
    """What the mesh tells its owner, in the loop's thread; must not block."""

    def abort_received(self, rank: int, message: Abort) -> None: ...
    def where_received(self, rank: int, message: Where) -> None: ...
    def here_received(self, rank: int, message: Here) -> None: ...
    def peer_left(self, rank: int, message: Bye) -> None: ...
    def peer_lost(self, rank: int, reason: str) -> None: ...
    def tick(self) -> None: ...


class Mesh:
    """See above. Invariant: ``peers`` holds the ranks that are connected and have neither said :class:`Bye` nor vanished."""

    def __init__(self, identity: Identity, events: PeerEvents, silence_timeout_s: float) -> None:
        self._identity = identity
        self._events = events
        self._silence_timeout_s = silence_timeout_s
        self._changed = threading.Condition()
        self._peers: dict[int, Connection] = {}
        self._gone: dict[int, str] = {}
        self._votes: dict[int, PathVote] = {}
        self._ring_previous: socket.socket | None = None
        self._registry: Registry | None = None  # rank 0 only
        self._table_sent = False
        self._closing = False
        self._last_report_s = 0.0
        self.run_id = ""
        self.local_host = ""  # the address of this machine that the others reach
        self.ring_sockets: tuple[socket.socket, socket.socket] | None = (
            None  # (to the next rank, from the previous rank)
        )
        self._loop = PeerLoop(f"netsum-peers-{identity.rank}", self, _TICK_S)

    # -- coming about (the caller's thread) ------------------------------------------------------------------------

    def connect(self, host: str, port: int, deadline_s: float, with_ring: bool) -> None:
        """Returns when every rank is connected; ``deadline_s`` in monotonic seconds.

        Raises :class:`JoinRefusedError` or :class:`RendezvousError`.
        """
        try:
            if self._identity.rank == 0:
                addresses = self._host(host, port, deadline_s)
            else:
                addresses = self._join(host, port, deadline_s)
                for rank in range(1, self._identity.rank):
                    self._dial_peer(rank, addresses[rank], "control", deadline_s)
            if with_ring:
                following = (self._identity.rank + 1) % self._identity.world_size
                to_next = self._dial_peer(following, addresses[following], "ring", deadline_s)
            self._wait_connected(with_ring, deadline_s)
        except BaseException:
            self._loop.stop(1.0)
            raise
        if with_ring:
            assert self._ring_previous is not None
            self.ring_sockets = (to_next, self._ring_previous)

    def _host(self, host: str, port: int, deadline_s: float) -> list[tuple[str, int]]:
        me = self._identity
        try:
            listener = listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                ask_holder(me, host, port)
            raise RendezvousError(
                f"rank 0 cannot listen at the rendezvous {host}:{port}: {error.strerror or error}; "
                "NETSUM_RENDEZVOUS or rendezvous= names another one"
            ) from None
        self.local_host = listener.getsockname()[0]
        self.run_id = secrets.token_hex(8)
        self._registry = Registry(me, host, port, socket.gethostname(), os.getpid())
        self._loop.start()
        self._loop.listen(listener)
        with self._changed:
            self._changed.wait_for(lambda: self._table_sent, deadline_s - time.monotonic())
            if not self._table_sent:
                missing = self._registry.missing_ranks
                text = (
                    f"rank 0 at {host}:{port} waited for ranks {missing} of {me.world_size} in vain" + self._refusals()
                )
                for member in self._registry.members():
                    assert isinstance(member, Connection)
                    member.send(Refused("join_timeout", text))
                raise RendezvousError(text)
        return self._registry.addresses

    def _refusals(self) -> str:
        assert self._registry is not None
        return "".join(f"; refused: {note}" for note in self._registry.notes[-4:])

    def _join(self, host: str, port: int, deadline_s: float) -> list[tuple[str, int]]:
        joined = join_rank_zero(self._identity, host, port, deadline_s)
        joined.connection.rank = 0
        self.local_host = joined.listener.getsockname()[0]
        self.run_id = joined.table.run_id
        self._peers[0] = joined.connection
        self._loop.start()
        self._loop.listen(joined.listener)
        self._loop.adopt(joined.connection)
        return [(host, port), *joined.table.addresses[1:]]

    def _dial_peer(self, rank: int, address: tuple[str, int], purpose: str, deadline_s: float) -> socket.socket:
        connection = dial(*address, deadline_s, f"rank {self._identity.rank}: rank {rank}")
        connection.send(PeerHello(self.run_id, self._identity.rank, purpose))
        try:
            answer = connection.wait_message(deadline_s)
        except ConnectionLostError as error:
            answer = Refused("malformed", str(error))
        if not isinstance(answer, Accepted):
            connection.close()
            reason = answer.text if isinstance(answer, Refused) else "no answer in time"
            raise RendezvousError(f"rank {self._identity.rank}: rank {rank} at {address[0]}:{address[1]}: {reason}")
        if purpose == "control":
            with self._changed:
                connection.rank = rank
                self._peers[rank] = connection
            self._loop.adopt(connection)
        return connection.socket

    def _peers_complete(self) -> bool:
        return len(self._peers) + len(self._gone) == self._identity.world_size - 1

    def _wait_connected(self, with_ring: bool, deadline_s: float) -> None:
        def connected() -> bool:
            return self._peers_complete() and (self._ring_previous is not None or not with_ring)

        with self._changed:
            self._changed.wait_for(lambda: connected() or bool(self._gone), deadline_s - time.monotonic())
            if connected():
                return
            missing = sorted(set(range(self._identity.world_size)) - set(self._peers) - {self._identity.rank})
            raise RendezvousError(f"rank {self._identity.rank}: ranks {missing} did not connect {self._gone or ''}")

    # -- use (any thread) ------------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[int]:
        with self._changed:
            return sorted(self._peers)

    def send(self, rank: int, message: PeerMessage) -> None:
        """To one rank; nothing happens when it is gone."""
        with self._changed:
            connection = self._peers.get(rank)
        if connection is not None:
            connection.send(message)
            if connection.wants_write:
                self._loop.wake()

    def broadcast(self, message: PeerMessage) -> None:
        for rank in self.peers:
            self.send(rank, message)

    def negative_vote(self) -> tuple[int, str] | None:
        """(rank, reason) of a rank that cannot use the switch, as far as known now."""
        with self._changed:
            return next(((r, v.text) for r, v in sorted(self._votes.items()) if not v.switch_ok), None)

    def vote(self, own: PathVote, deadline_s: float) -> tuple[int, str] | None:
        """Tells the others whether this rank can use the switch, and waits for their votes: None if all can, else (rank, reason).

        Raises :class:`RendezvousError` when a vote is missing at the deadline.
        """
        me = self._identity
        self.broadcast(own)
        with self._changed:
            self._votes[me.rank] = own
            everybody = set(range(me.world_size))
            self._changed.wait_for(
                lambda: everybody <= set(self._votes) | set(self._gone), deadline_s - time.monotonic()
            )
            missing = sorted(everybody - set(self._votes))
            if missing:
                why = {rank: self._gone.get(rank, "no answer") for rank in missing}
                raise RendezvousError(f"rank {me.rank}: no vote on the path from ranks {why}")
        return self.negative_vote()

    def close(self, bye: Bye) -> None:
        """Says goodbye and closes; at most a second."""
        self.broadcast(bye)
        deadline_s = time.monotonic() + _FAREWELL_S
        with self._changed:
            self._closing = True
            # The others close their side when they have read it: closing first, with their data unread, could reset it away.
            self._changed.wait_for(lambda: not self._peers, deadline_s - time.monotonic())
        self._loop.stop(_FAREWELL_S)

    # -- handler of the loop ---------------------------------------------------------------------------------------

    def received(self, connection: Connection, message: AnyPeerMessage) -> None:
        if isinstance(message, Hello) and connection.rank is None:
            self._admit(connection, message)
        elif isinstance(message, PeerHello) and connection.rank is None:
            self._accept_peer(connection, message)
        elif connection.rank is not None and self._peers.get(connection.rank) is connection:
            self._dispatch(connection.rank, connection, message)

    def _admit(self, connection: Connection, hello: Hello) -> None:
        me = self._identity
        if self._registry is None:
            self._refuse(connection, Refused("malformed", f"rank {me.rank} of job {me.job!r} is not the rendezvous"))
            return
        refused = self._registry.admit(connection, hello, connection.remote, connection.nonce)
        if refused is not None:
            log.warning("rank 0 of job %s refused a worker: %s", me.job, refused.text)
            self._refuse(connection, refused)
            return
        connection.rank = hello.rank
        if not self._registry.complete:
            return
        table = Table(self.run_id, self._registry.addresses)
        with self._changed:
            for member in self._registry.members():
                assert isinstance(member, Connection)
                assert member.rank is not None
                member.send(table)
                self._peers[member.rank] = member
            self._table_sent = True
            self._changed.notify_all()

    def _refuse(self, connection: Connection, refused: Refused) -> None:
        connection.send(refused)
        self._loop.drop(connection)

    def _accept_peer(self, connection: Connection, hello: PeerHello) -> None:
        me = self._identity
        if hello.run_id != self.run_id or not 0 <= hello.rank < me.world_size:
            self._refuse(
                connection, Refused("job_running", f"rank {me.rank} of job {me.job!r} is of another incarnation")
            )
            return
        connection.send(Accepted())
        with self._changed:
            if hello.purpose == "ring":
                self._loop.release(connection)
                self._ring_previous = connection.socket
            else:
                connection.rank = hello.rank
                self._peers[hello.rank] = connection
            self._changed.notify_all()

    def _report(self, registry: Registry) -> None:
        missing, notes = registry.missing_ranks, registry.notes[-4:]
        log.warning("rank 0 of job %s waits for ranks %s%s", self._identity.job, missing, self._refusals())
        for member in registry.members():
            assert isinstance(member, Connection)
            member.send(Waiting(missing, notes))

    def _dispatch(self, rank: int, connection: Connection, message: AnyPeerMessage) -> None:
        match message:
            case Abort():
                self._events.abort_received(rank, message)
            case Where():
                self._events.where_received(rank, message)
            case Here():
                self._events.here_received(rank, message)
            case PathVote():
                with self._changed:
                    self._votes[rank] = message
                    self._changed.notify_all()
            case Bye():
                self._loop.drop(connection)
                self._remove(rank, "left")
                self._events.peer_left(rank, message)
            case _:
                pass  # Ping: that it came is its message

    def lost(self, connection: Connection, reason: str) -> None:
        if self._registry is not None and not self._table_sent:
            rank = self._registry.forget(connection)
            if rank is not None:
                log.warning("rank 0: rank %d went away before the job was complete", rank)
            return
        rank = connection.rank
        if rank is not None and self._peers.get(rank) is connection:
            self._remove(rank, reason)
            if not self._closing:
                self._events.peer_lost(rank, reason)

    def _remove(self, rank: int, reason: str) -> None:
        with self._changed:
            self._peers.pop(rank, None)
            self._gone[rank] = reason
            self._changed.notify_all()

    def tick(self) -> None:
        now_s = time.monotonic()
        if self._registry is not None and not self._table_sent and now_s - self._last_report_s >= _REPORT_S:
            self._last_report_s = now_s
            self._report(self._registry)
        self.broadcast(Ping())
        for connection in list(self._peers.values()):
            silent_s = now_s - connection.last_heard_s
            if silent_s > self._silence_timeout_s:
                self._loop.drop(connection)
                self.lost(connection, f"nothing heard for {silent_s:.0f} s")
        self._events.tick()
