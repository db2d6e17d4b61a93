"""Ring allreduce between the peers over TCP: reduce-scatter, then allgather, each n-1 steps.

An array is cut into n parts. In step s rank r sends part r-s to the next rank and adds (or maximizes) what it receives into part
r-s-1; after n-1 steps rank r holds the whole of part r+1, and n-1 more steps hand the parts around. Each part is reduced along one
fixed order of ranks, so that all ranks hold the same bits also for floating-point types.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SOCKET_BUFFER_BYTES = 1 << 22
_POLL_MS = 1000


class RingInterruptedError(Exception):
    """:meth:`Ring.interrupt` was called."""


class RingNeighbourError(Exception):
    """A neighbour's data connection closed. ``rank``: which neighbour."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class RingTimeoutError(RingNeighbourError):
    """The data connection with a neighbour made no progress in time; some rank, not necessarily that one, is late."""


class Ring:
    """A :class:`~netsum.host_agent.peer_group.PeerGroup` over a connection to the next and one from the previous rank.

    Every wait ends after ``timeout_s`` without a byte of progress.
    """

    def __init__(
        self, rank: int, world_size: int, to_next: socket.socket, from_previous: socket.socket, timeout_s: float
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._next, self._previous = to_next, from_previous
        self._timeout_s = timeout_s
        self._interrupted = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._bytes_out = self._bytes_in = 0
        for sock in (to_next, from_previous):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to_next.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        from_previous.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)

    def allreduce_sum(self, array: NDArray[Any]) -> None:
        """Sum over the ranks, in place; ``array`` 1-D contiguous, any numeric dtype, the same size on all ranks. Integers wrap."""
        self._allreduce(array, np.add)

    def allreduce_max(self, array: NDArray[Any]) -> None:
        """Like :meth:`allreduce_sum` with the maximum."""
        self._allreduce(array, np.maximum)

    def interrupt(self) -> None:
        self._interrupted.set()
        with contextlib.suppress(OSError):  # closed
            self._wake_write.send(b"\0")

    def close(self) -> None:
        self.interrupt()
        for sock in (self._next, self._previous, self._wake_read, self._wake_write):
            sock.close()

    def counters(self) -> dict[str, int]:
        return {"ring_bytes_out": self._bytes_out, "ring_bytes_in": self._bytes_in}

    def _allreduce(self, array: NDArray[Any], combine: np.ufunc) -> None:
        n, rank = self.world_size, self.rank
        bounds = [array.size * i // n for i in range(n + 1)]
        parts = [array[bounds[i] : bounds[i + 1]] for i in range(n)]
        received = np.empty(max(part.size for part in parts), array.dtype)
        for step in range(n - 1):
            mine, target = parts[(rank - step) % n], parts[(rank - step - 1) % n]
            self._exchange(mine, received[: target.size])
            combine(target, received[: target.size], out=target)
        for step in range(n - 1):
            self._exchange(parts[(rank - step + 1) % n], parts[(rank - step) % n])

    def _exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        """Sends to the next and receives from the previous rank at the same time."""
        out, into = outgoing.view(np.uint8).data, incoming.view(np.uint8).data
        deadline_s = time.monotonic() + self._timeout_s
        while out or into:
            progress = self._send(out) if out else 0
            got = self._receive(into) if into else 0
            out, into = out[progress:], into[got:]
            if progress or got:
                deadline_s = time.monotonic() + self._timeout_s
            elif out or into:
                self._wait(bool(out), bool(into), deadline_s)

    def _send(self, out: memoryview) -> int:
        try:
            sent = self._next.send(out)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._neighbour_error((self.rank + 1) % self.world_size, error.strerror or str(error)) from None
        self._bytes_out += sent
        return sent

    def _receive(self, into: memoryview) -> int:
        previous = (self.rank - 1) % self.world_size
        try:
            got = self._previous.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._neighbour_error(previous, error.strerror or str(error)) from None
        if not got:
            raise self._neighbour_error(previous, "it closed its data connection")
        self._bytes_in += got
        return got

    def _wait(self, want_send: bool, want_receive: bool, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if want_send:
            poller.register(self._next, select.POLLOUT)
        if want_receive:
            poller.register(self._previous, select.POLLIN)
        poller.poll(_POLL_MS)
        if self._interrupted.is_set():
            raise RingInterruptedError
        if time.monotonic() > deadline_s:
            rank = (self.rank + (-1 if want_receive else 1)) % self.world_size
            raise RingTimeoutError(
                f"no data {'from' if want_receive else 'to'} rank {rank} for {self._timeout_s:g} s", rank
            )

    def _neighbour_error(self, rank: int, reason: str) -> Exception:
        if self._interrupted.is_set():
            return RingInterruptedError()
        return RingNeighbourError(f"ring connection with rank {rank}: {reason}", rank)
