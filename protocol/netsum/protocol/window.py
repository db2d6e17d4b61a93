"""What a worker has outstanding, and when to send it again (SPEC.md section 5).

Knows slots, numbers and times; knows nothing of tensors, packets' contents or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from netsum.protocol.rto import RttEstimator

_MAX_DOUBLINGS = 6
_FIRST_BURST = 4


class Overdue(Enum):
    """A deadline that passed."""

    SWITCH_SILENT = "switch_silent"
    PEERS_MISSING = "peers_missing"


@dataclass(slots=True)
class _Outstanding:
    number: int  # running number, not reduced
    last_sent_us: int
    send_no: int
    resends: int = 0


class Window:
    """Outstanding packets of a job, at most one for each slot, in the order of their last transmission."""

    def __init__(
        self,
        slots: int,
        *,
        initial_rto_us: int,
        min_rto_us: int,
        max_rto_us: int,
        network_timeout_us: int,
        straggler_timeout_us: int,
    ) -> None:
        self._slots = slots
        self._max_rto_us = max_rto_us
        self._network_timeout_us = network_timeout_us
        self._straggler_timeout_us = straggler_timeout_us
        self.rtt = RttEstimator(initial_rto_us, min_rto_us, max_rto_us)
        self._outstanding: dict[int, _Outstanding] = {}  # by slot, in the order of send_no
        self._send_no = 0
        self._highest_answered = 0
        self._reorder_threshold = max(3, slots // 2)
        self._last_tick_us = 0
        self._backoff = 0
        self._burst = _FIRST_BURST
        self._progress_since_tick = False
        self._heard_us = 0
        self._progress_us = 0
        self._waiting_for: list[int] = []
        self._is_waiting = False

    def __len__(self) -> int:
        return len(self._outstanding)

    @property
    def waiting_for(self) -> Sequence[int]:
        """Ranks of the last PENDING since the last result."""
        return self._waiting_for

    def number_at(self, slot: int) -> int | None:
        """The running number outstanding in ``slot``."""
        entry = self._outstanding.get(slot)
        return None if entry is None else entry.number

    def sent(self, slot: int, number: int, now_us: int) -> None:
        """A first transmission. The slot must be free."""
        assert slot not in self._outstanding
        if not self._outstanding:
            self._heard_us = self._progress_us = now_us
        self._send_no += 1
        self._outstanding[slot] = _Outstanding(number, now_us, self._send_no)

    def answered(self, slot: int, now_us: int) -> None:
        """The result for what is outstanding in ``slot`` is in."""
        entry = self._outstanding.pop(slot)
        if entry.resends == 0:
            self.rtt.sample(now_us - entry.last_sent_us)
            self._highest_answered = max(self._highest_answered, entry.send_no)
        self._heard_us = self._progress_us = now_us
        self._progress_since_tick = True
        self._backoff = 0
        self._is_waiting = False
        self._waiting_for = []

    def pending(self, missing_ranks: list[int], now_us: int) -> None:
        """The switch has our contribution and waits for others."""
        self._heard_us = now_us
        self._is_waiting = True
        self._waiting_for = missing_ranks

    def overdue(self, now_us: int) -> Overdue | None:
        """The deadline that has passed, if one has."""
        if not self._outstanding:
            return None
        if now_us - self._heard_us >= self._network_timeout_us:
            return Overdue.SWITCH_SILENT
        if now_us - self._progress_us >= self._straggler_timeout_us:
            return Overdue.PEERS_MISSING
        return None

    def fast_retransmits(self, now_us: int) -> list[int]:
        """Slots to resend now because results of packets sent later have overtaken them. Marks them as sent."""
        lost = []
        for slot, entry in self._outstanding.items():
            if entry.send_no + self._reorder_threshold > self._highest_answered:
                break
            threshold = self._reorder_threshold << min(entry.resends, _MAX_DOUBLINGS)
            if entry.send_no + threshold <= self._highest_answered:
                lost.append(slot)
        for slot in lost:
            self._resent(slot, now_us)
        return lost

    def timer_retransmits(self, now_us: int) -> list[int]:
        """Slots to resend now because the timer is due. Marks them as sent."""
        if not self._outstanding or now_us < self._timer_us():
            return []
        limit = 1 if self._is_waiting else self._burst
        expired: list[int] = []
        for slot, entry in self._outstanding.items():
            if len(expired) == limit or entry.last_sent_us + self.rtt.rto_us > now_us:
                break
            expired.append(slot)
        for slot in expired:
            self._resent(slot, now_us)
        self._last_tick_us = now_us
        if self._progress_since_tick:
            self._burst = min(2 * self._burst, self._slots)
        else:
            self._burst = _FIRST_BURST
            if self.rtt.rto_us << (self._backoff + 1) <= self._max_rto_us:
                self._backoff += 1
        self._progress_since_tick = False
        return expired

    def clear(self) -> None:
        """Nothing is outstanding any more: whatever still arrives is stale."""
        self._outstanding.clear()

    def next_deadline_us(self) -> int | None:
        """When :meth:`overdue` or :meth:`timer_retransmits` may have something to say; None when nothing is outstanding."""
        if not self._outstanding:
            return None
        return min(
            self._timer_us(), self._heard_us + self._network_timeout_us, self._progress_us + self._straggler_timeout_us
        )

    def _timer_us(self) -> int:
        first = next(iter(self._outstanding.values()))
        return max(first.last_sent_us + self.rtt.rto_us, self._last_tick_us + (self.rtt.rto_us << self._backoff))

    def _resent(self, slot: int, now_us: int) -> None:
        entry = self._outstanding.pop(slot)
        self._send_no += 1
        entry.send_no, entry.last_sent_us, entry.resends = self._send_no, now_us, entry.resends + 1
        self._outstanding[slot] = entry
