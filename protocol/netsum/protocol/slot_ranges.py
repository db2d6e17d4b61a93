"""Ranges of aggregator slots: which belong to whom. First fit at multiples of the range's length, as a buddy allocator would place them."""

from __future__ import annotations

from bisect import insort


class SlotRanges:
    """Hands out ranges of ``total_slots`` slots, each a power of two long.

    Invariants: ranges never overlap; a range starts at a multiple of its length; what is freed can be allocated again at once.
    """

    def __init__(self, total_slots: int) -> None:
        if total_slots < 1:
            raise ValueError(f"total_slots is {total_slots}, at least 1 is needed")
        self.total_slots = total_slots
        self._taken: list[tuple[int, int]] = []  # (first, end) in order

    def allocate(self, slots: int) -> int | None:
        """First slot of a new range of ``slots`` (a power of two), or None when no gap is large enough."""
        if slots < 1 or slots & (slots - 1):
            raise ValueError(f"{slots} slots: a power of two is needed")
        base = 0
        for first, end in self._taken:
            if base + slots <= first:
                break
            base = -(-end // slots) * slots
        if base + slots > self.total_slots:
            return None
        insort(self._taken, (base, base + slots))
        return base

    def free(self, base: int, slots: int) -> None:
        """Gives back a range that :meth:`allocate` returned. Raises :class:`ValueError` for any other."""
        self._taken.remove((base, base + slots))

    @property
    def slots_taken(self) -> int:
        return sum(end - first for first, end in self._taken)
