"""Retransmission timeout from measured round trips (RFC 6298, in integers of microseconds)."""

from __future__ import annotations

_GRANULARITY_US = 1000

# A round trip ends with the slowest worker. Unbounded, one rank's timeouts would lengthen every rank's.
_MAX_RTO_SHARE = 8


class RttEstimator:
    """Invariant: ``min_rto_us <= rto_us <= max_rto_us / 8`` once there is a sample; ``initial_rto_us`` before."""

    def __init__(self, initial_rto_us: int, min_rto_us: int, max_rto_us: int) -> None:
        self.rto_us = initial_rto_us
        self.srtt_us = 0  # 0 before the first sample
        self._rttvar_us = 0
        self._min_rto_us = min_rto_us
        self._max_rto_us = max_rto_us // _MAX_RTO_SHARE
        self._has_sample = False

    def sample(self, rtt_us: int) -> None:
        """``rtt_us``: from the only transmission of a packet to its result (Karn: never of a resent one)."""
        if not self._has_sample:
            self._has_sample = True
            self.srtt_us, self._rttvar_us = rtt_us, rtt_us // 2
        else:
            self._rttvar_us = (3 * self._rttvar_us + abs(self.srtt_us - rtt_us)) // 4
            self.srtt_us = (7 * self.srtt_us + rtt_us) // 8
        rto_us = self.srtt_us + max(4 * self._rttvar_us, _GRANULARITY_US)
        self.rto_us = min(max(rto_us, self._min_rto_us), self._max_rto_us)
