"""What the ring path needs from a group of peers. Ours is :class:`netsum.host_agent.ring.Ring`; torch's gloo can stand in."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class PeerGroup(Protocol):
    """Collectives on 1-D contiguous numpy arrays, in place, called by all ranks in the same order from one thread each.

    Integer sums wrap. A failure raises an exception; the group is not used again after one.
    """

    rank: int
    world_size: int

    def allreduce_sum(self, array: NDArray[Any]) -> None: ...
    def allreduce_max(self, array: NDArray[Any]) -> None: ...
    def interrupt(self) -> None:
        """Makes a running collective raise soon, from any thread, where the group can do that; every later one raises."""

    def close(self) -> None: ...
    def counters(self) -> dict[str, int]:
        """Never reset; by name with unit, "ring_bytes_out" where known."""
