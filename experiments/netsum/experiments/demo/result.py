"""What a worker reports to the demo. Without torch, so that the command line reads it without loading torch."""

from __future__ import annotations

import msgspec


class WorkerResult(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    steps: int
    seconds: float  # of training
    loss: float  # of the last batch
    accuracy: float  # 0..1, on the test digits
    parameters_sha256: str
    gradient_bytes: int  # of one step
    path: str  # "switch", "ring", or "gloo" for DDP without a hook
    path_reason: str
    wire_bytes: int  # sent by this worker on the switch path, IP and UDP headers included
    packets: int
    retransmissions: int
    pendings: int  # answers of the switch to these: not lost, another rank has not sent its part yet
