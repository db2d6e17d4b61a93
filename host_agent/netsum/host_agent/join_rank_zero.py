"""A worker presents itself to rank 0 and waits until all ranks are there. In the caller's thread, with deadlines."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass

import msgspec

from netsum.host_agent.connection import Connection, ConnectionLostError
from netsum.host_agent.dial import NotAPeerError, dial, dial_once, listen
from netsum.host_agent.peer_messages import Hello, Refused, Table, Waiting, hello_proof
from netsum.host_agent.rendezvous import Identity
from netsum.protocol.errors import JoinRefusedError, RendezvousError

log = logging.getLogger("netsum.host_agent")

_ASK_S = 3.0


@dataclass(frozen=True)
class Joined:
    """connection: to rank 0; listener: where the ranks above this one will dial, at an address that rank 0 reaches."""

    connection: Connection
    listener: socket.socket
    table: Table


def join_rank_zero(me: Identity, host: str, port: int, deadline_s: float) -> Joined:
    """``host``, ``port``: the rendezvous; ``deadline_s`` in monotonic seconds.

    Raises :class:`JoinRefusedError`, or :class:`RendezvousError` when the job is not complete in time.
    """
    what = f"rank {me.rank} of job {me.job!r}: rank 0"
    while True:
        connection = dial(host, port, deadline_s, what)
        local_host = connection.socket.getsockname()[0]
        listener = listen(local_host, 0)
        try:
            connection.send(_hello(me, connection, local_host, listener.getsockname()[1]))
            table = _await_table(me, connection, f"{host}:{port}", deadline_s)
        except ConnectionLostError:  # rank 0 ended before the job was complete; another one may come
            listener.close()
            connection.close()
        except BaseException:
            listener.close()
            connection.close()
            raise
        else:
            return Joined(connection, listener, table)


def ask_holder(me: Identity, host: str, port: int) -> None:
    """Rank 0 finds the rendezvous taken: by whom? Raises :class:`JoinRefusedError` when it is rank 0 of a netsum job."""
    deadline_s = time.monotonic() + _ASK_S
    try:
        connection = dial_once(host, port, deadline_s)
    except (OSError, NotAPeerError, ConnectionLostError):
        return
    try:
        connection.send(_hello(me, connection, connection.socket.getsockname()[0], 0))
        answer = connection.wait_message(deadline_s)
    except ConnectionLostError:
        return
    finally:
        connection.close()
    if isinstance(answer, Refused):
        raise JoinRefusedError(answer.text, answer.code)


def _hello(me: Identity, connection: Connection, host: str, port: int) -> Hello:
    hello = Hello(me.job, me.rank, me.world_size, host, port, socket.gethostname(), os.getpid())
    if me.secret is None:
        return hello
    return msgspec.structs.replace(hello, proof=hello_proof(me.secret, connection.nonce, hello))


def _await_table(me: Identity, connection: Connection, address: str, deadline_s: float) -> Table:
    missing: list[int] = []
    notes = ""
    while (message := connection.wait_message(deadline_s)) is not None:
        match message:
            case Table():
                return message
            case Refused(code="join_timeout"):
                raise RendezvousError(f"rank {me.rank}: {message.text}")
            case Refused():
                raise JoinRefusedError(message.text, message.code)
            case Waiting():
                missing = message.missing_ranks
                notes = "".join(f"; {note}" for note in message.notes)
                log.warning("rank %d waits for ranks %s at %s%s", me.rank, missing, address, notes)
            case _:
                raise ConnectionLostError("an unexpected message")
    raise RendezvousError(f"rank {me.rank} waited at {address} for ranks {missing or '(unknown)'} in vain{notes}")
