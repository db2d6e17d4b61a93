"""Opening connections to peers, in the caller's thread and with deadlines."""

from __future__ import annotations

import errno
import socket
import time

from netsum.host_agent.connection import Connection, ConnectionLostError
from netsum.host_agent.peer_messages import PEER_PROTOCOL, Greeting
from netsum.protocol.errors import RendezvousError

_RETRY_S = 0.1
_GREETING_S = 2.0


class NotAPeerError(Exception):
    """Something listens there, but does not greet as a netsum peer does."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def dial_once(host: str, port: int, deadline_s: float) -> Connection:
    """Connects and takes the greeting. Raises OSError (nobody there), :class:`NotAPeerError` or :class:`ConnectionLostError`."""
    sock = socket.create_connection((host, port), timeout=max(0.05, deadline_s - time.monotonic()))
    if (
        sock.getsockname() == sock.getpeername()
    ):  # Linux connects a loopback socket to itself when its own port is the target
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    connection = Connection(sock)
    try:
        greeting = connection.wait_message(min(deadline_s, time.monotonic() + _GREETING_S))
    except ConnectionLostError:
        connection.close()
        raise
    if not isinstance(greeting, Greeting) or greeting.protocol != PEER_PROTOCOL:
        connection.close()
        said = "says nothing" if greeting is None else "speaks another protocol or version"
        raise NotAPeerError(f"something listens at {host}:{port}, but it {said} (expected {PEER_PROTOCOL})")
    connection.nonce = greeting.nonce
    return connection


def dial(host: str, port: int, deadline_s: float, what: str) -> Connection:
    """:func:`dial_once` until it succeeds; :class:`RendezvousError` naming ``what`` at the deadline (monotonic seconds)."""
    reason = "no attempt was made in time"
    while True:
        try:
            return dial_once(host, port, deadline_s)
        except socket.gaierror as error:
            raise RendezvousError(f"{what} at {host}:{port}: cannot resolve {host!r} ({error.strerror})") from None
        except (OSError, NotAPeerError, ConnectionLostError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() + _RETRY_S >= deadline_s:
            raise RendezvousError(f"{what} at {host}:{port} cannot be reached in time: {reason}")
        time.sleep(_RETRY_S)
