"""Runs the ring's operations one after the other, in the order of their submission, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading

from netsum.host_agent import ring_path
from netsum.host_agent.coordinator import Coordinator
from netsum.host_agent.peer_group import PeerGroup
from netsum.host_agent.ring import RingInterruptedError, RingNeighbourError, RingTimeoutError
from netsum.host_agent.tensors import HostTensor
from netsum.host_agent.work import Work

log = logging.getLogger("netsum.host_agent")

_PEER_CHANNEL_S = 0.5  # how long the peer channel may take to say why a data connection broke


class RingQueue:
    """FIFO of operations over a :class:`PeerGroup`. Every operation that is put in finishes, by result or error."""

    def __init__(self, group: PeerGroup, coordinator: Coordinator) -> None:
        self._group = group
        self._coordinator = coordinator
        self._queue: queue.SimpleQueue[tuple[Work, HostTensor] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"netsum-ring-{group.rank}", daemon=True)
        self._thread.start()
        coordinator.on_failure(self._stop)

    def submit(self, work: Work, tensor: HostTensor) -> None:
        self._queue.put((work, tensor))
        if self._stopped.is_set():
            self._fail_queued()

    def counters(self) -> dict[str, int]:
        return self._group.counters()

    def close(self, timeout_s: float) -> None:
        """After the coordinator has failed or nothing is left to do."""
        self._group.interrupt()
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._group.close()

    def _stop(self, text: str) -> None:
        self._stopped.set()
        self._group.interrupt()
        self._fail_queued()

    def _fail_queued(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is None:
                self._queue.put(None)  # the thread's signal to end
                return
            self._coordinator.finish_failed(item[0], "aborted", "the operation was not begun")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, tensor = item
            try:
                self._run_one(work, tensor)
            except Exception as error:
                log.debug("ring operation %d failed", work.description.operation, exc_info=True)
                self._explain(work, error)
            del item, work, tensor  # or the tensor would live until the next operation

    def _run_one(self, work: Work, tensor: HostTensor) -> None:
        if self._stopped.is_set():
            raise RingInterruptedError
        descriptions = ring_path.agree_on_description(self._group, work.description)
        if descriptions is not None:
            listed = "; ".join(f"rank {rank}: {d} as call {d.call}" for rank, d in descriptions.items())
            self._coordinator.finish_failed(work, "mismatch", f"the ranks call different operations: {listed}")
            return
        ring_path.allreduce(self._group, tensor, work.description.op)
        self._coordinator.finish(work)

    def _explain(self, work: Work, error: Exception) -> None:
        """Turns what went wrong into the work's error; the peer channel often knows better than a broken connection."""
        if isinstance(error, RingInterruptedError) or self._stopped.is_set():
            self._coordinator.finish_failed(work, "aborted", "interrupted")
        elif isinstance(error, ring_path.RingOverflowError):
            self._coordinator.finish_failed(work, "overflow", str(error))
        elif not isinstance(error, RingTimeoutError) and self._coordinator.wait_failure(_PEER_CHANNEL_S):
            self._coordinator.finish_failed(work, "aborted", str(error))
        elif isinstance(error, RingNeighbourError):
            self._coordinator.finish_failed(work, "peers_missing", str(error), [error.rank])
        elif isinstance(error, RuntimeError):  # so do torch's process groups say that a peer is gone or late
            self._coordinator.finish_failed(work, "peers_missing", str(error))
        else:
            self._coordinator.finish_failed(work, "failed", f"{type(error).__name__}: {error}")
