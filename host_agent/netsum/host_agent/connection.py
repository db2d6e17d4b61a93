"""One framed TCP connection between two peers. Sending never blocks; reading is either the loop's or, before, the dialler's."""

from __future__ import annotations

import select
import socket
import threading
import time

import msgspec

from netsum.host_agent.peer_messages import MAX_FRAME_BYTES, AnyPeerMessage, PeerMessage, decode_body, encode_frame

_READ_BYTES = 1 << 16


class ConnectionLostError(Exception):
    """The other side closed, reset, or does not speak the protocol; the text says which."""


class Connection:
    """Frames over a non-blocking socket.

    ``rank`` is None until the other side has said who it is. :meth:`send` may be called from any thread; the rest belongs to one.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.rank: int | None = None
        self.nonce = b""
        self.last_heard_s = time.monotonic()
        self._received = bytearray()
        self._unsent = bytearray()
        self._send_lock = threading.Lock()

    @property
    def remote(self) -> str:
        """Address "host:port" of the other side."""
        try:
            host, port = self.socket.getpeername()[:2]
        except OSError:
            return "(closed)"
        return f"{host}:{port}"

    def send(self, message: PeerMessage) -> None:
        """Queues and sends what the socket takes. A lost connection shows at the next read."""
        with self._send_lock:
            self._unsent += encode_frame(message)
            self._send_some()

    def flush(self) -> None:
        with self._send_lock:
            self._send_some()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def _send_some(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def read(self) -> list[AnyPeerMessage]:
        """The complete messages that are there. Raises :class:`ConnectionLostError`."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return self.take()
        except OSError as error:
            raise ConnectionLostError(f"connection lost: {error.strerror or error}") from None
        if not data:
            raise ConnectionLostError("the other side closed the connection")
        self._received += data
        self.last_heard_s = time.monotonic()
        return self.take()

    def take(self, at_most: int | None = None) -> list[AnyPeerMessage]:
        """Messages already received, at most so many. Raises :class:`ConnectionLostError` on a malformed one."""
        messages: list[AnyPeerMessage] = []
        while len(self._received) >= 4 and (at_most is None or len(messages) < at_most):
            length = int.from_bytes(self._received[:4], "big")
            if length > MAX_FRAME_BYTES:
                raise ConnectionLostError("the other side does not speak netsum's peer protocol")
            if len(self._received) < 4 + length:
                break
            try:
                messages.append(decode_body(self._received[4 : 4 + length]))
            except msgspec.DecodeError:
                raise ConnectionLostError("the other side sent a message that is not of the peer protocol") from None
            del self._received[: 4 + length]
        return messages

    def wait_message(self, deadline_s: float) -> AnyPeerMessage | None:
        """The next message, or None at the deadline (monotonic seconds). For use before the loop owns the connection."""
        while True:
            if messages := self.take(at_most=1):
                return messages[0]
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            poller = select.poll()
            poller.register(self.socket, select.POLLIN | (select.POLLOUT if self.wants_write else 0))
            if not poller.poll(max(1, int(remaining_s * 1000))):
                return None
            self.flush()
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLostError(f"connection lost: {error.strerror or error}") from None
            if not data:
                raise ConnectionLostError("the other side closed the connection")
            self._received += data

    def close(self) -> None:
        self.socket.close()
