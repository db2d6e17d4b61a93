"""The one thread of the peer channel: accepts, reads and writes frames, ticks. What messages mean is the handler's business."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from netsum.host_agent.connection import Connection, ConnectionLostError
from netsum.host_agent.peer_messages import PEER_PROTOCOL, AnyPeerMessage, Greeting

log = logging.getLogger("netsum.host_agent")

_INTRODUCTION_S = 10.0


class Handler(Protocol):
    """Called in the loop's thread; must not block."""

    def received(self, connection: Connection, message: AnyPeerMessage) -> None: ...
    def lost(self, connection: Connection, reason: str) -> None: ...
    def tick(self) -> None: ...


class PeerLoop:
    """Selector loop over a listener and connections. All methods but the handler's may be called from any thread."""

    def __init__(self, name: str, handler: Handler, tick_interval_s: float) -> None:
        self._handler = handler
        self._tick_interval_s = tick_interval_s
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._commands: deque[Callable[[], object]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._do(lambda: self._register(listener, selectors.EVENT_READ, None))

    def adopt(self, connection: Connection) -> None:
        """From now on the loop reads this connection; messages it has received already are delivered first."""

        def register() -> None:
            if self._register(connection.socket, selectors.EVENT_READ, connection):
                self._deliver(connection, connection.take)

        self._do(register)

    def release(self, connection: Connection) -> None:
        """Stops watching the connection (handler's thread only); its socket stays open."""
        self._selector.unregister(connection.socket)

    def drop(self, connection: Connection) -> None:
        """Stops watching the connection and closes it (handler's thread only)."""
        if self._watches(connection.socket):
            self._selector.unregister(connection.socket)
        connection.flush()
        connection.close()

    def wake(self) -> None:
        """Something was queued on a connection by another thread."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_write.send(b"\0")

    def stop(self, timeout_s: float) -> None:
        """Ends the thread and closes everything the loop watches."""
        self._stopped = True
        self.wake()
        if self._thread.ident is None:  # never started
            self._close_all()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _do(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self.wake()

    def _register(self, sock: socket.socket, events: int, data: Connection | None) -> bool:
        try:
            self._selector.register(sock, events, data)
        except (ValueError, OSError):  # closed meanwhile
            return False
        return True

    def _watches(self, sock: socket.socket) -> bool:
        return sock.fileno() >= 0 and sock in self._selector.get_map()

    def _drop_mute(self) -> None:
        """Whoever connects and does not say who he is may not occupy a descriptor for ever."""
        too_old_s = time.monotonic() - _INTRODUCTION_S
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.rank is None and key.data.last_heard_s < too_old_s:
                self.drop(key.data)

    def _run(self) -> None:
        next_tick_s = time.monotonic() + self._tick_interval_s
        try:
            while not self._stopped:
                self._watch_writes()
                for key, _ in self._selector.select(max(0.0, next_tick_s - time.monotonic())):
                    self._serve(key)
                while self._commands:
                    self._commands.popleft()()
                if time.monotonic() >= next_tick_s:
                    next_tick_s = time.monotonic() + self._tick_interval_s
                    self._drop_mute()
                    self._handler.tick()
        except Exception:
            log.exception("the peer channel's thread failed")
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake_write.close()

    def _watch_writes(self) -> None:
        for key in list(self._selector.get_map().values()):
            connection = key.data
            if connection is None:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            if events != key.events:
                self._selector.modify(key.fileobj, events, connection)

    def _serve(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif key.data is None:
            self._accept(key.fileobj)  # type: ignore[arg-type]
        elif self._watches(key.fileobj):  # type: ignore[arg-type]  # not dropped by an earlier event of this round
            key.data.flush()
            self._deliver(key.data, key.data.read)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the dialler gave up in between, or descriptors ran out: it will try again
            return
        connection = Connection(sock)
        connection.nonce = os.urandom(16)
        connection.send(Greeting(PEER_PROTOCOL, connection.nonce))
        self._register(sock, selectors.EVENT_READ, connection)

    def _deliver(self, connection: Connection, receive: Callable[[], list[AnyPeerMessage]]) -> None:
        try:
            for message in receive():
                self._handler.received(connection, message)
        except ConnectionLostError as error:
            self.drop(connection)
            self._handler.lost(connection, str(error))
