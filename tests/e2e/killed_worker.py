"""Case C29: one of four workers is killed while a tensor is in flight."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import Any, NamedTuple

import numpy as np

import netsum.host_agent as ha
from netsum.protocol.errors import OperationError
from tests.ranks import all_good, run_ranks

KILLED_RANK = 2


class Survivor(NamedTuple):
    """What a surviving rank saw: the error, the seconds from the kill to it, and the tensor (input: ones)."""

    error: OperationError
    after_s: float
    tensor: np.ndarray


def kill_one_of_four(
    switch: str | None, rendezvous: str, *, into_step_s: float, required: bool = False
) -> list[Survivor]:
    """Ranks 0, 1 and 3 are threads, rank 2 a process; SIGKILL hits it ``into_step_s`` after its second allreduce."""
    options: dict[str, Any] = {"job": "test", "world_size": 4, "rendezvous": rendezvous, "required": required}
    script = textwrap.dedent(
        f"""
        import numpy as np, netsum.host_agent as ha
        with ha.connect({switch!r}, rank={KILLED_RANK}, **{options!r}) as agent:
            while True:
                agent.allreduce(np.ones(1_000_000, np.float32))
                print("step", flush=True)
        """
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    killed_s: list[float] = []

    def kill() -> None:
        assert worker.stdout is not None
        for _ in range(2):
            worker.stdout.readline()
        time.sleep(into_step_s)
        killed_s.append(time.monotonic())
        worker.kill()

    def run(rank: int) -> tuple[OperationError, float, np.ndarray]:
        with ha.connect(switch, rank=rank, timeout_s=20, **options) as agent:
            while True:
                x = np.ones(1_000_000, np.float32)
                try:
                    agent.allreduce(x)
                except OperationError as error:
                    return error, time.monotonic(), x
                assert (x == 4).all()

    threading.Thread(target=kill, daemon=True).start()
    try:
        seen = all_good(run_ranks(run, [0, 1, 3]))
        return [Survivor(error, at_s - killed_s[0], x) for error, at_s, x in seen]
    finally:
        worker.kill()
        worker.wait(10)
