"""What a virtual link does to datagrams, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """Probabilities are of each datagram, independently; times in microseconds.

    ``delay_us``: (smallest, largest), drawn evenly: a wide range reorders. ``late_share`` of the datagrams take ``late_us`` longer:
    long enough to arrive several rounds later.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_us: tuple[int, int] = (20, 60)
    late_share: float = 0.0
    late_us: int = 50_000

    def deliveries(self, datagram: bytes, rng: random.Random) -> list[tuple[int, bytes]]:
        """(delay, datagram) of each copy that arrives; empty when it is lost."""
        if rng.random() < self.loss:
            return []
        copies = 2 if rng.random() < self.duplicate else 1
        arrivals = []
        for _ in range(copies):
            delay_us = rng.randint(*self.delay_us)
            if rng.random() < self.late_share:
                delay_us += rng.randint(0, self.late_us)
            body = datagram
            if rng.random() < self.corrupt:
                flipped = bytearray(datagram)
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                body = bytes(flipped)
            arrivals.append((delay_us, body))
        return arrivals
