"""A job on a virtual network: one switch, n workers, seeded links, virtual time. The same seed gives the same run.

Nothing here knows the protocol: it moves datagrams between machines and calls them when their deadlines come.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from netsum.emulator.faults import LinkFaults
from netsum.emulator.machines import Switch, Worker
from netsum.protocol.switch_machine import Address
from netsum.protocol.worker_machine import Completion

SWITCH = -1


@dataclass(order=True, slots=True)
class _Event:
    at_us: int
    order: int
    action: Callable[[], None] = field(compare=False)


class VirtualNetwork:
    """Workers by rank around a switch.

    Attributes:
        now_us: virtual time.
        completions: by rank, in the order in which they happened.
        trace: every datagram handed to a link as (time, sender, receiver, bytes), sender and receiver a rank or :data:`SWITCH`.
    """

    def __init__(
        self,
        switch: Switch,
        workers: Sequence[Worker],
        addresses: Sequence[Address],
        *,
        up: LinkFaults,
        down: LinkFaults,
        seed: int,
    ) -> None:
        self.switch, self.workers = switch, list(workers)
        self.now_us = 0
        self.completions: list[list[Completion]] = [[] for _ in workers]
        self.trace: list[tuple[int, int, int, bytes]] = []
        self._addresses = list(addresses)
        self._rank_of = {address: rank for rank, address in enumerate(addresses)}
        self._up, self._down = up, down
        self._rng = random.Random(seed)
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._wake_at: list[int | None] = [None] * len(self.workers)

    def at(self, at_us: int, action: Callable[[], None]) -> None:
        """Runs ``action`` at virtual time ``at_us``."""
        heapq.heappush(self._events, _Event(at_us, next(self._order), action))

    def kick(self, rank: int) -> None:
        """Polls a worker: call it after ``submit``."""
        worker = self.workers[rank]
        for datagram in worker.poll(self.now_us):
            self.trace.append((self.now_us, rank, SWITCH, datagram))
            for delay_us, arrived in self._up.deliveries(datagram, self._rng):
                self.at(self.now_us + delay_us, lambda a=arrived: self._at_switch(rank, a))  # type: ignore[misc]
        while (completion := worker.take_completion()) is not None:
            self.completions[rank].append(completion)
        deadline_us = worker.next_deadline_us()
        if deadline_us is not None and deadline_us != self._wake_at[rank]:
            self._wake_at[rank] = deadline_us
            self.at(max(deadline_us, self.now_us + 1), lambda: self._wake(rank, deadline_us))

    def _wake(self, rank: int, deadline_us: int) -> None:
        if self._wake_at[rank] == deadline_us:
            self._wake_at[rank] = None
            self.kick(rank)

    def _at_switch(self, rank: int, datagram: bytes) -> None:
        for output in self.switch.handle(datagram, self._addresses[rank]):
            everyone: Sequence[int] = range(len(self.workers))
            receivers = everyone if output.destination is None else [self._rank_of[output.destination]]
            for receiver in receivers:
                self.trace.append((self.now_us, SWITCH, receiver, output.datagram))
                for delay_us, arrived in self._down.deliveries(output.datagram, self._rng):
                    self.at(self.now_us + delay_us, lambda r=receiver, a=arrived: self._at_worker(r, a))  # type: ignore[misc]

    def _at_worker(self, rank: int, datagram: bytes) -> None:
        self.workers[rank].handle(datagram, self.now_us)
        self.kick(rank)

    def run(self, *, until: Callable[[], bool], limit_us: int) -> bool:
        """Runs until ``until()`` holds; False when virtual time passed ``limit_us`` or nothing is left to happen."""
        while not until():
            if not self._events or self._events[0].at_us > limit_us:
                return False
            event = heapq.heappop(self._events)
            self.now_us = max(self.now_us, event.at_us)
            event.action()
        return True

    def run_all(self, operations: int, limit_us: int) -> bool:
        """Runs until every worker has completed ``operations`` operations."""
        return self.run(until=lambda: all(len(c) >= operations for c in self.completions), limit_us=limit_us)
